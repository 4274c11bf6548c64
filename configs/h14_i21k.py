"""ViT-H/14 on ImageNet-21k, 90 or 30 epochs (arXiv:2010.11929, after table 3).

Run:    python -m vit_jax.train --config=configs/h14_i21k.py --workdir=gs://...
Try:    the same with --config=configs/h14_i21k.py:quick (3 steps, any machine)
Result: not run by us; the authors report 49.06 % upstream precision at 1 on
        validation (github.com/google-research/vision_transformer, issue 62)

Table 3 has no row for H/14 on ImageNet-21k: this is the row of L/16 and L/32, with its
"30/90" epochs (`:epochs=30`). All but that and the variant is as in b16_i21k.py.
"""

from ml_collections import ConfigDict

from configs import b16_i21k
from configs.common import parse_arg, quick

ARGUMENTS = dict(epochs=(90, 30), quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = b16_i21k.get_config()
    c.epochs = arg.epochs
    c.model.variant = "H/14"
    c.model.remat_policy = "full"  # Or mesh.fsdp=16: 16 images a chip must fit 16 GB.
    return quick(c) if arg.quick else c

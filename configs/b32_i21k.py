"""ViT-B/32 on ImageNet-21k, 90 epochs (arXiv:2010.11929, table 3).

Run:    python -m vit_jax.train --config=configs/b32_i21k.py --workdir=gs://...
Try:    the same with --config=configs/b32_i21k.py:quick (3 steps, any machine)
Result: not run by us; the authors report 44.04 % upstream precision at 1 on
        validation (github.com/google-research/vision_transformer, issue 62)

All but the patch size is as in b16_i21k.py.
"""

from ml_collections import ConfigDict

from configs import b16_i21k
from configs.common import parse_arg, quick

ARGUMENTS = dict(quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = b16_i21k.get_config()
    c.model.variant = "B/32"
    return quick(c) if arg.quick else c

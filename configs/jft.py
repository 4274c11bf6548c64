"""ViTs, hybrids and ResNets on JFT-300M or a set like it (arXiv:2010.11929, table 3).

Run:    python -m vit_jax.train --config=configs/jft.py:model=L/16 --workdir=gs://... \\
            --config.data.name=YOURS --config.data.num_classes=...
Try:    the same with --config=configs/jft.py:model=L/16,quick (3 steps, any machine)
Result: not run by us; the paper's results are those after transfer (its table 6)

JFT-300M is not public: give the name of your set, and `--config.data.split=` and
`--config.evals.val=` where its splits have other names. The paper does not state the
loss and the last rate on JFT: they are those of ImageNet-21k, see b16_i21k.py.
"""

from ml_collections import ConfigDict

from configs import b16_i21k
from configs.common import parse_arg, quick

# Epochs and peak rate. Table 3 lists L/16 and R50+L/16 with 7 and with 14 epochs.
ROWS = {
    "B/16": (7, 8e-4),
    "B/32": (7, 8e-4),
    "L/32": (7, 6e-4),
    "L/16": (7, 4e-4),
    "L/16-14ep": (14, 4e-4),
    "H/14": (14, 3e-4),
    "R50x1": (7, 1e-3),
    "R50x2": (7, 1e-3),
    "R101x1": (7, 8e-4),
    "R152x1": (7, 6e-4),
    "R152x2": (7, 6e-4),
    "R50+B/16": (7, 8e-4),
    "R50+B/32": (7, 8e-4),
    "R50+L/32": (7, 2e-4),
    "R50+L/16": (7, 4e-4),
    "R50+L/16-14ep": (14, 4e-4),
}
ARGUMENTS = dict(model=tuple(ROWS), quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = b16_i21k.get_config()
    del c.name
    c.epochs, c.optim.learning_rate = ROWS[arg.model]
    c.optim.weight_decay = 0.1
    c.model.variant = arg.model.removesuffix("-14ep")
    if "/" in c.model.variant:
        c.model.dropout = 0.0
        c.model.remat_policy = "full" if arg.model == "H/14" else "none"
    else:  # ResNets have one linear layer for a head, and no dropout.
        for key in ("pool", "representation_layer", "dropout", "scan"):
            del c.model[key]
    # 18 291 classes: arXiv:1707.02968.
    c.data.update(name="jft300m", split="train", num_classes=18_291)
    c.evals = dict(val="validation")
    return quick(c) if arg.quick else c

"""Axial-ViT and ViT compared by compute (arXiv:2010.11929, D.6).

Run:    python -m vit_jax.study --config=configs/study/axial.py --workdir=runs/axial
Then:   python -m vit_jax.report runs/axial --out=report/
Result: on digits Axial-ViT is better at equal compute, 92.9 and 83.4 % at the largest
        (docs/benchmarks/studies.md)

An Axial-ViT has two blocks for each block of a ViT, so the small networks have half the
depth at equal compute. The paper's figure 13 shows B/32 and B/16 of both. All use mean
pooling.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study import common

NETWORKS = ("vit", "axial")
# Numbers of blocks of the small ViTs; for size=paper, patch sizes.
LEVELS = {"cpu": (2, 4, 8), "gpu": (4, 8, 12), "paper": (32, 16)}
RATES = {"cpu": (2e-3, 4e-3), "gpu": (5e-4, 1e-3), "paper": (8e-4,)}
ARGUMENTS = common.ARGUMENTS | dict(network=NETWORKS, level=0)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    return dict(
        axes=dict(network=NETWORKS, level=LEVELS[arg.size]),
        scores=common.SCORES,
        tune=dict(train={"optim.learning_rate": RATES[arg.size]}),
        seeds=3,
        figures=[dict(x="exaflops", y="5-shot", lines=("network",))],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    level = arg.level or LEVELS[arg.size][0]
    c = common.pretraining(arg)
    axial = arg.network == "axial"
    patch = level if arg.size == "paper" else int(c.model.variant.split("/")[1])
    c.model.variant = f"Axial-B/{patch}" if axial else f"B/{patch}"
    if arg.size != "paper":
        c.model.depth = level // 2 if axial else level
    if axial:
        common.drop(c.model, "pool", "representation_layer", "remat_policy", "scan")
    else:
        c.model.pool, c.model.representation_layer = "gap", False
    return c

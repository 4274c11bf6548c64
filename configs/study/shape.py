"""Depth, width, MLP and patch size, scaled alone or together (arXiv:2010.11929, D.2).

Run:    python -m vit_jax.study --config=configs/study/shape.py --workdir=runs/shape
Then:   python -m vit_jax.report runs/shape --out=report/
Result: on digits depth and width matter little, and longer sequences are worse
        (docs/benchmarks/studies.md)

The paper starts from 8 layers, width 1,024, an MLP of 2,048 and patches of 32 (figure
8). "together" scales all four. The learning rate is chosen for each network.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study import common

SCALED = ("depth", "width", "mlp", "patch", "together")
FACTORS = {"cpu": (0.5, 1.0, 2.0), "gpu": (0.5, 1.0, 2.0), "paper": (1.0, 2.0, 4.0)}
# Depth, width, MLP, patch size and heads for factor 1.
BASES = {
    ("cpu", "digits"): (4, 48, 96, 2, 3),
    ("cpu", "cifar10"): (4, 64, 128, 8, 4),
    ("gpu", "cifar10"): (6, 256, 512, 4, 4),
    ("paper", "jft300m"): (8, 1_024, 2_048, 32, 16),
}
RATES = {"cpu": (1e-3, 4e-3), "gpu": (5e-4, 1e-3), "paper": (8e-4,)}
ARGUMENTS = common.ARGUMENTS | dict(scaled=SCALED, factor=1.0)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    return dict(
        axes=dict(scaled=SCALED, factor=FACTORS[arg.size]),
        scores=common.SCORES,
        tune=dict(train={"optim.learning_rate": RATES[arg.size]}),
        seeds=3,
        figures=[dict(x="exaflops", y="5-shot", lines=("scaled",))],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = common.pretraining(arg)
    depth, width, mlp_dim, patch, heads = BASES[arg.size, common.data_of(arg)]

    def times(part: str) -> float:
        return arg.factor if arg.scaled in (part, "together") else 1.0

    c.model.variant = f"B/{max(1, round(patch / times('patch')))}"
    c.model.depth = max(1, round(depth * times("depth")))
    c.model.width = round(width * times("width"))
    c.model.mlp_dim = round(mlp_dim * times("mlp"))
    c.model.num_heads = max(1, round(heads * times("width")))
    if c.model.width % c.model.num_heads:
        c.model.num_heads = heads
    return c

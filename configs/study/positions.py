"""Position embeddings: none, 1-D, 2-D or relative, and where (arXiv:2010.11929, D.4).

Run:    python -m vit_jax.study --config=configs/study/positions.py --workdir=runs/positions
Then:   python -m vit_jax.report runs/positions --out=report/
Result: on digits none 49.4 %, all others 85.8 to 90.8 %
        (docs/benchmarks/studies.md)

The learning rate is chosen for each kind.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study import common

KINDS = {"none": "none", "1d": "learned", "2d": "learned2d", "relative": "relative"}
PLACES = ("stem", "every", "shared")
# Kind and place of embeddings; "none" has no place, and "relative" acts in every layer.
POSITIONS = ("none", *(f"{k}-{p}" for k in ("1d", "2d") for p in PLACES), "relative")
PUBLISHED = {
    "none": 0.61382,
    "relative": 0.64032,
    "1d-stem": 0.64206,
    "1d-every": 0.63964,
    "1d-shared": 0.64292,
    "2d-stem": 0.64001,
    "2d-every": 0.64046,
    "2d-shared": 0.64022,
}
RATES = {"cpu": (2e-3, 4e-3, 8e-3), "gpu": (5e-4, 1e-3, 2e-3), "paper": (8e-4,)}
ARGUMENTS = common.ARGUMENTS | dict(positions=POSITIONS)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    return dict(
        axes=dict(positions=POSITIONS),
        scores=common.SCORES,
        tune=dict(train={"optim.learning_rate": RATES[arg.size]}),
        seeds=3,
        published=PUBLISHED,
        source="table 8, ViT-B/16, ImageNet 5-shot linear",
        figures=[dict(x="positions", y="5-shot")],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = common.pretraining(arg)
    kind, _, place = arg.positions.partition("-")
    c.model.posemb = KINDS[kind]
    if place:
        c.model.posemb_placement = place
    return c

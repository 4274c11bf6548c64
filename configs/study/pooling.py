"""Class token or mean pooling, at several learning rates (arXiv:2010.11929, D.3).

Run:    python -m vit_jax.study --config=configs/study/pooling.py --workdir=runs/pooling
Then:   python -m vit_jax.report runs/pooling --out=report/
Result: on digits equal at the best rate of each, 88.5 and 89.0 %
        (docs/benchmarks/studies.md)

The paper's figure 9 shows that both are equally good, but not at the same rate. With
size=paper the highest rate is that of table 3, and the others are half and a quarter of
it.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study import common

RATES = {
    "cpu": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "gpu": (2.5e-4, 5e-4, 1e-3, 2e-3),
    "paper": (8e-4, 4e-4, 2e-4),
}
ARGUMENTS = common.ARGUMENTS | dict(pool=("token", "gap"), learning_rate=0.0)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    return dict(
        axes=dict(pool=("token", "gap"), learning_rate=RATES[arg.size]),
        scores=common.SCORES,
        seeds=3,
        figures=[
            dict(
                x="step", y="val/top1", lines=("pool", "learning_rate"), colours="pool"
            ),
            dict(x="learning_rate", y="5-shot", lines=("pool",), log_x=True),
        ],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = common.pretraining(arg)
    c.model.pool = arg.pool
    if arg.pool == "gap" and "representation_layer" in c.model:
        c.model.representation_layer = (
            True  # As with the token, so that only the pooling differs.
        )
    c.optim.learning_rate = arg.learning_rate or RATES[arg.size][0]
    if c.get(
        "total_steps"
    ):  # The curve of figure 9; test images are still scored only at the end.
        often = dict(split=c.evals.val, every=max(1, c.total_steps // 12))
        c.evals = c.evals.to_dict() | dict(val=often)
    return c

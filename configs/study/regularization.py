"""Dropout, weight decay and Polyak averaging (arXiv:2010.11929, table 3 and 4.1).

Run:    python -m vit_jax.study --config=configs/study/regularization.py --workdir=runs/reg
Then:   python -m vit_jax.report runs/reg --out=report/
Result: on digits weight decay of 0.1 and 0.3 is best, and dropout costs 1 to 3 points
        (docs/benchmarks/studies.md)

Values of dropout and weight decay are those of table 3 (JFT, ImageNet-21k, ImageNet).
Both the last parameters and their average over about the last tenth of each run are
evaluated. With size=paper the data set is ImageNet, for which the paper regularises
most.
"""

from ml_collections import ConfigDict

from configs import b16_i1k
from configs.common import parse_arg
from configs.study import common

RATES = {"cpu": (2e-3, 4e-3, 8e-3), "gpu": (5e-4, 1e-3, 2e-3), "paper": (3e-3,)}
ARGUMENTS = common.ARGUMENTS | dict(
    dropout=(0.0, 0.1), weight_decay=(0.0, 0.03, 0.1, 0.3)
)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    return dict(
        axes={name: ARGUMENTS[name] for name in ("dropout", "weight_decay")},
        scores={
            "last": "test/params/top1",
            "averaged": "test/ema/top1",
            "loss": "test/params/loss",
        },
        tune=dict(train={"optim.learning_rate": RATES[arg.size]}),
        seeds=3,
        figures=[
            dict(x="weight_decay", y="last", lines=("dropout",)),
            dict(x="weight_decay", y="averaged", lines=("dropout",)),
        ],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    if arg.size == "paper":
        c = b16_i1k.get_config()
        c.data.split, c.data.num_examples = "train[:99%]", 1_268_355
        c.evals = dict(val="train[99%:]", test="validation")
        steps = c.epochs * c.data.num_examples / c.batch_size
    else:
        c = common.pretraining(arg)
        steps = c.total_steps
    c.model.dropout, c.optim.weight_decay = arg.dropout, arg.weight_decay
    c.ema = dict(decay=max(0.5, 1 - 10 / steps))
    return c

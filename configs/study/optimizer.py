"""Adam or SGD for pretraining a ResNet, then SGD fine-tuning (arXiv:2010.11929, D.1).

Run:    python -m vit_jax.study --config=configs/study/optimizer.py --workdir=runs/optimizer
Then:   python -m vit_jax.report runs/optimizer --out=report/
Result: on digits the order of table 7, Adam better than SGD and large better than
        small; two of six differences are clear (docs/benchmarks/studies.md)

The pretraining rate is chosen for each optimiser. With size=paper SGD's rates are
guesses: the paper does not give them.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study import common

# Units per stage, and width of the stem, of the small networks.
MODELS = {"R50x1": ((1, 1), 32), "R152x2": ((2, 2), 64)}
OPTIMIZERS = ("adam", "sgd")
PUBLISHED = {
    "R50x1,adam": 0.8933,
    "R50x1,sgd": 0.8879,
    "R152x2,adam": 0.9401,
    "R152x2,sgd": 0.9372,
}
RATES = {
    "cpu": dict(adam=(1e-3, 3e-3, 1e-2), sgd=(0.03, 0.1, 0.3)),
    "gpu": dict(adam=(3e-4, 1e-3, 3e-3), sgd=(0.03, 0.1, 0.3)),
    "paper": dict(adam=(1e-3,), sgd=(0.03, 0.1)),
}
ARGUMENTS = common.ARGUMENTS | dict(
    model=tuple(MODELS), optimizer=OPTIMIZERS, stage=common.STAGES
)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    return dict(
        axes=dict(model=tuple(MODELS), optimizer=OPTIMIZERS),
        stages=common.STAGES,
        scores={"fine-tuned": "test/top1", "5-shot": "pretrain:fewshot/5shot"},
        tune=dict(pretrain={"optim.learning_rate": RATES[arg.size]}),
        seeds=3,
        published=PUBLISHED,
        source="table 7, average of five data sets",
        figures=[dict(x="model", y="fine-tuned", lines=("optimizer",))],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    pretrain = arg.stage == "pretrain"
    c = common.pretraining(arg) if pretrain else common.finetuning(arg)
    dtype = c.model.get("dtype", "float32")
    c.model = dict(variant=arg.model, dtype=dtype)
    if arg.size != "paper":
        c.model.stage_depths, c.model.stem_width = MODELS[arg.model]
    if pretrain and arg.optimizer == "sgd":
        common.drop(c.optim, "b1", "b2")
        c.optim.update(name="sgd", momentum=0.9)
    return c

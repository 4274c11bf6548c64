"""SGD with momentum or Adam for fine-tuning a ViT (arXiv:2010.11929, 4.1).

Run:    python -m vit_jax.study --config=configs/study/finetuning.py --workdir=runs/finetuning
Then:   python -m vit_jax.report runs/finetuning --out=report/
Result: on digits Adam 85.2 ± 2.2 %, SGD 82.9 ± 15.1 %: no difference
        (docs/benchmarks/studies.md)

The paper fine-tunes all models with SGD. Here the same pretrained network is fine-tuned
with both, at the best of several rates for each.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study import common

RATES = {
    "cpu": dict(sgd=(0.01, 0.03, 0.1), adam=(1e-4, 3e-4, 1e-3)),
    "gpu": dict(sgd=(0.01, 0.03, 0.1), adam=(3e-5, 1e-4, 3e-4)),
    "paper": dict(sgd=(0.003, 0.01, 0.03, 0.06), adam=(1e-5, 3e-5, 1e-4)),
}
ARGUMENTS = common.ARGUMENTS | dict(optimizer=("sgd", "adam"), stage=common.STAGES)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    return dict(
        axes=dict(optimizer=("sgd", "adam")),
        stages=common.STAGES,
        scores={"fine-tuned": "test/top1"},
        tune=dict(finetune={"optim.learning_rate": RATES[arg.size]}),
        seeds=3,
        figures=[dict(x="optimizer", y="fine-tuned")],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    if arg.stage == "pretrain":
        return common.pretraining(arg)
    c = common.finetuning(arg)
    if arg.optimizer == "adam":
        del c.optim.momentum
        c.optim.name = "adam"
    return c

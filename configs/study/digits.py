"""The study of configs/study/cifar10.py in two minutes, on 8x8 digits (no download).

Run:    python -m vit_jax.study --config=configs/study/digits.py --workdir=runs/digits_study
Then:   python -m vit_jax.report runs/digits_study --out=report/
Result: tests/tools/sweeps/test_scaling.py runs `:quick` on 300 images, all three models; so
        few images and steps say nothing of architectures

With `:quick` runs are of 4 steps.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study.common import PARTS, fewshot, finetune, pretrain

MODELS = {
    "vit": dict(variant="Ti/2", width=48, depth=3, num_heads=3, mlp_dim=96, pool="gap"),
    "hybrid": dict(
        variant="R50+Ti/16", width=48, depth=2, num_heads=3, mlp_dim=96, pool="gap"
    ),
    "resnet": dict(variant="R50x1"),
}
ARGUMENTS = dict(
    model=tuple(MODELS),
    images=(300, 1_200),
    part=PARTS,
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.name = f"study_{arg.model}_{arg.images}_{arg.part}"
    c.data = dict(name="digits", num_classes=10, image_size=(8, 8), channels=1)
    c.model = MODELS[arg.model]
    if arg.model != "vit":
        c.model.update(stage_depths=(1,), stem_width=32)

    if arg.part == "finetune":
        c.data.split, c.data.num_examples = "train[1200:]", 242
        finetune(c, steps=4 if arg.quick else 60, batch_size=32, rate=0.03)
    else:
        c.data.split, c.data.num_examples = f"train[:{arg.images}]", arg.images
        pretrain(c, steps=4 if arg.quick else 300, batch_size=64, rate=2e-3)
        c.evals.fewshot = fewshot("train[1200:]", shots=(5,), seeds=5)
    return c

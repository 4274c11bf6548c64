"""Masked patches, MAE, DINO or labels, by length of training (arXiv:2010.11929, 4.6).

Run:    python -m vit_jax.study --config=configs/study/self_supervision.py \\
            --workdir=runs/self_supervision
Then:   python -m vit_jax.report runs/self_supervision --out=report/
Result: on digits none 28 %, masked patches 49, MAE 70, DINO 29, labels 94 %
        (docs/benchmarks/studies.md; MAE and DINO with an earlier initialisation)

Each method pretrains on the training images without labels ("supervised" with labels;
"none" for one step only), then all are fine-tuned on the few labels of the pool. The
paper reports 79.9 % on ImageNet for masked patch prediction, 2 points above no
pretraining and 4 below labels. With size=paper MAE and DINO use the recipes of their
papers on another data set.
"""

from ml_collections import ConfigDict

from configs import dino, mae, masked_patch
from configs.common import JITTER, parse_arg, small_image_crops
from configs.study import common

METHODS = ("none", "masked_patch", "mae", "dino", "supervised")
STEPS = {
    "cpu": (150, 600, 2_400),
    "gpu": (5_000, 20_000),
    "paper": (100_000, 1_000_000),
}
PUBLISHED = {"none": 0.7791, "masked_patch": 0.799, "supervised": 0.8415}
ARGUMENTS = common.ARGUMENTS | dict(method=METHODS, steps=0, stage=common.STAGES)
RECIPES = dict(masked_patch=masked_patch, mae=mae, dino=dino)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    return dict(
        axes=dict(method=METHODS, steps=STEPS[arg.size]),
        stages=common.STAGES,
        scores={"fine-tuned": "test/top1", "k-NN": "pretrain:knn/top1"},
        tune=dict(finetune={"optim.learning_rate": (0.01, 0.03, 0.1)}),
        seeds=3,
        published={
            f"{name},{STEPS[arg.size][-1]}": number
            for name, number in PUBLISHED.items()
        },
        source="table 5 and section B.1.2, B/16 on ImageNet",
        figures=[dict(x="steps", y="fine-tuned", lines=("method",), log_x=True)],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    if arg.stage == "finetune":
        c = common.finetuning(arg)
        if arg.method == "mae":  # MAE has fixed positions.
            c.model.posemb = "sincos2d_mae"
        return c
    c = common.pretraining(arg)
    labelled = arg.method in ("none", "supervised")
    if not labelled:
        recipe = RECIPES[arg.method].get_config("model=B/16")
        for part in ("task", "optim"):
            c[part] = recipe[part]
        c.model.posemb = recipe.model.get("posemb", "learned")
        c.model.init = recipe.model.get("init", "google")
        c.data.num_classes = 0
        if arg.size == "paper":
            c.data.train_transform = recipe.data.train_transform
            c.batch_size = recipe.batch_size
            common.drop(c.model, "head_bias_init", "representation_layer", "dropout")
        else:
            small(c, arg.method)
    c.epochs, c.total_steps = 0, arg.steps or STEPS[arg.size][0]
    if arg.method == "none":
        c.total_steps = 1
    common.drop(c.optim, "warmup_steps", "warmup_epochs")
    c.optim.warmup_fraction = 0.05
    knn = c.evals.fewshot.to_dict() | dict(kind="knn")
    c.evals = dict(knn={k: v for k, v in knn.items() if k not in ("shots", "seeds")})
    return c


def small(c: ConfigDict, method: str) -> None:
    """Adapts the task of a method to a network of a few blocks and to small images."""
    common.drop(c.optim, "base_learning_rate")
    c.optim.update(learning_rate=2e-3 if method != "dino" else 1e-3, weight_decay=0.05)
    side = c.data.image_size[0]
    if method == "mae":
        c.task.update(decoder_width=48, decoder_depth=2, decoder_num_heads=3)
    elif method == "masked_patch" and c.data.name == "digits":
        c.task.target = "pixels"  # Grey patches of 2x2 have few mean colours.
    elif method == "dino":
        c.task.update(
            num_outputs=256, hidden_dim=128, bottleneck_dim=32, free_gain=True
        )
        c.task.update(teacher_temperature=0.07, teacher_temperature_epochs=0)
        c.task.large_transforms = ("", "")
        c.task.small_transform = ""
        c.optim.freeze, c.optim.freeze_epochs = (), 0
        c.data.train_transform = small_image_crops(side)
        if c.data.name == "cifar10":
            c.task.large_transforms = (JITTER, JITTER)
            c.task.small_transform = JITTER

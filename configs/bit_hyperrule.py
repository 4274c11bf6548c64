"""Fine-tuning of the ResNet baselines by the BiT hyper-rule (arXiv:1912.11370, 3.3).

Run:    python -m vit_jax.train --workdir=gs://... --config.init=CHECKPOINT \\
            --config=configs/bit_hyperrule.py:model=R50x1,dataset=cifar100
Try:    the same with ,quick (3 steps, any machine, no checkpoint)
Result: not run by us

`init` must be set: a workdir, a published BiT checkpoint, or `bit:R50x1`. The rule sets
the length by the number of training images and the resolution by their size, and uses
no weight decay. Add a row to `DATASETS` for your data set.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg, quick

# Number of classes, number of training images, whether they are smaller than 96 x 96
# pixels, split to report on.
DATASETS = {
    "cifar100": (100, 50_000, True, "test"),
    "cifar10": (10, 50_000, True, "test"),
    "imagenet2012": (1_000, 1_281_167, False, "validation"),
    "oxford_iiit_pet": (37, 3_680, False, "test"),
    "oxford_flowers102": (102, 1_020, False, "test"),
}
# Number of training images up to which a schedule applies -> end of the warmup, three
# steps at which the rate is divided by ten, last step.
SCHEDULES = {
    20_000: (100, 200, 300, 400, 500),
    500_000: (500, 3_000, 6_000, 9_000, 10_000),
    float("inf"): (500, 6_000, 12_000, 18_000, 20_000),
}
FILTER = "interpolation='bilinear_plain'"
ARGUMENTS = dict(
    model=("R50x1", "R50x2", "R101x1", "R152x1", "R152x2", "R152x4", "R200x3"),
    dataset=tuple(DATASETS),
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    num_classes, images, small, test = DATASETS[arg.dataset]
    warmup, *drops, end = SCHEDULES[min(n for n in SCHEDULES if images < n)]
    resized, size = (160, 128) if small else (512, 480)
    mixup = "" if images < 20_000 else " | mixup(0.1)"
    c = ConfigDict()
    c.seed = 0
    c.total_steps = end
    c.batch_size = 512
    c.mesh = dict(data=-1)
    c.init = "?"

    c.data = dict(
        name=arg.dataset,
        split="train",
        num_classes=num_classes,
        image_size=(size, size),
        train_transform=f"resize({resized}, {FILTER}) | random_crop | flip{mixup}",
        eval_transform=f"resize({FILTER})",
    )
    c.evals = dict(test=test)

    c.model = dict(variant=arg.model, dtype="bfloat16")
    c.task = dict(loss="softmax")
    c.optim = dict(
        name="sgd",
        momentum=0.9,
        learning_rate=3e-3,
        warmup_steps=warmup,
        # The authors' code drops the rate in the step after each of these.
        schedule=dict(
            name="step", boundaries=tuple(n + 1 for n in drops), decay_rate=0.1
        ),
    )
    c.ema = dict(decay=0.0)

    c.log_every_steps = 50
    c.eval_every_steps = max(100, end // 10)
    c.checkpoint_every_steps = 1_000
    return quick(c) if arg.quick else c

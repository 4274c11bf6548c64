"""Fine-tuning on a task of VTAB-1k (arXiv:2010.11929, tables 2, 4 and 9).

Run:    python -m vit_jax.train --workdir=gs://... --config.init=CHECKPOINT \\
            --config=configs/vtab.py:model=B/16,task=caltech101
All:    python -m vit_jax.transfer --model=CHECKPOINT --dataset=vtab, which runs the 19
        tasks with three seeds each and takes the means
Try:    the same with ,quick (3 steps, any machine, no checkpoint)
Result: not run by us; the paper's B/16 is not among those of its table 9, whose H/14
        from JFT reaches 77.63 % on average

1,000 images are trained on; the rate of table 4 is stated without a sweep. Warmup and
each task's transforms are those of the authors' VTAB code.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg, quick

# Classes; whether trained on random crops, and mirrored.
TASKS = {
    "caltech101": (102, True, True),
    "cifar100": (100, True, True),
    "dtd": (47, True, True),
    "flowers102": (102, True, True),
    "pets": (37, True, True),
    "sun397": (397, True, True),
    "svhn": (10, True, True),
    "camelyon": (2, True, True),
    "eurosat": (10, True, True),
    "resisc45": (45, True, True),
    "retinopathy": (5, True, True),
    "clevr_count": (8, False, True),
    "clevr_distance": (6, False, True),
    "dmlab": (6, False, True),
    "dsprites_position": (16, False, False),
    "dsprites_orientation": (16, True, False),
    "kitti_distance": (4, False, True),
    "norb_azimuth": (18, True, False),
    "norb_elevation": (9, True, True),
}
ARGUMENTS = dict(
    model=("B/16", "B/32", "L/16", "L/32", "H/14"),
    task=tuple(TASKS),
    resolution=0,  # 0: 384, or 518 for H/14.
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    num_classes, crop, flip = TASKS[arg.task]
    size = arg.resolution or (518 if arg.model == "H/14" else 384)
    resized = round(size * 448 / 384)
    transform = f"resize(({resized}, {resized})) | random_crop" if crop else "resize"
    c = ConfigDict()
    c.seed = 0
    c.total_steps = 2_500
    c.batch_size = 512
    c.mesh = dict(data=-1)
    c.init = "?"

    c.data = dict(
        name=f"vtab/{arg.task}",
        split="train800val200",
        num_classes=num_classes,
        image_size=(size, size),
        train_transform=f"{transform} | flip" if flip else transform,
        eval_transform="resize",
    )
    c.evals = dict(test="test")

    c.model = dict(
        variant=arg.model,
        pool="token",
        representation_layer=False,
        dropout=0.0,
        dtype="bfloat16",
    )
    c.task = dict(loss="softmax")
    c.optim = dict(
        name="sgd",
        momentum=0.9,
        learning_rate=0.01,
        warmup_steps=200,
        schedule="cosine",
        weight_decay=0.0,
        grad_clip_norm=1.0,
    )
    c.ema = dict(decay=0.0)

    c.log_every_steps = 50
    c.eval_every_steps = 0
    c.checkpoint_every_steps = 250
    return quick(c) if arg.quick else c

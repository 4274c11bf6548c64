"""DINO: ViT without labels on ImageNet-1k (arXiv:2104.14294), or on CIFAR-10.

Run:    python -m vit_jax.train --config=configs/dino.py --workdir=gs://...
        python -m vit_jax.train --config=configs/dino.py:data=cifar10 --workdir=runs/dino
Try:    the same with --config=configs/dino.py:quick (3 steps, any machine)
Result: not run by us on ImageNet; the authors report for S/16 after 100 epochs 69.3 %
        (k-NN) and 74.0 % (linear), after 300 epochs 73.3 % and 76.0 %

The model of a workdir is the teacher. The last layer of the head is frozen in the first
epoch; unlike in the original, the optimiser's moments for it are updated meanwhile.
`interpolation='fast'` in multi_crop takes a quarter of the loader's time.
`:data=FOLDER` reads photographs, of any depth. `:data=cifar10` trains a network that fits
a CPU, with crops and temperatures of arXiv:2210.07240's code.
"""

from ml_collections import ConfigDict

from configs.common import (
    DINO_TRANSFORMS,
    bicubic_crop,
    cifar10,
    parse_arg,
    quick,
    shrink_dino,
    small_image_crops,
    use_folder,
)

ARGUMENTS = dict(
    model=("S/16", "S/8", "B/16", "B/8", "L/16"),
    data=("imagenet", "cifar10", "FOLDER"),
    epochs=(100, 300, 800),
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.seed = 0
    c.epochs = arg.epochs
    c.batch_size = 1024
    c.mesh = dict(data=-1)

    c.data = dict(
        name="imagenet2012",
        split="train",
        num_examples=1_281_167,
        num_classes=0,
        image_size=(224, 224),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        train_transform=(
            "multi_crop(small_size=96, num_small=8, area=(0.4, 1.0), "
            "small_area=(0.05, 0.4))"
        ),
        eval_transform=bicubic_crop(256),
    )
    c.evals = dict(knn=dict(kind="knn", test="validation", every_epochs=20))

    c.model = dict(
        variant=arg.model,
        activation="gelu",
        init="timm",
        drop_path_rate=0.1,
        posemb_resize="bicubic_dino",
        dtype="bfloat16",
    )
    c.task = dict(
        name="dino",
        num_outputs=65_536,
        student_temperature=0.1,
        center_momentum=0.9,
        teacher_momentum=0.996,
        teacher_temperature=0.04,
        teacher_temperature_start=0.04,
        **DINO_TRANSFORMS,
    )
    c.optim = dict(
        name="adam",
        base_learning_rate=5e-4,
        warmup_epochs=10,
        warmup_ends_at_peak=True,
        schedule=dict(name="cosine", end_learning_rate=1e-6),
        weight_decay=0.04,
        weight_decay_end=0.4,
        # All parameters with two or more axes, also the class token and the positions.
        weight_decay_mask=(r"/kernel$", r"(cls|pos_embedding|last_layer|gain)$"),
        grad_clip_norm_per_parameter=3.0,
        freeze=(r"head/(last_layer|gain)$",),
        freeze_epochs=1,
    )
    if arg.epochs > 100:
        c.task.update(teacher_temperature=0.07, teacher_temperature_epochs=30)
        c.task.free_gain = arg.model.startswith("S")
    c.ema = dict(decay=0.0)  # The teacher already is a moving average.

    c.log_every_steps = 50
    c.checkpoint_every_epochs = 1

    use_folder(arg.data, c)
    if arg.data == "cifar10":
        cifar10(c)
        c.data.train_transform = small_image_crops(32)
        c.task.update(num_outputs=1_024, hidden_dim=512, free_gain=True)
        c.task.update(teacher_temperature=0.07, teacher_temperature_epochs=10)
    if arg.quick:
        quick(c)
        shrink_dino(c)
    return c

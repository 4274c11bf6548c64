"""A ViT from scratch on CIFAR-10 at 32x32, with a convolutional stem.

Data:   `tfds build cifar10 --file_format=array_record`, or CIFAR-10 prepared by TFDS in
        ArrayRecord in any other way; set --config.data.data_dir= to its folder.
Run:    python -m vit_jax.train --config=configs/cifar10.py:size=cpu --workdir=runs/cifar10
        (two CPU cores, 30 minutes; size=cpu,minutes=120 trains longer),
        or --config=configs/cifar10.py (one GPU)
Result: cpu: 88.99 % top-1 (one seed), 89.97 over flips; gpu: not run by us;
        size=small, a plain ViT with Adam: 66.4 % after 12 epochs (docs/benchmarks/from_scratch.md)

The optimiser is Muon. A block follows convolutions with BatchNorm (arXiv:2106.14881), the first of
which whitens windows of pixels (arXiv:2404.00498).
"""

from ml_collections import ConfigDict

from configs.common import parse_arg, quick

ARGUMENTS = {
    "size": ("gpu", "cpu", "small"),
    "minutes": 30.0,  # On two idle cores, for size=cpu.
    "mixup": False,
    "quick": False,
}
EPOCHS_A_MINUTE = 8 / 30
# Depth, width, heads, MLP; epochs; drop rate of the last block.
SIZES = {
    "gpu": ((7, 384, 6, 1536), 300, 0.1),
    "cpu": ((1, 192, 3, 384), 0, 0.0),
    "small": ((6, 96, 3, 192), 12, 0.0),
}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    (depth, width, num_heads, mlp_dim), epochs, drop = SIZES[arg.size]
    plain = arg.size == "small"
    mixup = " | mixup(0.8)" if arg.mixup else ""
    shift = 2 if arg.size == "cpu" else 4  # Few epochs need less augmentation.
    c = ConfigDict()
    c.name = "cifar10"
    c.seed = 0
    c.epochs = epochs or EPOCHS_A_MINUTE * arg.minutes
    c.batch_size = 128
    c.mesh = dict(data=-1)

    c.data = dict(
        name="cifar10",
        split="train",
        num_examples=50_000,
        num_classes=10,
        image_size=(32, 32),
        train_transform=f"flip | pad_crop({shift}){mixup}",
    )
    c.evals = dict(test="test")

    c.model = dict(
        variant="Ti/4" if plain else "C+Ti/4",
        depth=depth,
        width=width,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        pool="gap",
        drop_path_rate=drop,
    )
    if plain:
        c.optim = dict(
            name="adam",
            learning_rate=1e-3,
            warmup_fraction=0.05,
            schedule="cosine",
            weight_decay=0.1,
            grad_clip_norm=1.0,
        )
    else:
        c.model.stem_widths = (64, 128, width, width)
        c.model.stem_strides = (2, 1, 2, 1)
        c.model.stem_norm = "batch"
        c.model.stem_whitening = 2
        c.task = dict(label_smoothing=0.1)
        c.optim = dict(
            name="muon",
            learning_rate=3e-3,
            warmup_fraction=0.05,
            schedule="linear",
            weight_decay=0.05,
        )
        c.ema = dict(decay=0.0)  # The rate falls to 0, so an average would not help.

    c.log_every_steps = 50
    c.eval_every_epochs = 1 if plain else 5
    c.checkpoint_every_epochs = 1 if plain else 5
    return quick(c) if arg.quick else c

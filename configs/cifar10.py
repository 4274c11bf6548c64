"""A ViT from scratch on CIFAR-10 at 32x32 with patch 4.

Data:   `tfds build cifar10 --file_format=array_record`, or any TFDS preparation of it in
        ArrayRecord; --config.data.data_dir= says where.
Run:    python -m vit_jax.train --config=configs/cifar10.py --workdir=runs/cifar10
        (one GPU), or --config=configs/cifar10.py:size=small (a few CPU cores)
Result: full: not run by us; small: 66.4 % top-1 after 12 epochs (docs/benchmarks.md)
"""

from ml_collections import ConfigDict

from configs.common import parse_arg, quick

ARGUMENTS = {"size": ("full", "small"), "mixup": False, "quick": False}
# Depth, width, heads, MLP; epochs; drop rate of the last block.
SIZES = {
    "full": ((7, 384, 6, 1536), 300, 0.1),
    "small": ((6, 96, 3, 192), 12, 0.0),
}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    (depth, width, num_heads, mlp_dim), epochs, drop = SIZES[arg.size]
    mixup = " | mixup(0.8)" if arg.mixup else ""
    c = ConfigDict()
    c.name = "cifar10"
    c.seed = 0
    c.epochs = epochs
    c.batch_size = 128
    c.mesh = dict(data=-1)

    c.data = dict(
        name="cifar10",
        split="train",
        num_examples=50_000,
        num_classes=10,
        image_size=(32, 32),
        train_transform=f"flip | pad_crop(4){mixup}",
    )
    c.evals = dict(test="test")

    c.model = dict(
        variant="Ti/4",
        depth=depth,
        width=width,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        pool="gap",
        drop_path_rate=drop,
    )
    c.optim = dict(
        name="adam",
        learning_rate=1e-3,
        warmup_fraction=0.05,
        schedule="cosine",
        weight_decay=0.1,
        grad_clip_norm=1.0,
    )

    c.log_every_steps = 50
    c.eval_every_epochs = 1
    c.checkpoint_every_epochs = 1
    return quick(c) if arg.quick else c

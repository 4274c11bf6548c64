"""DINO: ViT without labels on ImageNet-1k (arXiv:2104.14294), or on CIFAR-10.

Run:    python -m vit_jax.train --config=configs/dino.py --workdir=gs://...
        python -m vit_jax.train --config=configs/dino.py:data=cifar10 --workdir=runs/dino
Try:    the same with --config=configs/dino.py:quick (3 steps, any machine)
Result: not run by us on ImageNet; the authors report for S/16 after 100 epochs 69.3 %
        (k-NN) and 74.0 % (linear), after 300 epochs 73.3 % and 76.0 %
        (github.com/facebookresearch/dino, README). CIFAR-10: docs/benchmarks.md

A workdir is a model: its network is the teacher. The last layer of the head does not
move in the first epoch, and each parameter's gradient is clipped by itself.
"""

from ml_collections import ConfigDict

from configs.common import images_of, parse_arg, quick

ARGUMENTS = dict(
    model=("S/16", "S/8", "B/16", "B/8", "L/16"),
    data=("imagenet", "cifar10"),
    quick=False,
)

JITTER = "flip | color_jitter(0.4, 0.4, 0.2, 0.1, p=0.8) | grayscale(0.2)"


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.seed, c.epochs, c.batch_size = 0, 100, 1024

    c.model = dict(variant=arg.model, activation="gelu", drop_path_rate=0.1)
    c.model.update(posemb_resize="bicubic_dino", dtype="bfloat16")
    images_of(arg.data, c)
    del c.evals.val  # The task has no metrics of held-out images.
    c.data.train_transform = (
        "multi_crop(small_size=96, num_small=8, area=(0.4, 1.0), "
        "small_area=(0.05, 0.4))"
    )
    c.evals.knn.every_epochs = 10
    c.task = dict(name="dino", num_outputs=65_536, teacher_momentum=0.996)
    c.task.update(teacher_temperature=0.04, teacher_temperature_start=0.04)
    c.task.large_transforms = (
        f"{JITTER} | gaussian_blur(1.0)",
        f"{JITTER} | gaussian_blur(0.1) | solarize(0.2)",
    )
    c.task.small_transform = f"{JITTER} | gaussian_blur(0.5)"

    c.optim = dict(name="adam", base_learning_rate=5e-4, warmup_epochs=10)
    c.optim.warmup_ends_at_peak = True  # As its code has it.
    c.optim.schedule = dict(name="cosine", end_learning_rate=1e-6)
    # All parameters of two axes and more: also the class token and the positions.
    c.optim.weight_decay, c.optim.weight_decay_end = 0.04, 0.4
    c.optim.weight_decay_mask = (r"/kernel$", r"(cls|pos_embedding|last_layer)$")
    c.optim.grad_clip_norm_per_parameter = 3.0
    c.optim.freeze, c.optim.freeze_epochs = (r"head/last_layer$",), 1
    c.ema = dict(decay=0.0)  # The teacher is one.
    c.log_every_steps = 50
    c.checkpoint_every_epochs = 1

    if arg.data == "cifar10":
        on_cifar10(c)
    if arg.quick:
        quick(c)
        c.task.update(num_outputs=64, hidden_dim=32, bottleneck_dim=16)
        side = c.data.image_size[0] // 2
        c.data.train_transform = f"multi_crop(small_size={side}, num_small=2)"
    return c


def on_cifar10(c: ConfigDict) -> None:
    """Changes what github.com/hananshafi/vits-for-small-scale-datasets has else."""
    c.epochs, c.evals.knn.every_epochs = 20, 5
    c.data.train_transform = (
        "multi_crop(small_size=16, num_small=4, area=(0.5, 1.0), small_area=(0.2, 0.5))"
    )
    c.task.update(num_outputs=1_024, hidden_dim=512, free_gain=True)
    c.task.update(teacher_temperature=0.07, teacher_temperature_epochs=5)
    c.optim.warmup_epochs = 2

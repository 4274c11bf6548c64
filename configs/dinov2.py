"""DINOv2: ViT without labels (arXiv:2304.07193) on ImageNet-1k, ImageNet-22k or CIFAR-10.

Run:    python -m vit_jax.train --config=configs/dinov2.py:model=L/16 --workdir=gs://...
        or :model=g/14,length=long; :data=cifar10; :stage=high_resolution (from a run)
Try:    the same with --config=configs/dinov2.py:quick (3 steps, any machine)
Result: not run by us on ImageNet; the authors report for L/16, short, 81.6 % (k-NN) and
        82.9 % (linear), for L/14, long, 82.0 % and 84.5 % (README of the code)

Numbers are those of facebookresearch/dinov2 b8931f7: ssl_default_config.yaml with
vitl16_short.yaml (ImageNet-1k), vitl14.yaml and vitg14.yaml (long: ImageNet-22k); the
authors distil S and B. The last stage is not published: section 5 and appendix B.2 have
10,000 steps at 518 pixels, compressed schedules and a smaller rate. Chosen here: a
tenth of it, larger small crops, `:data=cifar10` or FOLDER (photographs without labels),
and draws per images of one of 256 chips.
"""

from ml_collections import ConfigDict

from configs.common import (
    DINOV2_TASK,
    bicubic_crop,
    cifar10,
    dinov2_crops,
    dinov2_optim,
    parse_arg,
    quick,
    shrink_dino,
    small_image_crops,
    use_folder,
)

ARGUMENTS = dict(
    model=("L/16", "S/14", "B/14", "L/14", "g/14"),
    length=("short", "long"),
    stage=("pretrain", "high_resolution"),
    registers=(0, 4),
    data=("imagenet", "cifar10", "FOLDER"),
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    long, patch = arg.length == "long", int(arg.model.partition("/")[2])
    group = 12 if long else 8  # Batch size per chip, with 256 chips.
    c = ConfigDict(dict(seed=0, total_steps=625_000 if long else 125_000))
    c.batch_size = 256 * group
    c.mesh = dict(data=-1)
    c.data = dict(
        name="imagenet21k" if long else "imagenet2012",
        split="full" if long else "train",
        num_examples=0 if long else 1_281_167,
        num_classes=0,
        image_size=(224, 224),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        train_transform=dinov2_crops(224, patch),
        eval_transform=bicubic_crop(256),
    )
    c.evals = dict(knn=dict(kind="knn", test="validation", every=12_500))
    c.evals.knn.name = "imagenet2012" if long else ""
    c.model = dict(
        variant=arg.model,
        activation="gelu",
        init="dinov2",
        layer_scale_init=1e-5,
        num_register_tokens=arg.registers,
        posemb_resize="bicubic" if arg.registers else "bicubic_dino",
        drop_path_rate=0.4 if long else 0.3,
        drop_path_schedule="constant",
        drop_path_group=2 * group,
        dtype="bfloat16",
        scan=None,
    )
    if arg.model == "g/14":  # Its sizes differ from ViT's g/14.
        c.model.update(activation="swiglu", width=1_536, num_heads=24, mlp_dim=4_096)
        c.model.remat_policy = "full"
        c.mesh.fsdp = 16  # The training state does not fit a chip of 16 GB.
    elif arg.model == "L/14" and long:
        c.model.update(activation="swiglu", mlp_dim=2_736, remat_policy="full")
    c.task = dict(
        name="dinov2",
        num_outputs=131_072 if long else 65_536,
        bottleneck_dim=384 if long else 256,
        patch_bottleneck_dim=256 if long else 0,
        separate_heads=long,
        free_gain=True,
        centering="sinkhorn" if long else "center",
        koleo_group=group if arg.model == "g/14" else 32 if long else 64,
        mask_group=group,
        teacher_momentum=0.994 if long else 0.992,
        teacher_temperature_steps=37_500,
        **DINOV2_TASK,
    )
    c.optim = dinov2_optim(
        c,
        rate=2e-4 if long else 4e-3,
        layer_decay=0.0 if long else 0.9,
        schedule=dict(name="cosine", end_learning_rate=1e-6),
        warmup_steps=100_000 if long else 12_500,
        weight_decay_end=0.2 if long else 0.4,
        freeze_steps=1_250,
    )
    c.ema = dict(decay=0.0)  # The teacher already is a moving average.
    c.update(log_every_steps=50, checkpoint_every_steps=3_750)
    if arg.stage == "high_resolution":
        side, part = 37 * patch, 10_000 / c.total_steps
        c.data.image_size = (side, side)
        c.data.train_transform = dinov2_crops(side, patch, 96 * side // 224)
        c.data.eval_transform = bicubic_crop(side * 8 // 7)
        c.model.remat_policy = "full"
        c.task.teacher_temperature_steps = round(37_500 * part)
        c.optim.warmup_steps = round(c.optim.warmup_steps * part)
        c.optim.freeze_steps = round(1_250 * part)
        c.optim.learning_rate /= 10
        c.total_steps = 10_000
    use_folder(arg.data, c)
    if arg.data == "cifar10":
        cifar10(c)
        c.update(total_steps=1_200, batch_size=128, checkpoint_every_steps=200)
        c.model.update(width=128, num_heads=4, mlp_dim=256, drop_path_rate=0.1)
        c.data.train_transform = small_image_crops(32)
        c.task.update(num_outputs=1_024, hidden_dim=512, teacher_temperature=0.04)
        c.optim.update(learning_rate=1e-3, layer_decay=0.0, learning_rate_factors=())
        c.optim.update(warmup_steps=120, freeze_steps=40)
    if arg.quick:
        quick(c)
        shrink_dino(c)
    return c

"""DINOv3 with Gram anchoring on ImageNet-1k: ViT without labels (arXiv:2508.10104).

Run:    python -m vit_jax.train --config=configs/dinov3.py:model=L/16 --workdir=gs://...
        then with :stage=gram --config.init=WORKDIR, and from there :stage=high_resolution
Try:    the same with --config=configs/dinov3.py:quick (3 steps, any machine)
Result: not run by us; the authors report 82.0 % (k-NN), 83.5 % (linear) for L/16

Numbers are those of facebookresearch/dinov3 6876159: vitl_im1k_lin834.yaml; for
`:schedule=constant` dinov3_vit7b16_pretrain.yaml (rate, momentum and decay are constant
after a warmup of a tenth, without its end point); for `:stage=gram`
dinov3_vit7b16_gram_anchor.yaml (continues a run; an anchor, at first its teacher, gets
the same crops at twice the size); for `:stage=high_resolution`
dinov3_vit7b16_high_res_adapt.yaml (each step draws one of five pairs of sizes). Choices
of this project: crops and networks of the first stage; 30,000 steps of `gram` (in the
original until dense features are best); small crops of 160, not 168, a linear warmup
and evaluation at 512 in the last stage; draws per 8 images (33 % of a masked crop, not
30). `:data=FOLDER` reads photographs without labels.
"""

from ml_collections import ConfigDict

from configs.common import (
    DINOV2_TASK,
    GRAM_TRANSFORMS,
    bicubic_crop,
    crops_of_sizes,
    dinov2_crops,
    dinov2_optim,
    parse_arg,
    quick,
    shrink_dino,
    use_folder,
)

ARGUMENTS = dict(
    model=("L/16", "S/16", "B/16"),
    stage=("pretrain", "gram", "high_resolution"),
    schedule=("cosine", "constant"),
    data=("imagenet", "FOLDER"),
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    large, gram = arg.stage == "high_resolution", arg.stage != "pretrain"
    c = ConfigDict(dict(seed=0, total_steps=30_000 if gram else 125_000))
    c.batch_size = 2_048
    c.mesh = dict(data=-1)
    c.data = dict(
        name="imagenet2012",
        split="train",
        num_examples=1_281_167,
        num_classes=0,
        image_size=(224, 224),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        train_transform=dinov2_crops(448 if gram else 224, 16),
        eval_transform=bicubic_crop(256),
    )
    c.evals = dict(knn=dict(kind="knn", test="validation", every=12_500))
    c.model = dict(
        variant=arg.model,
        activation="gelu",
        posemb="none",
        rope="centered",
        layer_scale_init=1e-5,
        init="timm",
        drop_path_rate=0.3,
        drop_path_schedule="constant",
        drop_path_group=16,
        dtype="bfloat16",
        scan=None,
    )
    c.task = dict(
        name="dinov2",
        num_outputs=65_536,
        weight_norm=False,
        koleo_group=64,
        mask_group=8,
        mask_exact=True,
        teacher_momentum=0.992,
        teacher_temperature_steps=37_500,
        **DINOV2_TASK,
    )
    c.optim = dinov2_optim(  # The files have rates for 64 images: 1,024 need 4 times.
        c,
        rate=4 * dict(pretrain=1e-3, gram=3e-5, high_resolution=1.25e-5)[arg.stage],
        layer_decay=0.98 if gram else 0.9,
        schedule=dict(name="cosine", end_learning_rate=1e-6),
        warmup_steps=dict(pretrain=12_500, gram=0, high_resolution=10_000)[arg.stage],
        weight_decay_end=0.4,
        freeze_steps=1_250,
    )
    c.optim.weight_decay_mask = (r"/kernel$", r"(cls|mask_token|last_layer)$")
    c.optim.freeze = (r"head/last_layer$",)
    c.ema = dict(decay=0.0)  # The teacher already is a moving average.
    c.update(log_every_steps=50, checkpoint_every_steps=3_750)
    if arg.schedule == "constant" or gram:
        c.optim.schedule = dict(name="constant")
        c.optim.update(weight_decay_end=0, freeze_steps=625, warmup_ends_at_peak=False)
        c.task.update(teacher_momentum=0.994, teacher_momentum_end=0.994)
        c.task.teacher_temperature_steps = 12_501
    if gram:
        c.model.update(rope_rescale=2.0, drop_path_rate=0.4)
        c.task.update(GRAM_TRANSFORMS, koleo_group=16, gram_weight=2.0, gram_scale=2.0)
        c.task.update(teacher_momentum=0.999, teacher_momentum_end=0.999)
        c.task.update(teacher_temperature_start=0.07, teacher_temperature_steps=0)
        c.task.small_weight_end = 0.5
        c.optim.update(freeze=(), freeze_steps=0, b2=0.99, grad_clip_norm_per_part=30.0)
    if arg.stage == "gram":
        c.task.update(gram_every_steps=10_000, gram_updates=3)
        c.task.update(gram_warmup_steps=1_000, small_weight_steps=1_000)
    if large:
        c.data.image_size = (512, 512)
        c.data.eval_transform = bicubic_crop(585)
        c.data.train_transform = crops_of_sizes(
            sizes=((768, 112), (1152, 112), (1152, 160), (1152, 224), (1152, 336)),
            shares=(0.3, 0.3, 0.3, 0.05, 0.05),
        )
        c.model.remat_policy = "full"
        c.task.update(gram_weight=1.5, gram_scale=1.5, start_from_teacher=True)
        c.task.small_weight = 0.5
    use_folder(arg.data, c)
    if arg.quick:
        quick(c)
        shrink_dino(c, scale=2 if gram else 1)
        if large:
            c.data.train_transform = crops_of_sizes(((48, 16), (96, 32)), (3, 2), 2)
    return c

"""DINOv3's largest network, ViT-7B/16, without labels: first stage (arXiv:2508.10104).

Run:    python -m vit_jax.train --config=configs/dinov3_7b.py --workdir=gs://... \\
            --config.data.name=YOURS
Try:    the same with --config=configs/dinov3_7b.py:quick (3 steps, any machine)
Result: not run by us

Numbers are those of facebookresearch/dinov3 6876159, dinov3_vit7b16_pretrain.yaml, with
256 GPUs of 16 images each. LVD-1689M is not public: give the name of your data set. Two
things differ: here queries, keys and values have biases, and in the original a tenth of
the batches have images of ImageNet-1k only. dinov3.py has the later stages.
"""

from ml_collections import ConfigDict

from configs.common import (
    DINOV2_TASK,
    GRAM_TRANSFORMS,
    bicubic_crop,
    dinov2_crops,
    dinov2_optim,
    parse_arg,
    quick,
    shrink_dino,
)

ARGUMENTS = dict(quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    group = 16  # Batch size per GPU.
    c = ConfigDict()
    c.seed = 0
    c.total_steps = 1_000_000
    c.batch_size = 256 * group
    c.mesh = dict(data=1, fsdp=-1)

    c.data = dict(
        name="lvd1689m",
        split="train",
        num_classes=0,
        image_size=(256, 256),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        train_transform=dinov2_crops(256, 16, 112),
        eval_transform=bicubic_crop(256),
    )
    c.evals = dict(
        knn=dict(kind="knn", name="imagenet2012", train="train", test="validation")
    )

    c.model = dict(
        variant="g/16",  # The keys below replace its sizes.
        width=4_096,
        depth=40,
        num_heads=32,
        mlp_dim=8_192,
        activation="swiglu",
        posemb="none",
        rope="centered",
        rope_shift=0.0,
        rope_jitter=1.0,
        rope_rescale=2.0,
        num_register_tokens=4,
        cls_norm=False,
        layer_norm_eps=1e-5,
        layer_scale_init=1e-5,
        init="timm",
        drop_path_rate=0.4,
        drop_path_schedule="constant",
        drop_path_group=2 * group,
        dtype="bfloat16",
        scan=None,
        remat_policy="full",
    )
    c.task = dict(
        name="dinov2",
        num_outputs=262_144,
        hidden_dim=8_192,
        bottleneck_dim=512,
        separate_heads=True,
        patch_num_outputs=98_304,
        patch_hidden_dim=4_096,
        patch_bottleneck_dim=384,
        small_norm=True,
        weight_norm=False,
        centering="sinkhorn",
        koleo_group=group,
        mask_group=group,
        mask_exact=True,
        teacher_momentum=0.994,
        teacher_momentum_end=0.994,
        teacher_temperature_steps=100_001,
        **DINOV2_TASK | GRAM_TRANSFORMS,  # Without flips.
    )
    c.optim = dinov2_optim(
        c,
        rate=4 * 5e-5,  # The file has the rate for 64 images.
        layer_decay=0.98,
        schedule=dict(name="constant"),
        warmup_steps=100_000,
        freeze_steps=5_000,
    )
    c.optim.update(b2=0.99, warmup_ends_at_peak=False, grad_clip_norm_per_part=30.0)
    c.optim.weight_decay_mask = (r"/kernel$", r"(cls|mask_token|last_layer)$")
    c.optim.freeze = (r"head/last_layer$",)
    c.ema = dict(decay=0.0)  # The teacher already is a moving average.

    c.log_every_steps = 50
    c.eval_every_steps = 10_000
    c.checkpoint_every_steps = 1_000
    c.checkpoint = dict(max_to_keep=3, keep_period=50_000)
    if arg.quick:
        quick(c)
        c.task.update(patch_num_outputs=32, patch_hidden_dim=16, patch_bottleneck_dim=8)
        shrink_dino(c)
    return c

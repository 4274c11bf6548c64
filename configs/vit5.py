"""ViT-5: ViT on ImageNet-1k with components of language models (arXiv:2602.08071).

Run:    python -m vit_jax.train --config=configs/vit5.py:model=B/16 --workdir=gs://.../vit5
Then:   python -m vit_jax.train --config=configs/vit5.py:model=B/16,stage=finetune \\
            --config.init=gs://.../vit5 --workdir=gs://...  (B and L at 224, after
        pretraining at 192; S is pretrained at 224)
Try:    the same with --config=configs/vit5.py:quick (3 steps, any machine)
Result: not run by us; the authors report 82.2, 84.2 and 84.9 % for S, B and L at 224

The network has RMSNorm, also for queries and keys, LayerScale, learned and rotary
positions and four registers. The numbers are those of wangf3014/ViT-5 (its README,
models_vit5.py and the defaults of main.py, read in November 2026). Three things differ:
in the original, queries, keys and values have no biases; registers are rotated too, by
a separate 2x2 grid; and the binary cross-entropy is a mean over the classes. Here it is
a sum, whose gradients are 1,000 times as large. LAMB's steps are the same, since
epsilon is 1e-5 instead of 1e-8, and the norm at which Apex's LAMB clips gradients is
1,000 instead of 1. Rates change once per epoch.
"""

from ml_collections import ConfigDict

from configs.common import bicubic_crop, cifar10, parse_arg, quick

ARGUMENTS = dict(
    model=("B/16", "S/16", "L/16"),
    data=("imagenet", "cifar10"),
    stage=("pretrain", "finetune"),
    quick=False,
)
SIDES = {"S/16": 224, "B/16": 192, "L/16": 192}
EPOCHS = {"S/16": 800, "B/16": 800, "L/16": 400}
DROP_PATH = {"S/16": 0.05, "B/16": 0.2, "L/16": 0.35}
TUNED_DROP_PATH = {"S/16": 0.05, "B/16": 0.25, "L/16": 0.5}
CROP = "random_resized_crop(area=(0.08, 1.0), interpolation='bicubic')"


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    tuned = arg.stage == "finetune"
    side = 224 if tuned else SIDES[arg.model]
    c = ConfigDict()
    c.seed = 0
    c.epochs = 20 if tuned else EPOCHS[arg.model]
    c.batch_size = 512 if tuned else 2048
    c.mesh = dict(data=-1)
    c.init = dict(checkpoint="?", head="keep") if tuned else ""

    c.data = dict(
        name="imagenet2012",
        split="train",
        num_examples=1_281_167,
        num_classes=1_000,
        image_size=(side, side),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        train_transform=(
            f"{CROP} | timm_randaugment | flip | mixup_or_cutmix(0.8, 1.0, group=64)"
        ),
        eval_transform=bicubic_crop(side),
    )
    c.evals = dict(val="validation")

    c.model = dict(
        variant=arg.model,
        activation="gelu",
        rms_norm=True,
        qk_norm=True,
        layer_scale_init=1e-4,
        num_register_tokens=4,
        init="timm",
        rope="axial",
        rope_temperature=10_000.0,
        posemb_resize="bicubic_plain",
        drop_path_rate=(TUNED_DROP_PATH if tuned else DROP_PATH)[arg.model],
        drop_path_schedule="constant",
        dtype="bfloat16",
        scan=None,
    )
    c.task = dict(loss="softmax", label_smoothing=0.1)
    c.optim = dict(
        name="adam",
        learning_rate=1e-5,
        warmup_epochs=5,
        warmup_learning_rate=1e-6,
        # In fine-tuning, the last rate equals the peak.
        schedule=dict(name="cosine", end_learning_rate=1e-5, includes_warmup=True),
        schedule_by_epochs=True,
        weight_decay=0.1,
        weight_decay_mask=(r"/kernel$",),
    )
    c.ema = dict(decay=0.99996, warmup=True)
    if not tuned:
        c.data.repeats = 3
        c.data.train_transform = (
            f"{CROP} | flip | three_augment | color_jitter(0.3, 0.3, 0.3) "
            "| mixup_or_cutmix(0.8, 1.0, group=256)"
        )
        c.task = dict(loss="sigmoid", target_threshold=0.0)
        rate = 4e-3 if arg.model == "S/16" else 3e-3
        c.optim.update(name="lamb", learning_rate=rate, weight_decay=0.05)
        # For gradients of a sum over 1,000 classes.
        c.optim.update(eps=1e-5, grad_clip_norm=1_000.0)

    c.log_every_steps = 50
    c.eval_every_epochs = 5
    c.checkpoint_every_epochs = 1

    if arg.data == "cifar10":
        cifar10(c)
    return quick(c) if arg.quick else c

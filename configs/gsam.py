"""ViT on ImageNet-1k with GSAM, without strong augmentation (arXiv:2203.08065): B/32.

Run:    python -m vit_jax.train --config=configs/gsam.py --workdir=gs://.../gsam
Try:    the same with --config=configs/gsam.py:quick (3 steps, any machine)
Result: not run by us; for B/32 the authors report 5.4 points more than with AdamW, and
        3.2 points more than with SAM (top-1)

The numbers are those of big_vision's proj/gsam/vit_i1k_gsam_no_aug.py. There each
device computes the ascent step from the gradient of its images only;
`sam_batch_size=64` does the same per 64 images (--config.optim.sam_batch_size=64). For
SAM (arXiv:2010.01412) set `gsam_alpha=0` and `sam_rho_end=0`.
"""

from ml_collections import ConfigDict

from configs.common import big_vision_crop, parse_arg, quick

ARGUMENTS = dict(model=("B/32", "B/16", "S/32", "S/16"), quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.seed = 0
    c.epochs = 300
    c.batch_size = 4096
    c.mesh = dict(data=-1)

    c.data = dict(
        name="imagenet2012",
        split="train",
        num_examples=1_281_167,
        num_classes=1_000,
        image_size=(224, 224),
        train_transform="inception_crop | flip",
        eval_transform=big_vision_crop(256),
    )
    c.evals = dict(val="validation")

    c.model = dict(
        variant=arg.model,
        pool="gap",
        head_bias_init=-10.0,
        dtype="bfloat16",
    )
    c.task = dict(loss="sigmoid")
    c.optim = dict(
        name="adam",
        learning_rate=3e-3,
        warmup_steps=10_000,
        schedule=dict(name="linear", end_learning_rate=3e-5),
        weight_decay=1 / 3,  # In the original 0.001, not multiplied by the rate.
        grad_clip_norm=1.0,
        sam_rho=0.6,
        sam_rho_end=0.1,
        sam_adaptive="none",
        sam_batch_size=0,  # Images per ascent step; 0 is the whole batch.
        gsam_alpha=0.6,
        gsam_minimize="robust",
    )
    c.ema = dict(decay=0.0)

    c.log_every_steps = 50
    c.eval_every_epochs = 5
    c.checkpoint_every_epochs = 1
    return quick(c) if arg.quick else c

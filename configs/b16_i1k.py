"""ViT on ImageNet-1k, 300 epochs: B/16, or another model (arXiv:2010.11929, table 3).

Run:    python -m vit_jax.train --config=configs/b16_i1k.py --workdir=gs://...
        python -m vit_jax.train --config=configs/b16_i1k.py:model=L/16 --workdir=gs://...
Try:    the same with --config=configs/b16_i1k.py:quick (3 steps, any machine)
Result: not run by us; the authors report an upstream precision at 1 at 224 px of 74.79 %
        for B/16, 69.19 B/32, 72.59 L/16, 66.90 L/32; none for H/14
        (github.com/google-research/vision_transformer, issue 62)
"""

from ml_collections import ConfigDict

from configs.common import big_vision_crop, parse_arg, quick

ARGUMENTS = dict(model=("B/16", "B/32", "L/16", "L/32", "H/14"), quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.name = f"{arg.model.replace('/', '').lower()}_i1k"
    c.seed = 0
    c.epochs = 300
    c.batch_size = 4096
    c.mesh = dict(data=-1)

    c.data = dict(
        name="imagenet2012",
        split="train",
        num_examples=1_281_167,  # As in the TFDS catalogue.
        num_classes=1_000,
        image_size=(224, 224),
        train_transform="inception_crop | flip",
        eval_transform=big_vision_crop(256),
    )
    c.evals = dict(val="validation")

    c.model = dict(
        variant=arg.model,
        pool="token",
        representation_layer=True,
        dropout=0.1,
        dtype="bfloat16",
    )
    c.task = dict(loss="softmax", label_smoothing=0.0)
    c.optim = dict(
        name="adam",
        b1=0.9,
        b2=0.999,
        learning_rate=3e-3,
        warmup_steps=10_000,
        schedule="cosine",
        weight_decay=0.3,  # Times the scheduled rate; kernels only.
        grad_clip_norm=1.0,
    )
    c.ema = dict(decay=0.0)

    c.log_every_steps = 50
    c.eval_every_steps = 5_000
    c.checkpoint_every_steps = 1_000
    return quick(c) if arg.quick else c

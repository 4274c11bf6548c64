"""Published weights of DeiT-Ti/16, fine-tuned on a folder of photographs at 224.

Data:   as for configs/flowers.py: DIR/train/<class>/..., DIR/val/<class>/... (or test/)
Run:    python -m vit_jax.train --config=configs/flowers_finetune.py \
            --config.data.data_dir=DIR --workdir=runs/flowers_finetune
        :lora trains only low-rank updates and the classifier (arXiv:2106.09685)
Result: 92.80 % top-1 on 736 photographs of tf_flowers, on 2 CPU cores; measured with
        --config.data.eval_transform="resize_small(256) | central_crop", bilinear

The weights (arXiv:2012.12877, 22 MB) are downloaded from a mirror and cached;
--config.init=FILE uses a local file. GELU and normalisation are those of DeiT.
"""

from ml_collections import ConfigDict

from configs.common import bicubic_crop, parse_arg, quick

ARGUMENTS = dict(lora=False, quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.seed = 0
    c.epochs = 3
    c.batch_size = 64
    c.mesh = dict(data=-1)
    c.init = "deit:Ti/16"

    c.data = dict(
        name="folder",
        data_dir="",
        split="train",
        num_classes=5,
        image_size=(224, 224),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        train_transform="random_resized_crop(area=(0.3, 1.0)) | flip",
        eval_transform=bicubic_crop(256),
    )
    c.evals = dict(val="")  # The folder val, validation or test, whichever exists.

    c.model = dict(variant="Ti/16", pool="token", activation="gelu")
    c.optim = dict(
        name="sgd",
        momentum=0.9,
        learning_rate=0.01,
        warmup_steps=10,
        schedule="cosine",
        grad_clip_norm=1.0,
    )
    if arg.lora:
        c.task = dict(name="lora", rank=8, alpha=16.0, projections=("query", "value"))
        c.optim = dict(name="adam", learning_rate=2e-3, warmup_steps=10)
    c.ema = dict(decay=0.0)

    c.log_every_steps = 10
    c.eval_every_epochs = 1.0
    c.checkpoint_every_steps = 100
    return quick(c) if arg.quick else c

"""A text tower for a locked image tower, on COCO's captions (LiT, SigLIP's loss).

Run:    python -m vit_jax.train --config=configs/siglip_lit_coco.py --workdir=gs://.../lit
Try:    the same with --config=configs/siglip_lit_coco.py:quick (3 steps, any machine)
Result: not run by us; big_vision reports 20.7 % zero-shot on ImageNet and 47.2 % and
        32.1 % retrieval on COCO's test split for an older run: B/16 and a pretrained BERT,
        softmax, 4,096 pairs per step

For your pairs set data=FOLDER, with train/*.jpg and val/*.jpg, and *.txt beside the
images. Numbers are those of big_vision's siglip_lit_coco.py; here the text tower is
trained from scratch, and L/16 and B/32 start from other weights of AugReg.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg, quick, use_captions

RESIZE = "resize(interpolation='bilinear_plain')"
ARGUMENTS = dict(model=("B/16", "B/32", "L/16"), data="coco_captions", quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.seed = 0
    c.total_steps = 5_000
    c.batch_size = 512
    c.mesh = dict(data=-1)
    c.init = f"augreg:{arg.model}"

    c.data = dict(
        name="coco_captions",
        split="train",
        num_examples=82_783,
        num_classes=0,
        caption_key="captions.text",
        tokenizer="hf://google/siglip-base-patch16-224",  # c4_en of T5.
        num_tokens=16,
        image_size=(224, 224),
        train_transform=f"{RESIZE} | randaugment(2, 10) | flip",
        eval_transform=RESIZE,
    )
    c.evals = dict(retrieval=dict(kind="retrieval", split="val"))

    c.model = dict(variant=arg.model, dtype="bfloat16")
    c.task = dict(
        name="contrastive",
        loss="sigmoid",
        projection="none",
        temperature_init=10.0,
        bias_init=-2.71,
        text=dict(
            init="big_vision", vocab_size=32_000, width=768, depth=12, num_heads=12
        ),
    )
    c.optim = dict(
        name="adam",
        learning_rate=1e-3,
        warmup_fraction=0.03,
        schedule=dict(name="cosine", end_learning_rate=0.0),
        weight_decay=10.0,  # In the original 0.01, not multiplied by the rate.
        grad_clip_norm=1.0,
        freeze=(r"^network/",),
    )
    c.ema = dict(decay=0.0)

    c.log_every_steps = 50
    c.eval_every_steps = 1_000
    c.checkpoint_every_steps = 1_000
    use_captions(arg.data, c)
    return quick(c) if arg.quick else c

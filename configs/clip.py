"""CLIP, fine-tuned on your pairs of images and captions (arXiv:2103.00020).

Run:    python -m vit_jax.train --config=configs/clip.py:data=FOLDER --workdir=runs/clip
        FOLDER has train/*.jpg and val/*.jpg, with captions in *.txt beside the images
Try:    the same with --config=configs/clip.py:quick (3 steps, any machine)
Result: not run by us; no number is published
"""

from ml_collections import ConfigDict

from configs.common import bicubic_crop, parse_arg, quick, use_captions

ARGUMENTS = dict(model=("B/32", "B/16", "L/14"), data="coco_captions", quick=False)
# Width, depth and heads of the text tower; width of the shared space.
TEXT = {
    "B/32": (512, 12, 8, 512),
    "B/16": (512, 12, 8, 512),
    "L/14": (768, 12, 12, 768),
}
HUB = {"B/32": "base-patch32", "B/16": "base-patch16", "L/14": "large-patch14"}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    width, depth, num_heads, embed_dim = TEXT[arg.model]
    source = f"hf://openai/clip-vit-{HUB[arg.model]}"
    c = ConfigDict()
    c.seed = 0
    c.epochs = 5
    c.batch_size = 512
    c.mesh = dict(data=-1)
    c.init = source

    c.data = dict(
        name="coco_captions",
        split="train",
        num_examples=82_783,
        num_classes=0,
        caption_key="captions.text",
        tokenizer=source,
        num_tokens=77,
        image_size=(224, 224),
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        train_transform="random_resized_crop(area=(0.9, 1.0), interpolation='bicubic')",
        eval_transform=bicubic_crop(224),
    )
    c.evals = dict(retrieval=dict(kind="retrieval", split="val"))

    c.model = dict(
        variant=arg.model,
        pre_norm=True,
        init="clip",
        activation="quick_gelu",
        layer_norm_eps=1e-5,
        posemb_resize="bicubic",
    )
    c.task = dict(
        name="contrastive",
        loss="softmax",
        projection="plain",
        embed_dim=embed_dim,
        temperature_init=1 / 0.07,
        max_temperature=100.0,
    )
    c.task.text = dict(
        width=width,
        depth=depth,
        num_heads=num_heads,
        init="clip_text",
        causal=True,
        pool="eos",
        projection="plain",
        activation="quick_gelu",
        layer_norm_eps=1e-5,
        vocab_size=49_408,
        eos_id=49_407,
    )
    c.optim = dict(
        name="adam",
        b2=0.98,
        eps=1e-6,
        learning_rate=5e-7,
        warmup_fraction=0.1,
        schedule=dict(name="cosine", end_learning_rate=0.0),
        weight_decay=0.2,
        # All parameters except gains, biases and the class token, as in OpenCLIP.
        weight_decay_mask=(r"/kernel$", r"pos_embedding$", r"text/embedding$"),
        grad_clip_norm=1.0,
    )
    c.ema = dict(decay=0.0)

    c.log_every_steps = 20
    c.eval_every_epochs = 1
    c.checkpoint_every_epochs = 1
    use_captions(arg.data, c)
    return quick(c) if arg.quick else c

"""A text tower for a locked image tower, on COCO's captions (LiT, SigLIP's loss).

Run:    python -m vit_jax.train --config=configs/siglip_lit_coco.py --workdir=gs://.../lit
Try:    the same with --config=configs/siglip_lit_coco.py:quick (3 steps, any machine)
Result: not run by us; big_vision reports 20.7 % zero-shot on ImageNet and 47.2 % and
        32.1 % retrieval on COCO, with B/16 and a pretrained BERT, which is not here

Own pairs: data=FOLDER of train/*.jpg and val/*.jpg with *.txt beside them. Numbers are
those of big_vision's siglip_lit_coco.py; the text tower here begins from scratch.
"""

import os

from ml_collections import ConfigDict

from configs.common import parse_arg, quick

ARGUMENTS = dict(model=("B/16", "B/32", "L/16"), data="coco_captions", quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.seed, c.ema, c.total_steps, c.batch_size = 0, dict(decay=0.0), 5_000, 512
    c.model = dict(variant=arg.model, dtype="bfloat16")
    c.init = f"augreg:{arg.model}"
    c.task = dict(name="contrastive", loss="sigmoid", projection="none")
    c.task.update(temperature_init=10.0, bias_init=-2.71)
    c.task.text = dict(vocab_size=32_000, width=768, depth=12, num_heads=12)
    c.optim = dict(name="adam", learning_rate=1e-3, weight_decay=0.01)
    c.optim.schedule = dict(name="cosine", end_learning_rate=0.0)
    c.optim.update(warmup_fraction=0.03, grad_clip_norm=1.0, freeze=(r"^network/",))
    captions_of(arg.data, c)
    c.data.train_transform = "resize | randaugment(2, 10) | flip"
    c.data.eval_transform = "resize"
    # c4_en of T5, 32,000 tokens.
    c.data.tokenizer, c.data.num_tokens = "hf://google/siglip-base-patch16-224", 16
    c.update(log_every_steps=50, eval_every_steps=1_000, checkpoint_every_steps=1_000)
    if arg.quick:
        quick(c)
    return c


def captions_of(data: str, config: ConfigDict) -> None:
    """Sets pairs of images and captions: TFDS's coco_captions, or a folder."""
    c = config
    c.data = dict(name=data, split="train", num_classes=0, caption_key="captions.text")
    test = "val"
    if data == "coco_captions":
        c.data.num_examples = 82_783
    if os.path.isdir(os.path.expanduser(data)):
        c.data.update(name="folder", data_dir=data, caption_key="txt")
    c.evals = dict(retrieval=dict(kind="retrieval", split=test))

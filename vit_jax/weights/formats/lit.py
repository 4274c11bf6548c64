"""LiT and SigLIP of Google's JAX code: npz files with an image and a text tower.

LiT of vision_transformer (models_lit.py) and big_vision's image-text models have the
same names: "img/", an image tower like big_vision's or Google's ViT; "txt/", a text
transformer; "t", the logarithm of the scale; and for SigLIP "b", the bias.
"""

import dataclasses
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.weights import text_tower
from vit_jax.weights.formats import big_vision, google, linen, tables
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, Reader
from vit_jax.weights.pretrained import Pretrained

_ANCHOR = "txt/Embed_0/embedding"
_PREFIX = re.compile(r"^(params/|opt/target/)?(?=(img|txt)/|[tb]$)")
_BLOCK = "Transformer/encoderblock_0"


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    names = {_PREFIX.sub("", name) for name in tensors.flat}
    # A text network without a head is of another kind, such as BERT; for such files
    # big_vision.py reads the image tower.
    return {_ANCHOR, "txt/head/kernel", "t"} <= names


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    flat = {_PREFIX.sub("", name): value for name, value in tensors.flat.items()}
    image = dataclasses.replace(
        tensors, flat={k: v for k, v in flat.items() if k.startswith("img/")}
    )
    # Google's ViTs have a class token; big_vision's only together with a MAP head.
    classes = "img/cls" in image.flat and "img/MAPHead_0/probe" not in image.flat
    library = google if classes else big_vision
    pretrained = library.read(image, num_heads)
    params = dict(pretrained.params)
    others = {}
    if "head" in params:  # This is the projection, not a classifier.
        others[text.PROJECTION] = params.pop("head")
    task, more = _read_text(flat, tensors.path)
    return dataclasses.replace(
        pretrained,
        params=params,
        options={**pretrained.options, "num_classes": 0},
        format="lit",
        source=tensors.path,
        preprocess=linen.whole_image(pretrained.options["image_size"]),
        task=task,
        task_params=others | more,
    )


def _read_text(flat: dict[str, np.ndarray], source: str) -> tuple[dict, dict]:
    """Returns the task of a text tower, and its parameters."""
    inside = tables.below(flat, "txt/")
    moved = {k.replace("Encoder_0/", "Transformer/"): v for k, v in inside.items()}
    moved = linen.rename_blocks(big_vision.unstack(moved))
    head, query = "head/kernel", f"{_BLOCK}/MultiHeadDotProductAttention_1/query/kernel"
    for name in (head, query, "pos_embedding", "Embed_0/embedding"):
        if name not in moved:
            raise UserError(
                f"{source}: txt/{name} is missing: towers of this project are "
                "transformers with learnt positions and a head"
            )
    if moved["pos_embedding"].ndim == 2:
        moved["pos_embedding"] = moved["pos_embedding"][None]
    moved["embedding"] = moved.pop("Embed_0/embedding")
    params = {
        f"text/{name.removeprefix('Transformer/')}": np.asarray(value, np.float32)
        for name, value in moved.items()
    }
    params[text.LOGIT_SCALE] = flat["t"].reshape(1)
    if "b" in flat:
        params[text.LOGIT_BIAS] = flat["b"].reshape(1)
    task, params = text_tower.read(params)
    tokens, embed_dim = moved["pos_embedding"].shape[1], moved[head].shape[1]
    wanted = text.TextConfig(**task["text"]).build(tokens, embed_dim, "float32")
    text.check_params(wanted, params["text"], source)
    return task, params


READERS["LiT and SigLIP of Google"] = Reader(recognises, read, refines=("big_vision",))

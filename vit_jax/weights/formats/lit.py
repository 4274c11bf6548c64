"""LiT and SigLIP of Google's JAX code: npz files with an image and a text tower.

vision_transformer's LiT (models_lit.py) and big_vision's image-text models have the same
names: "img/", an image tower like big_vision's or Google's ViT; "txt/", a text
transformer; "t", the logarithm of the scale; and in SigLIP "b", the bias.
"""

import dataclasses
import re

import numpy as np
from flax.traverse_util import unflatten_dict

from vit_jax.errors import UserError
from vit_jax.models import text
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
    # A text network without a head is another, such as BERT: big_vision reads the image
    # tower of such a file.
    return {_ANCHOR, "txt/head/kernel", "t"} <= names


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    flat = {_PREFIX.sub("", name): value for name, value in tensors.flat.items()}
    image = dataclasses.replace(
        tensors, flat={k: v for k, v in flat.items() if k.startswith("img/")}
    )
    # Google's ViTs have a class token, of big_vision's only those with a MAP head.
    classes = "img/cls" in image.flat and "img/MAPHead_0/probe" not in image.flat
    library = google if classes else big_vision
    pretrained = library.read(image, num_heads)
    params = dict(pretrained.params)
    others = {}
    if "head" in params:  # It is the projection, not a classifier.
        others[text.PROJECTION] = params.pop("head")
    task, tower = _read_text(flat, tensors.path)
    others |= {"text": tower, text.LOGIT_SCALE: flat["t"].reshape(1)}
    if "b" in flat:
        others[text.LOGIT_BIAS] = flat["b"].reshape(1)
    task["loss"] = "sigmoid" if "b" in flat else "softmax"
    return dataclasses.replace(
        pretrained,
        params=params,
        options={**pretrained.options, "num_classes": 0},
        format="lit",
        source=tensors.path,
        preprocess=dataclasses.replace(
            pretrained.preprocess, crop_fraction=1.0, squash=True
        ),
        task=task,
        task_params=others,
    )


def _read_text(flat: dict[str, np.ndarray], source: str) -> tuple[dict, dict]:
    """Returns the task and the parameters of a text tower."""
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
    names = {"Embed_0/embedding": "embedding"}
    params = {
        names.get(k, k.removeprefix("Transformer/")): np.asarray(v, np.float32)
        for k, v in moved.items()
    }
    vocab_size, width = params["embedding"].shape
    about = {
        "vocab_size": vocab_size,
        "width": width,
        "depth": len(
            {k.split("/")[0] for k in params if k.startswith("encoderblock_")}
        ),
        "num_heads": moved[query].shape[1],
        "mlp_dim": moved[f"{_BLOCK}/MlpBlock_3/Dense_0/bias"].size,
        "projection": "bias" if "head/bias" in params else "plain",
    }
    task = {"name": "contrastive", "text": about}
    wanted = text.TextConfig(**about).build(
        params["pos_embedding"].shape[1], params[head].shape[1], "float32"
    )
    tower = unflatten_dict(params, sep="/")
    text.check_params(wanted, tower, source)
    return task, tower


READERS["LiT and SigLIP of Google"] = Reader(recognises, read, refines=("big_vision",))

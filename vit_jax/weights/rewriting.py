"""Rewrites networks as equal networks that another library supports.

Writers reject networks with `check_network`, and call the other functions for features
that their library lacks. These change `flat` (the parameters by name, levels joined by
"/") and `options` (all options of `models.Model`) in place, and return notes for the user.
"""

import dataclasses
import math
import operator
from collections.abc import Collection, Mapping

import numpy as np

from vit_jax import models
from vit_jax.config import fields
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.transforms.host import TENSORFLOW
from vit_jax.errors import UserError
from vit_jax.models.positions.sincos2d import sincos2d
from vit_jax.weights.pretrained import POSITIONS

TOKENS = ("cls", "dist")  # The order of their rows in position embeddings.
# The layer before each LayerScale of a block.
SCALES = {
    "LayerScale_1/gamma": "MultiHeadDotProductAttention_1/out",
    "LayerScale_3/gamma": "MlpBlock_3/Dense_1",
}

# Keys that every format supports, or that the writer checks.
_IN_ALL_FORMATS = {
    *("variant", "dtype", "matmul_dtype"),
    *("width", "depth", "num_heads", "mlp_dim", "stage_depths"),
    *("posemb", "posemb_placement", "posemb_resize"),
    *("rope_temperature", "rope_reference", "activation", "layer_norm_eps"),
    *("pool", "class_token", "fc_norm", "patch_resize"),
}


def check_network(
    options: Mapping,
    network: str,
    has: Mapping[str, Collection],
    *,
    to: str = "--to=timm or --to=safetensors",
) -> None:
    """Raises UserError unless another library supports a Vision Transformer.

    Args:
      options: all options of `models.Model`.
      network: name of the library's network, for messages.
      has: supported values by option. Options that are not in it must have their
        default values, except for a few that every format supports.
      to: flags that write any network, for messages.
    """

    def refuse(name):
        raise UserError(
            f"{name}={options[name]!r}: {network} does not support it: write it with {to}"
        )

    if "depth" not in options:
        refuse("variant")
    kind = models.VARIANTS.find(options["variant"], "model")
    keys, plain = fields.fields(kind), fields.defaults(kind)
    for name in dict.fromkeys((*keys, *has)):  # num_classes is an option but not a key.
        if name in has:
            values = has[name]
        elif (
            name in _IN_ALL_FORMATS
            or keys[name].training_only
            or not keys[name].changes_result
        ):
            continue
        else:
            values = (plain[name],)
        if name in options and options[name] not in values:
            refuse(name)


def norm_every_token(flat: dict[str, np.ndarray], options: dict) -> list[str]:
    """Moves the final LayerNorm before the selection of a token, which is equivalent."""
    if not options.get("fc_norm") or options["pool"] not in ("token", "none"):
        return []
    moved = {
        k.replace("fc_norm/", "Transformer/encoder_norm/"): v for k, v in flat.items()
    }
    flat.clear()
    flat.update(moved)
    options["fc_norm"] = False
    return ["final LayerNorm: moved before the selection of the token"]


def check_square(grid: tuple[int, int], reader: str, to: str) -> None:
    """Raises UserError if a grid is not square although a format's readers assume it.

    Args:
      grid: rows and columns of patches.
      reader: code that assumes a square, for messages.
      to: flags that write any grid, for messages.
    """
    rows, columns = grid
    if rows != columns:
        raise UserError(
            f"a grid of {rows}x{columns}: {reader} assumes a square: write it with {to}"
        )


def learn_positions(
    flat: dict[str, np.ndarray], options: dict, grid: tuple[int, int]
) -> list[str]:
    """Converts position embeddings to one learned vector per token.

    Afterwards posemb is "learned" or "none". `grid` has the numbers of rows and
    columns.

    Raises:
      UserError: the embeddings are not added at the stem.
    """
    kind = options.get("posemb", "none")
    if kind == "relative" or options.get("posemb_placement", "stem") != "stem":
        raise UserError(
            f"posemb={kind} at posemb_placement={options['posemb_placement']} is supported "
            "by neither timm nor Hugging Face: write it with --to=safetensors"
        )
    if "2d" not in kind and kind != "factorized":
        return []
    num_prefix_tokens = sum(name in flat for name in TOKENS)
    if kind.startswith("sincos2d"):
        vectors = np.asarray(sincos2d(grid, options["width"], kind))
    else:
        rows, columns = (
            np.asarray(flat.pop(POSITIONS.replace("pos_emb", f"{name}_emb")))
            for name in ("row", "column")
        )
        both = np.broadcast_arrays(columns[None], rows[:, None])
        joined = sum(both) if kind == "factorized" else np.concatenate(both, axis=-1)
        vectors = joined.reshape(-1, options["width"])
    flat[POSITIONS] = prepend_zero_rows(vectors[None], num_prefix_tokens)
    options["posemb"] = "learned"
    return [f"position embeddings: {kind} written as values"]


def store_positions(
    flat: dict[str, np.ndarray], options: dict, grid: tuple[int, int]
) -> list[str]:
    """Calls `learn_positions`, and adds zeros to networks without positions."""
    notes = learn_positions(flat, options, grid)
    if options["posemb"] == "none":
        tokens = math.prod(grid) + sum(name in flat for name in TOKENS)
        flat[POSITIONS] = np.zeros((1, tokens, options["width"]), np.float32)
        options["posemb"] = "learned"
        notes.append("position embeddings: missing, written as zeros")
    return notes


def prepend_zero_rows(embedding: np.ndarray, rows: int) -> np.ndarray:
    """Prepends rows of zeros to position embeddings of shape (1, N, D)."""
    zeros = np.zeros((1, rows, embedding.shape[2]), embedding.dtype)
    return np.concatenate([zeros, embedding], axis=1)


def fold_patch_bias(
    flat: dict[str, np.ndarray], options: Mapping, *, num_prefix_tokens: int
) -> list[str]:
    """Adds the bias of the patch embedding to the positions, and sets it to zeros.

    The first `num_prefix_tokens` rows of the positions do not belong to patches.

    Raises:
      UserError: the network has no learned positions to add the bias to.
    """
    bias = flat["embedding/bias"]
    if not np.any(bias):
        return []
    if options["posemb"] != "learned":
        raise UserError(
            "pre_norm=True: in the other library patches then have no bias, and there are "
            "no learned positions to add it to: write it with --to=safetensors"
        )
    positions = np.array(flat[POSITIONS])
    positions[:, num_prefix_tokens:] += np.reshape(bias, (1, 1, -1))
    flat |= {"embedding/bias": np.zeros_like(bias), POSITIONS: positions}
    return ["bias of the patches: added to their position embeddings"]


def fold_layer_scale(flat: dict[str, np.ndarray], options: dict) -> list[str]:
    """Multiplies LayerScale (arXiv:2103.17239) into the layers before it."""
    if not options["layer_scale_init"]:
        return []
    flat |= {name: np.asarray(value) for name, value in flat.items()}
    multiply_layer_scale(flat, [n for n in flat if n.endswith(tuple(SCALES))])
    options["layer_scale_init"] = 0.0
    return ["LayerScale: multiplied into the layers before it"]


def multiply_layer_scale(flat: dict[str, np.ndarray], names: Collection[str]) -> None:
    """Multiplies LayerScale into the layers before it, and removes it."""
    for name in names:
        block, leaf = name.rsplit("/", 2)[0], "/".join(name.rsplit("/", 2)[1:])
        gamma, layer = flat.pop(name), f"{block}/{SCALES[leaf]}"
        for part in ("kernel", "bias"):
            if f"{layer}/{part}" in flat:  # `check_keys` reports missing parameters.
                flat[f"{layer}/{part}"] = flat[f"{layer}/{part}"] * gamma


def note_resize(options: Mapping, library: str) -> list[str]:
    """Returns a note if a library resizes positions by another method than training."""
    ends = ("_dino", "_square")
    if options["posemb"] != "learned" or not options["posemb_resize"].endswith(ends):
        return []
    note = (
        f"position embeddings: {library} resizes them for other image sizes by another "
        "method than training did, so features differ at these sizes"
    )
    return [note]


def note_crop(preprocess: Preprocess, library: str, *, down: bool) -> list[str]:
    """Returns a note if a library may crop images one pixel away from this project.

    Args:
      preprocess: preprocessing of images.
      library: name in the note.
      down: whether the library rounds half of an odd margin down, instead of to even;
        see `Preprocess.crop_down`.
    """
    margins = map(operator.sub, preprocess.resize_sides, preprocess.crop_sides)
    # If images keep their aspect ratio, the margin of the long side may be any number.
    same = preprocess.squash and all(margin % 4 != 3 for margin in margins)
    if same or preprocess.fill or preprocess.crop_down == down:
        return []
    rounds, side = ("down", "before") if down else ("to even", "after")
    note = (
        f"preprocessing: {library} rounds half of an odd margin {rounds}, so it crops some "
        f"images one pixel {side} where this project crops them"
    )
    return [note]


def replace_filter(
    preprocess: Preprocess, library: str
) -> tuple[Preprocess, list[str]]:
    """Replaces a filter of Google's code by the most similar one in other libraries.

    Returns the preprocessing to write, and a note if the filter was replaced. For
    photographs that shrink to 57 %, "area" and "bilinear" differ by 1.4 grey levels on
    average, "area" and "box" by 2.8.
    """
    if preprocess.interpolation not in TENSORFLOW:
        return preprocess, []
    other = dataclasses.replace(preprocess, interpolation="bilinear")
    note = (
        f"preprocessing: {library} does not support interpolation="
        f"{preprocess.interpolation!r}, so images are resized by 'bilinear', which "
        "antialiases"
    )
    return other, [note]


def note_tokens(preprocess: Preprocess) -> list[str]:
    """Returns a note if a format cannot store `max_tokens`."""
    if not preprocess.max_tokens:
        return []
    size = "x".join(map(str, preprocess.image_size))
    most = preprocess.max_tokens
    return [f"preprocessing: max_tokens={most} left out, images are {size}"]

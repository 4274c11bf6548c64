"""Rewriting arrays so that a network stays the same in another format's terms."""

import re
from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.weights.pretrained import POSITIONS

Flat = dict[str, np.ndarray]


def layer_scale(flat: Flat) -> tuple[Flat, list[str]]:
    """Multiplies LayerScale (arXiv:2103.17239) into the layer in front of it.

    Args:
      flat: in timm's names, or those of DeiT III's own code.

    Returns:
      The same without `ls1.gamma` and its like, and a note.
    """
    flat = {re.sub(r"\.gamma_(\d)$", r".ls\1.gamma", k): v for k, v in flat.items()}
    scales = [name for name in flat if re.search(r"\.ls[12]\.gamma$", name)]
    for name in scales:
        gamma, block = flat.pop(name), name[: -len(".ls1.gamma")]
        layer = f"{block}.{'attn.proj' if '.ls1.' in name else 'mlp.fc2'}"
        if f"{layer}.weight" not in flat or f"{layer}.bias" not in flat:
            continue  # The table says what is missing.
        flat[f"{layer}.weight"] = gamma[:, None] * flat[f"{layer}.weight"]
        flat[f"{layer}.bias"] = gamma * flat[f"{layer}.bias"]
    note = "LayerScale: multiplied into the layers in front of it"
    return flat, [note] if scales else []


def query_bias(flat: Flat) -> tuple[Flat, list[str]]:
    """Gives attention without biases some that are zero.

    Args:
      flat: in timm's names.

    Returns:
      The same with `qkv.bias` everywhere, and a note.
    """
    weights = [n for n in flat if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.weight", n)]
    biases = {name: name.removesuffix("weight") + "bias" for name in weights}
    if not weights or any(bias in flat for bias in biases.values()):
        return flat, []
    zeros = {bias: np.zeros(len(flat[n]), np.float32) for n, bias in biases.items()}
    return flat | zeros, ["biases of query, key and value: none in the file, so zeros"]


def place_tokens(embedding: np.ndarray, extra: int) -> np.ndarray:
    """Puts a row of zeros in front of position embeddings for each extra token."""
    rows = np.zeros((1, extra, embedding.shape[2]), embedding.dtype)
    return np.concatenate([rows, embedding], axis=1)


def one_classifier(flat: Flat, name: str, other: str) -> Flat:
    """Makes a pair of classifiers whose mean is one classifier.

    DeiTForImageClassification has a distillation token but no classifier for it. Twice
    the one and a zero other have it as their mean, without rounding.

    Args:
      flat: theirs by name.
      name: of the classifier.
      other: of the one to add.

    Returns:
      The same with both.
    """
    twice = {
        f"{name}.{leaf}": 2 * flat[f"{name}.{leaf}"] for leaf in ("weight", "bias")
    }
    zero = {k.replace(name, other): np.zeros_like(v) for k, v in twice.items()}
    return flat | twice | zero


def norm_each_token(flat: Flat, options: Mapping) -> tuple[Flat, dict, list[str]]:
    """Moves a LayerNorm from behind to before the choice of a token: the same thing.

    Args:
      flat: ours by name.
      options: all of them, as of `models.Model`.

    Returns:
      Both, changed if single tokens are classified and their norm comes after the
      choice, and a note.
    """
    if not options.get("pooled_norm") or options["head"] not in ("token", "none"):
        return flat, dict(options), []
    moved = {
        k.replace("fc_norm/", "Transformer/encoder_norm/"): v for k, v in flat.items()
    }
    note = "final LayerNorm: moved before the choice of the token"
    return moved, {**options, "pooled_norm": False}, [note]


def plain_positions(
    flat: Flat, options: Mapping, grid: tuple[int, int]
) -> tuple[Flat, dict, list[str]]:
    """Writes position embeddings of a grid out as one vector a token.

    Args:
      flat: ours by name.
      options: all of them, as of `models.Model`.
      grid: patches down and across.

    Returns:
      Both with posemb "learned" or "none", and a note.

    Raises:
      UserError: they are not embeddings added at the stem.
    """
    kind, options = options.get("posemb", "none"), dict(options)
    if kind == "relative" or options.get("posemb_at", "stem") != "stem":
        raise UserError(
            f"posemb={kind} at posemb_at={options['posemb_at']} exists in neither timm "
            "nor Hugging Face: write it with --to=safetensors"
        )
    if kind not in ("sincos2d", "learned2d"):
        return flat, options, []
    flat, extra = dict(flat), sum(name in flat for name in ("cls", "dist"))
    if kind == "sincos2d":
        vectors = np.asarray(vit.sincos2d(grid, options["width"]))
    else:
        rows, columns = (
            np.asarray(flat.pop(POSITIONS.replace("pos_emb", f"{name}_emb")))
            for name in ("row", "column")
        )
        shape = len(rows), len(columns), rows.shape[1]
        halves = columns[None], rows[:, None]
        halves = [np.broadcast_to(half, shape) for half in halves]
        vectors = np.concatenate(halves, axis=-1).reshape(-1, options["width"])
    flat[POSITIONS] = place_tokens(vectors[None], extra)
    options["posemb"] = "learned"
    return flat, options, [f"position embeddings: {kind} written out as values"]

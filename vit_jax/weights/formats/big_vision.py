"""The npz formats of google-research/big_vision (models/vit.py), old and new."""

import numpy as np

from vit_jax.data.preprocess import Preprocess
from vit_jax.weights.formats import linen
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, Reader
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_ANCHOR = "embedding/kernel"
_OLD_POSITIONS = ("pos_embedding", "Transformer/pos_embedding")
_SCANNED = "Transformer/encoderblock/"


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    names = tensors.flat.keys()
    prefix = linen.find_prefix(names, _ANCHOR)
    return prefix is not None and any(
        name.startswith(f"{prefix}Transformer/encoderblock") for name in names
    )


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a network, or the image tower of two networks; see `registry.Reader`."""
    flat, notes = linen.strip(tensors.flat, _ANCHOR)
    flat = linen.rename_blocks(_move_map_head(unstack(flat)))
    flat, more = _fit_positions(flat)
    options = linen.google_options(flat, tensors.image_size)
    if POSITIONS not in flat:
        options["posemb"] = "sincos2d"
        more += ("position embeddings: not in the file, assumed fixed (sincos2d)",)
    kinds = {"MAPHead_0/probe": "map", "cls": "token"}
    options["pool"] = next(
        (kind for name, kind in kinds.items() if name in flat), "gap"
    )
    if options["pool"] == "map" and "cls" in flat:
        options["class_token"] = True
    # In big_vision, configs/vit_i1k.py and vit_i21k.py evaluate on the centre 224 of
    # 256 pixels, half a pixel rounded down; the image towers (configs/proj/image_text)
    # use the whole image, squashed.
    tower = linen.find_prefix(tensors.flat, _ANCHOR).endswith("img/")
    size = options["image_size"]
    preprocess = Preprocess(
        size, interpolation="area", crop_fraction=224 / 256, crop_down=True
    )
    if tower:
        preprocess = linen.whole_image(size)
    return linen.finish(tensors, flat, options, "big_vision", preprocess, notes + more)


def unstack(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Splits arrays that a scan stacked along the first axis into layers."""
    layers = {}
    for name, value in flat.items():
        if name.startswith(_SCANNED):
            rest = name.removeprefix(_SCANNED)
            for i, layer in enumerate(value):
                layers[f"Transformer/encoderblock_{i}/{rest}"] = layer
        else:
            layers[name] = value
    return layers


def _move_map_head(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Moves a MAP head from the top level to the name that later files use."""
    if "probe" not in flat:
        return flat
    parts = ("probe", "MultiHeadDotProductAttention_", "LayerNorm_", "MlpBlock_")
    return {
        f"MAPHead_0/{name}" if name.startswith(parts) else name: value
        for name, value in flat.items()
    }


def _fit_positions(
    flat: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Renames position embeddings, and adds or drops the row of the class token."""
    flat, notes = dict(flat), ()
    for name in _OLD_POSITIONS:
        if name in flat:
            flat[POSITIONS] = flat.pop(name)
    if POSITIONS not in flat:
        return flat, notes
    positions, square = flat[POSITIONS], _is_square(flat[POSITIONS].shape[1])
    if "cls" in flat and square:
        # big_vision adds the class token after the positions, so it has no position.
        row = np.zeros_like(positions[:, :1])
        flat[POSITIONS] = np.concatenate([row, positions], axis=1)
        notes = ("position of the class token: not in the file, set to zeros",)
    elif "cls" not in flat and not square and _is_square(positions.shape[1] - 1):
        flat[POSITIONS] = positions[:, 1:]
        notes = ("position embedding of a missing class token: dropped",)
    return flat, notes


def _is_square(patches: int) -> bool:
    return int(np.sqrt(patches)) ** 2 == patches


READERS["big_vision"] = Reader(recognises, read)

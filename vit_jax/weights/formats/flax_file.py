"""Reads files of `flax.serialization`, and the arrays of transformers' Flax classes.

`FlaxPreTrainedModel.save_pretrained` of transformers up to version 4 writes
flax_model.msgpack, or shards of it with an index, and with `safe_serialization=True` a
.safetensors file with the same names. The names and layouts are those of Flax layers;
`torch_names` gives the arrays those of the PyTorch classes, whose formats read the rest.
Sources: flax/serialization.py; modeling_flax_utils.py, modeling_flax_pytorch_utils.py
and modeling_flax_{vit,clip,beit,dinov2}.py of transformers 4.55.
"""

import itertools
import math
import mmap
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

import ml_dtypes
import msgpack
import numpy as np

# First byte of a map that is not empty, with the size of its head, and of a name in it.
_MAPS = {**dict.fromkeys(range(0x81, 0x90), 1), 0xDE: 3, 0xDF: 5}
_NAMES = {*range(0xA0, 0xC0), 0xD9, 0xDA}
# Types of extensions in Flax: an array, and a NumPy scalar in the same encoding.
_ARRAYS = (1, 3)
_CHUNKED = "__msgpack_chunked_array__"  # Flax splits arrays of more than a GiB.
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)} | {
    name: np.dtype(name)
    for name in (
        *("bool", "float16", "float32", "float64"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}
# Python's objects take far more memory than the bytes of a malicious file, so there may
# be no more of them than a large network with the state of its optimiser has.
_MAX_ENTRIES = 200_000  # In all maps.
_MAX_LEVEL = 4096  # Entries of one map.
_MAX_DEPTH, _MAX_NAME, _MAX_DIMENSIONS = 32, 256, 8

# The patch embedding of ViT, BEiT and DINOv2, or of CLIP, after a prefix or without one.
_PATCHES = re.compile(r"(.*\.)?embeddings\.patch_embedding(s\.projection)?\.kernel")


def starts(start: bytes) -> bool:
    """Returns whether the first bytes of a file are those of a msgpack map of names."""
    head = _MAPS.get(start[0], len(start)) if start else 0
    return 0 < head < len(start) and start[head] in _NAMES


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads the arrays and numbers of a file that `flax.serialization.to_bytes` wrote.

    Returns:
      Arrays by name, levels joined by "/".

    Raises:
      ValueError: the file is damaged, or has anything else in it.
    """
    count = itertools.count(1)

    def limited(pairs):
        content = dict(pairs)
        if any(next(count) > _MAX_ENTRIES for _ in content):
            raise ValueError(f"it has more than {_MAX_ENTRIES:,} entries")
        return content

    with pathlib.Path(path).open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tree = msgpack.unpackb(
        data,
        object_pairs_hook=limited,
        max_map_len=_MAX_LEVEL,
        max_array_len=_MAX_DIMENSIONS,
        max_str_len=_MAX_NAME,
    )
    return dict(_flatten(tree, ()))


def torch_names(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts the arrays of a vision model of transformers' Flax classes to PyTorch's.

    Args:
      flat: arrays by name, levels joined by "/" or ".". Arrays of anything else are
        returned unchanged.

    Returns:
      Arrays by their PyTorch names; kernels (input, output) and (height, width, input,
      output) have become weights (output, input) and (output, input, height, width).

    Raises:
      ValueError: a kernel has another number of dimensions, or a name occurs twice.
    """
    dotted = {name.replace("/", "."): value for name, value in flat.items()}
    if not any(_PATCHES.fullmatch(name) for name in dotted):
        return dict(flat)
    converted = dict(_to_torch(*item) for item in dotted.items())
    if len(converted) < len(flat):
        raise ValueError("it has several arrays of one name in PyTorch")
    return converted


def _to_torch(name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    stem, dot, leaf = name.rpartition(".")
    if leaf == "kernel":
        if value.ndim not in (2, 4):
            raise ValueError(f"{name} has shape {value.shape}: not of a known layer")
        # From (..., input, output) to (output, input, ...).
        value = np.moveaxis(value, (-1, -2), (0, 1))
    renamed = leaf in ("kernel", "scale", "embedding")
    return f"{stem}{dot}weight" if renamed else name, value


def _flatten(
    level: dict | object, path: tuple[str, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields arrays by name, and removes each from the tree to free its bytes."""
    name = "/".join(path)
    if not isinstance(level, dict):
        if level is not None:
            yield name, _leaf(level, name)
    elif _CHUNKED in level:
        yield name, _join(level, name)
    elif len(path) == _MAX_DEPTH:
        raise ValueError(f"{name[:_MAX_NAME]} is nested {_MAX_DEPTH} levels deep")
    else:
        while level:
            key = next(iter(level))
            if type(key) is not str:
                raise ValueError(f"{name or 'it'} has the key {key!r}, not a name")
            yield from _flatten(level.pop(key), (*path, key))


def _leaf(value: object, name: str) -> np.ndarray:
    """Returns an array or a number as an array."""
    if isinstance(value, bool | int | float):
        return np.asarray(value)
    if not isinstance(value, msgpack.ExtType) or value.code not in _ARRAYS:
        kind = type(value).__name__
        raise ValueError(f"{name} is of type {kind}, not an array")
    shape, dtype, content = msgpack.unpackb(
        value.data, raw=True, max_array_len=_MAX_DIMENSIONS, max_map_len=0
    )
    dtype = dtype.decode() if isinstance(dtype, bytes) else str(dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"{name} holds {dtype} numbers")
    count = len(content) // _DTYPES[dtype].itemsize
    return np.frombuffer(content, _DTYPES[dtype]).reshape(_shape(shape, count, name))


def _join(chunked: dict, name: str) -> np.ndarray:
    """Returns an array that Flax has split."""
    shape, chunks = (
        [chunked[key][str(i)] for i in range(len(chunked[key]))]
        for key in ("shape", "chunks")
    )
    array = np.concatenate([_leaf(chunk, name).reshape(-1) for chunk in chunks])
    return array.reshape(_shape(shape, array.size, name))


def _shape(shape: list, count: int, name: str) -> tuple[int, ...]:
    """Returns the shape of an array if it has `count` numbers."""
    sizes = all(type(side) is int and 0 <= side <= max(count, 1) for side in shape)
    if not sizes or math.prod(shape) != count:
        raise ValueError(f"{name} of shape {shape} has {count:,} numbers")
    return tuple(shape)

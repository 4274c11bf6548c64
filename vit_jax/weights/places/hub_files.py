"""Which files of a repository are a model's weights and what describes them."""

import fnmatch
import pathlib
from collections.abc import Sequence

from vit_jax.weights.places import cache

# Best first. Other frameworks' (flax_model.msgpack, tf_model.h5) are not read.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "*.safetensors",
    "*.npz",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "*.bin",
    "*.pth",
    "*.pt",
)
_COMPANIONS = ("config.json", "preprocessor_config.json")
_INDEX = ".index.json"
_SHOWN = 12


def wanted(listed: Sequence[str], path: str, place: str) -> list[str]:
    """Chooses files: the weights first, all their parts, then what describes them.

    Args:
      listed: all files of a repository.
      path: of a file or folder in it; "" is all of it.
      place: for messages.

    Returns:
      Paths in the repository.

    Raises:
      FetchError: no such file, no weights, or more than one model.
    """
    if path in listed:
        first = path
        folder = path.rpartition("/")[0]
    else:
        first, folder = "", path
    start = f"{folder}/" if folder else ""
    inside = [f.removeprefix(start) for f in listed if f.startswith(start)]
    if not inside:
        raise cache.FetchError(
            place, f"has no file {path!r}", f"it has {_some(listed) or 'none'}"
        )
    first = first.removeprefix(start) or _weights(inside, place)
    names = [first, *_parts(first, inside, place)]
    names += [c for c in _COMPANIONS if c in inside and c != first]
    return [start + name for name in names]


def _weights(inside: Sequence[str], place: str) -> str:
    beside = [name for name in inside if "/" not in name]
    for pattern in _WEIGHTS:
        found = fnmatch.filter(beside, pattern)
        if len(found) > 1:
            raise cache.FetchError(
                place, f"has more than one model ({_some(found)})", "name a file of it"
            )
        if found:
            return found[0]
    raise cache.FetchError(
        place,
        "has no weights that are read (safetensors, npz or PyTorch)",
        f"it has {_some(inside) or 'no files'}",
    )


def _parts(index: str, inside: Sequence[str], place: str) -> list[str]:
    """Returns the files that an index belongs to: model-00001-of-00002.safetensors."""
    if not index.endswith(_INDEX):
        return []
    stem = pathlib.PurePosixPath(index.removesuffix(_INDEX))
    parts = fnmatch.filter(inside, f"{stem.with_suffix('')}-*-of-*{stem.suffix}")
    if not parts:
        raise cache.FetchError(
            place, f"has {index} but no part of it", f"it has {_some(inside)}"
        )
    return sorted(parts)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown

"""Checkpoints in the npz format of google-research/vision_transformer."""

import os
import re
import zipfile
import zlib

import numpy as np
from etils import epath
from flax.traverse_util import unflatten_dict

from vit_jax.errors import UserError


def load(path: str | os.PathLike) -> dict:
    """Reads an npz checkpoint, whose names are ours with "/" between the levels.

    Args:
      path: of the file.

    Returns:
      Nested dict of arrays.

    Raises:
      UserError: the file is not an npz archive of plain arrays.
    """
    try:
        with epath.Path(path).open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ValueError("it is not a zip archive")
            flat = dict(np.load(stream, allow_pickle=False))
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a readable .npz checkpoint: {error}") from error
    linen = any("/LayerNorm_1/" in name for name in flat)
    return unflatten_dict(
        {_as_published(n) if linen else n: value for n, value in flat.items()}, sep="/"
    )


# The published files count the submodules of a block; what later code writes counts
# those of each class.
_PUBLISHED = {
    "LayerNorm_1": "LayerNorm_2",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "MlpBlock_0": "MlpBlock_3",
}


def _as_published(name: str) -> str:
    return re.sub(r"(?<=/)(\w+_\d)(?=/)", lambda m: _PUBLISHED.get(m[1], m[1]), name)

"""Made-up images, for runs on a machine without the data set."""

import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from vit_jax.data import splits
from vit_jax.data.arrays import ArraySource

DEFAULT_EXAMPLES = 64
_SPLITS = ("train", "val", "validation", "test")
_CELLS = 8  # The class pattern is a grid of this many cells a side.


def open_made(
    split: str, image_size: Sequence[int], channels: int, classes: int, examples: int
) -> ArraySource:
    """Makes labelled images that can be learnt: noise plus a pattern of the class.

    Args:
      split: expression over train, val, validation and test.
      image_size: height and width in pixels.
      channels: 1 or 3.
      classes: number of classes; record i has label i modulo it.
      examples: size of every split; 0 is 64.

    Returns:
      Images that depend on the split name, the record number and their shape only.
    """
    sizes = dict.fromkeys(_SPLITS, examples or DEFAULT_EXAMPLES)
    for name in splits.names(split):  # Recipes name splits that only their set has.
        sizes.setdefault(name, examples or DEFAULT_EXAMPLES)
    numbering = splits.Numbering.of(split, sizes, "made")
    records = [(name, number) for name, part in numbering.parts for number in part]
    shape = (*image_size, channels)
    images = np.stack([made_image(*record, classes, shape) for record in records])
    labels = np.array([number % classes for _, number in records], np.int32)
    return ArraySource(f"made {split}", images, labels, numbering=numbering)


def made_image(
    split: str, number: int, classes: int, shape: tuple[int, int, int]
) -> UInt8[np.ndarray, "H W C"]:
    """Returns one image as a pure function of its arguments.

    Args:
      split: plain split name.
      number: record number.
      classes: number of classes.
      shape: height, width and channels.
    """
    height, width, channels = shape
    noise = _random_bytes(zlib.crc32(split.encode()), number, height * width * channels)
    cells = _random_bytes(0, number % classes, _CELLS * _CELLS * channels)
    cells = cells.reshape(_CELLS, _CELLS, channels)
    rows, columns = (np.arange(size) * _CELLS // size for size in (height, width))
    # Halved, so that the sum stays within a byte.
    return noise.reshape(shape) // 2 + cells[rows][:, columns] // 2


def _random_bytes(key: int, counter: int, count: int) -> np.ndarray:
    bits = np.random.Philox(key=key, counter=[0, 0, 0, counter])
    return bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]

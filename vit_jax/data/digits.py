"""The 1 797 handwritten digits inside scikit-learn: real images without a download.

Source: https://archive.ics.uci.edu/dataset/80 (test part), 8x8 pixels of 0..16.
"""

import numpy as np

from vit_jax.data import splits
from vit_jax.data.arrays import ArraySource

CLASS_NAMES = tuple("0123456789")


def open_digits(split: str, channels: int) -> ArraySource:
    """Reads the digits into memory.

    Args:
      split: expression over "train" and "test"; every fifth image of each class is
        test, so that the split depends on no random stream.
      channels: 1, or 3 to repeat the grey value.

    Returns:
      8x8 images, grey values 0..16 scaled to 0..255.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    test = np.zeros(len(digits.target), bool)
    for label in range(10):
        test[np.flatnonzero(digits.target == label)[4::5]] = True
    members = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}

    sizes = {name: len(records) for name, records in members.items()}
    numbering = splits.Numbering.of(split, sizes, "digits")
    records = np.concatenate(
        [members[name][list(numbers)] for name, numbers in numbering.parts]
    )
    images = np.round(digits.images[records] * (255 / 16)).astype(np.uint8)
    return ArraySource(
        name=f"digits {split}",
        images=np.repeat(images[..., None], channels, axis=-1),
        labels=digits.target[records].astype(np.int32),
        class_names=CLASS_NAMES,
        numbering=numbering,
    )

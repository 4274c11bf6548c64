"""Features of image files, and of the images of a split.

Letters: N images, R of them, D features.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from vit_jax.data import image_files
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources.base import Source, read_record
from vit_jax.errors import UserError

# From images to the name of each with its features, or why it cannot be read.
Compute = Callable[
    [Iterable[image_files.Named]],
    Iterator[tuple[str, Float[np.ndarray, " D"] | str]],
]
OnUnreadable = Callable[[str, str], None]


class ImageFeatures(NamedTuple):
    """Features of the images that could be read.

    Attributes:
      numbers: number of each image in the split, or in the order of the images given.
      names: names for messages: the path of a file, or "digits record 17".
      features: input of the classifier, float32.
      labels: class of each image; None if labels are not read.
    """

    numbers: Integer[np.ndarray, " N"]
    names: list[str]
    features: Float[np.ndarray, "N D"]
    labels: Integer[np.ndarray, " N"] | None = None


def refuse(name: str, why: str) -> None:
    """Raises UserError for an image that cannot be read."""
    raise UserError(f"{name}: {why}; remove or replace the image")


def of_images(
    images: Iterable[image_files.Named],
    compute: Compute,
    on_unreadable: OnUnreadable = refuse,
) -> ImageFeatures:
    """Computes features of images.

    Args:
      images: output of `data.image_files.find_some` for paths and folders.
      compute: function that computes the features, such as
        `feature_table.Extractor.features`.
      on_unreadable: function called with the name of each image that cannot be read,
        and why; by default it raises UserError.

    Raises:
      UserError: no image can be read, or features are not finite.
    """
    return _collected(enumerate(compute(images)), on_unreadable)


def of_split(
    source: Source,
    compute: Compute,
    *,
    rows: Iterable[int] | Integer[np.ndarray, " R"] | None = None,
    labelled: bool = False,
    on_unreadable: OnUnreadable = refuse,
) -> ImageFeatures:
    """Computes features of the images of a split.

    Args:
      source: open split.
      compute, on_unreadable: arguments of `of_images`.
      rows: numbers of the records to read; all if None.
      labelled: whether to read labels, one class per image.

    Raises:
      UserError: no image can be read, or features are not finite.
    """
    # Records are read ahead of the features, by another thread.
    read: collections.deque[tuple[int, int]] = collections.deque()

    def images():
        for row in map(int, range(len(source)) if rows is None else rows):
            name = source.describe(row)
            try:
                record = read_record(source, row)
            except DamagedImage as error:
                on_unreadable(name, str(error))
                continue
            except (KeyError, TypeError) as error:
                raise RuntimeError(f"{name} cannot be read") from error
            read.append((row, record["label"] if labelled else -1))
            yield name, record["image"]

    labels = []

    def numbered():
        for one in compute(images()):
            row, label = read.popleft()
            if not isinstance(one[1], str):
                labels.append(label)
            yield row, one

    features = _collected(numbered(), on_unreadable)
    return features._replace(labels=np.array(labels)) if labelled else features


def _collected(
    computed: Iterable[tuple[int, tuple]], on_unreadable: OnUnreadable
) -> ImageFeatures:
    numbers, names, features = [], [], []
    for number, (name, result) in computed:
        if isinstance(result, str):
            on_unreadable(name, result)
            continue
        numbers.append(number)
        names.append(name)
        features.append(result)
    if not features:
        raise UserError("none of the images could be read: give others")
    return ImageFeatures(
        np.array(numbers), names, np.stack(features).astype(np.float32)
    )

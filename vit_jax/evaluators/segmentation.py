"""Semantic segmentation: intersection over union of the classes, over all pixels of a split.

Each image is classified at its original size, see sliding_window.py and
whole_images.py, and each of its pixels counts once. Letters: H by W pixels, L classes.
"""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
from jaxtyping import Int, Integer

from vit_jax.command_line import progress
from vit_jax.config.fields import key
from vit_jax.data import masks
from vit_jax.data.decode import DamagedImage
from vit_jax.data.loader import Loader
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import name_of
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.evaluators.protocol import (
    SKIPPED,
    Confusion,
    Evaluator,
    Pass,
    Scored,
    Segment,
    Stop,
)
from vit_jax.evaluators.sliding_window import RESIZES, Sliding
from vit_jax.evaluators.splits import EvalConfig, EvalSplit
from vit_jax.evaluators.whole_images import WholeImages

_MAX_CLASSES = 200  # IoUs by class are metrics only up to this number.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationConfig(EvalConfig):
    """Mean intersection over union of masks."""

    fractions: ClassVar = ("miou", "pixel_accuracy", "mean_accuracy", "iou/*")

    kind: str = key("segmentation", "Kind of evaluation.")
    split: str = key("", 'Split to evaluate; "" is the test split of the data set.')
    resize: str = key(
        "cover",
        'How an image is divided into windows of the network\'s size: "cover" resizes '
        'it, with its aspect ratio kept, until it just covers one window; "none" keeps '
        'its size; "whole" resizes all of it to one window. Networks with max_tokens '
        "use no windows.",
        choices=RESIZES,
    )
    overlap: float = key(
        1 / 3,
        "Smallest overlap of neighbouring windows, as a fraction of their side.",
        below=1,
    )

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=False, labelled=False)
        classes, data = splits.num_classes, split.data
        if not (data.mask_key and classes):
            raise UserError(
                f"evals.{name} compares masks: set data.mask_key to their feature, column "
                "or folder, and evaluate a network with a segmentation head "
                "(task.name='segmentation')"
            )
        split.data = dataclasses.replace(data, num_classes=classes)
        names = split.source.class_names or splits.class_names
        if len(names) not in (0, classes):
            raise UserError(
                f"evals.{name}: {split.title} has {len(names)} classes of pixels, but "
                f"the network {classes}: train a head for these"
            )
        given = splits.preprocess
        used = given or Preprocess.of_data(vars(data))
        how = Sliding(
            data.image_size,
            self.resize,
            self.overlap,
            used.interpolation,
            mean=tuple(data.mean),
        )
        if given and given.max_tokens:
            how = WholeImages.of(given, how)

        def score_images(segment, batch_size, stop):
            counted = count(split, how, segment, batch_size, stop)
            return counted and score(*counted, tuple(names))

        passes = (Pass(split, Wanted()),)
        return Evaluator(passes, score_images=score_images, try_first=_try_first)


def count(
    split: EvalSplit,
    how: Sliding | WholeImages,
    segment: Segment,
    batch_size: int,
    stop: Stop,
) -> tuple[Integer[np.ndarray, "L L"], int, int] | None:
    """Counts the pixels of a split; every process of the job calls it.

    Args:
      split: images with masks; each process reads a part of them.
      how: division of an image into windows or sequences.
      segment: function of windows, or sequences, that returns logits, on the devices of
        this process.
      batch_size: number of windows per batch.
      stop: function that is called before each image; returning True stops.

    Returns:
      The number of pixels of each true class (rows) and predicted class (columns), over
      the images of all processes; the number of these images; and the number of damaged
      images, which were skipped. None if stopped.

    Raises:
      UserError: an image or a mask is damaged.
    """
    classes = split.data.num_classes
    loader = Loader(split.source, split.data, split.title, (), {})
    share, shares = jax.process_index(), jax.process_count()
    stopped, skipped = False, 0

    def read():
        nonlocal stopped, skipped
        rounds = range(-(-len(split.source) // shares))
        for i in progress.each(rounds, split.title, "images", leave=False):
            if stop():  # All processes agree, and call it once per round.
                stopped = True
                return
            record = i * shares + share
            if record >= len(split.source):
                continue
            try:
                image, mask = masks.read_pair(split.source, split.data, record)
            except DamagedImage as error:
                loader.refuse(record, error)
                skipped += 1
                continue
            yield mask, image

    counts, images = np.zeros((classes, classes), np.int64), 0
    for mask, predicted in how.label_maps(read(), segment, batch_size):
        counts += confusion(mask, predicted, classes)
        images += 1
    if stopped:
        return None
    each = meshes.process_allgather(counts=counts, images=images, skipped=skipped)
    return each["counts"].sum(0), int(each["images"].sum()), int(each["skipped"].sum())


def confusion(
    labels: Int[np.ndarray, "H W"], predicted: Int[np.ndarray, "H W"], classes: int
) -> Integer[np.ndarray, "L L"]:
    """Returns pixel counts by true class (rows) and predicted class (columns).

    Pixels that have no class (-1) are not counted.
    """
    counted = labels != masks.IGNORED
    cells = labels[counted].astype(np.int64) * classes + predicted[counted]
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def score(
    counts: Integer[np.ndarray, "L L"],
    images: int,
    skipped: int = 0,
    names: tuple[str, ...] = (),
) -> Scored:
    """Scores the pixels of a whole split, like mmsegmentation's IoUMetric.

    Args:
      counts: number of pixels of each true class (rows) and predicted class (columns).
      images: number of images.
      skipped: number of damaged images that were skipped.
      names: names of the classes; numbers if empty.

    Returns:
      miou, the mean intersection over union of the classes that occur or are predicted;
      pixel_accuracy; mean_accuracy, the mean over the classes that occur of the
      fraction of right pixels; majority_baseline, the pixel accuracy of always
      predicting the most frequent class; examples; iou/CLASS for up to 200 classes. And the
      confusion matrix.

    Raises:
      UserError: no pixel has a class.
    """
    if not counts.sum():
        raise UserError(
            "no pixel of the evaluation split has a class: check data.mask_key, "
            "data.ignore_label and data.reduce_zero_label"
        )
    right, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    union = true + predicted - right
    iou = {int(k): right[k] / union[k] for k in np.flatnonzero(union)}
    occurs = true > 0
    metrics = {
        "miou": float(np.mean([*iou.values()])),
        "pixel_accuracy": float(right.sum() / true.sum()),
        "mean_accuracy": float((right[occurs] / true[occurs]).mean()),
        "majority_baseline": float(true.max() / true.sum()),
        "examples": images,
    }
    if skipped:
        metrics[SKIPPED] = skipped
    if len(counts) <= _MAX_CLASSES:
        named = ((names[k] if names else k, value) for k, value in iou.items())
        metrics |= {f"iou/{name}": float(value) for name, value in named}
    return Scored(metrics, Confusion(counts, names, "pixels"))


def _try_first(split: EvalSplit) -> None:
    """Reads the first image and mask; UserError if they contradict the config."""
    try:
        masks.read_pair(split.source, split.data, 0)
    except DamagedImage as error:
        if split.data.on_error == "raise":
            raise UserError(f"{name_of(split.source, 0)} {error}") from error

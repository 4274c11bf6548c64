"""ReaL and ObjectNet: test sets of ImageNet classifiers with sets of right classes.

ReaL (arXiv:2006.07159) has a set of right labels for each image of ImageNet's
validation split; ObjectNet (Barbu et al., NeurIPS 2019) has 113 classes that correspond
to one or several classes of ImageNet.
"""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from vit_jax.command_line import files
from vit_jax.config.fields import key
from vit_jax.data import class_names
from vit_jax.data.imagenet import NUM_CLASSES, OBJECTNET_CLASSES
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored, mean
from vit_jax.evaluators.splits import EvalConfig, EvalSplits

_FEATURE = "real_label"  # Feature of imagenet2012_real in TFDS.
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")

# The ImageNet classes that correspond to a class of ObjectNet.
OVERLAP = tuple(sorted({n for numbers in OBJECTNET_CLASSES.values() for n in numbers}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealConfig(EvalConfig):
    """Accuracy on ImageNet's validation images with the labels of ReaL."""

    fractions: ClassVar = ("top1", "top5")

    kind: str = key("real", "Kind of evaluation.")
    name: str = key(
        "imagenet2012_real", "Data set to evaluate, in place of `data.name`."
    )
    label_key: str = key("original_label", "Feature or column of the original labels.")
    split: str = key("validation", "Split to evaluate.")
    labels: str = key(
        "",
        'Path of the authors\' real.json; "" if the data set has these labels.',
        reason="ImageNet without the labels of ReaL (arXiv:2006.07159)",
    )

    def open(self, name, splits):
        order = _imagenet_order(name, self, splits)
        split = splits.open(name, self, self.split, model_classes=False)

        @functools.cache
        def sets():
            labels = read_real(split.source, self.labels, split.title)
            return [frozenset(order[list(numbers)].tolist()) for numbers in labels]

        return Evaluator(
            (Pass(split, Wanted(predictions=True)),),
            lambda outputs, stop: score_real(*outputs, sets()),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectNetConfig(EvalConfig):
    """Accuracy on the classes of ObjectNet that overlap with ImageNet's."""

    fractions: ClassVar = ("top1", "top5", "top1_overlap")

    kind: str = key("objectnet", "Kind of evaluation.")
    name: str = key("objectnet", "Data set to evaluate, in place of `data.name`.")
    split: str = key("images", "Split to evaluate.")

    def open(self, name, splits):
        order = _imagenet_order(name, self, splits)
        split = splits.open(name, self, self.split, model_classes=False)
        if split.source.class_names != tuple(OBJECTNET_CLASSES):
            raise UserError(
                f"evals.{name}: {split.title} does not have ObjectNet's "
                f"{len(OBJECTNET_CLASSES)} overlapping classes: take name='objectnet'"
            )
        allowed = tuple(order[list(OVERLAP)].tolist())
        return Evaluator(
            (Pass(split, Wanted(predictions=True, restricted=allowed)),),
            lambda outputs, stop: score_objectnet(*outputs, order),
        )


def read_real(source: Source, path: str, title: str) -> list[frozenset[int]]:
    """Reads the set of right labels of each record; 3,163 of 50,000 sets are empty.

    Args:
      source: ImageNet's validation split, or a part of it. Without a file it must be
        TFDS's imagenet2012_real; with one its records must contain the names of their
        files (ILSVRC2012_val_00000001.JPEG), in their paths or a feature `file_name`.
      path: path of the authors' real.json, a list of labels for each of the 50,000
        images in the order of their numbers; "" if the source has the labels.

    Raises:
      UserError: the labels are missing, or a record cannot be identified.
    """
    if not path:
        sets = source.read_feature(_FEATURE)
        if sets is None:
            raise UserError(
                f"{title} has no feature {_FEATURE!r} with the labels of ReaL: take "
                "name='imagenet2012_real', or set labels= to the authors' real.json"
            )
        return [frozenset(np.ravel(labels).tolist()) for labels in sets]
    known = _read_file(path)
    files = source.read_feature("file_name")
    if files is None:
        files = [source.record_id(i) for i in range(len(source))]
    return [frozenset(known[_number(file, len(known), title)]) for file in files]


def score_real(outputs: Outputs, sets: Sequence[frozenset[int]]) -> Scored:
    """Scores predictions against sets of right labels (arXiv:2006.07159, section 3).

    Images with an empty set are not scored. The metrics are top1, top5 (one of the best
    five is right) and examples, the number of scored images.
    """
    tops = outputs.predictions.tops
    chosen = [sets[record] for record in outputs.records]
    right = np.array(
        [
            [top in labels for top in best]
            for labels, best in zip(chosen, tops.tolist(), strict=True)
            if labels
        ],
        bool,
    ).reshape(-1, tops.shape[1])
    if not len(right):
        raise UserError("evals: no image of this split has a label in ReaL")
    return Scored(
        {"top1": mean(right[:, 0]), "top5": mean(right.any(1)), "examples": len(right)}
    )


def score_objectnet(outputs: Outputs, order: np.ndarray | None = None) -> Scored:
    """Scores ImageNet predictions on ObjectNet's classes that overlap ImageNet.

    The labels are indices into `OBJECTNET_CLASSES`; `order` has the model's index of
    each ImageNet class, the identity if None. The metrics are top1 and top5 among all
    1,000 classes, as in the authors' evaluation, where any ImageNet class of the object
    is right; top1_overlap, among the classes of the 113 objects only; and examples.

    Source: objectnet.dev; github.com/abarbu/objectnet-template-tensorflow.
    """
    belongs = np.zeros((len(OBJECTNET_CLASSES), NUM_CLASSES), bool)
    order = np.arange(NUM_CLASSES) if order is None else order
    for place, numbers in enumerate(OBJECTNET_CLASSES.values()):
        belongs[place, order[list(numbers)]] = True
    labels, restricted = outputs.labels, outputs.restricted.tops
    right = belongs[labels[:, None], outputs.predictions.tops]
    return Scored(
        {
            "top1": mean(right[:, 0]),
            "top5": mean(right.any(1)),
            "top1_overlap": mean(belongs[labels, restricted[:, 0]]),
            "examples": len(labels),
        }
    )


def _number(file: str | bytes, known: int, title: str) -> int:
    """Returns the index of an image in the validation split."""
    text = file.decode() if isinstance(file, bytes) else str(file)
    match = _NUMBER.search(text)
    if not match or not 0 < int(match[1]) <= known:
        raise UserError(
            f"{title}: {text!r} does not name an image of ImageNet's validation split "
            "as ILSVRC2012_val_00000001.JPEG does: ReaL's labels are unknown"
        )
    return int(match[1]) - 1


def _read_file(path: str) -> list[list[int]]:
    files.check("labels", pathlib.Path(path).expanduser())
    try:
        known = json.loads(pathlib.Path(path).expanduser().read_text("utf-8"))
        good = all(
            isinstance(labels, list) and all(type(x) is int for x in labels)
            for labels in known
        )
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"labels={path!r} cannot be read: {error}") from error
    if not isinstance(known, list) or not good:
        raise UserError(
            f"labels={path!r} is not a list of lists of class numbers: give the "
            "authors' real.json"
        )
    return known


def _imagenet_order(name: str, config: EvalConfig, splits: EvalSplits) -> np.ndarray:
    """Returns the model's index of each ImageNet class; UserError if it lacks one."""
    num_classes = splits.num_classes
    order = class_names.imagenet_order(splits.class_names, num_classes)
    if num_classes != NUM_CLASSES or order is None or (order < 0).any():
        other = (
            f"{num_classes}" if num_classes != NUM_CLASSES else "1,000 with other names"
        )
        raise UserError(
            f"evals.{name}: kind={config.kind!r} is for classifiers of ImageNet's 1,000 "
            f"classes, but the model has {other}: leave it out"
        )
    return order

"""Test sets of ImageNet classifiers whose images have several right labels, or others.

ReaL (arXiv:2006.07159) gives each image of ImageNet's validation split the set of
labels that are right; ObjectNet (Barbu et al., NeurIPS 2019) has classes of its own,
113 of which are one or several of ImageNet's. Letters: N examples, T the best classes.
"""

import json
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from vit_jax import files
from vit_jax.data import objectnet
from vit_jax.data.sources import Source
from vit_jax.errors import UserError
from vit_jax.evaluation.classification import Scored
from vit_jax.evaluation.passes import RESTRICTED, TOPS, Outputs

_FEATURE = "real_label"  # Of TFDS's imagenet2012_real.
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
CLASSES = 1_000

# The ImageNet classes that are one of ObjectNet's.
OVERLAP = tuple(sorted({n for numbers in objectnet.CLASSES.values() for n in numbers}))


def read_real(source: Source, path: str, title: str) -> list[frozenset[int]]:
    """Reads which labels are right for each record.

    Args:
      source: ImageNet's validation split, whole or in part. Without a file it must be
        TFDS's imagenet2012_real; with one its records must name their files
        (ILSVRC2012_val_00000001.JPEG): in their paths, or in a feature `file_name`.
      path: the authors' real.json, a list of labels for each of the 50,000 images in
        the order of their numbers; "" if the source has the labels.
      title: of the source, for messages.

    Returns:
      A set for each record; 3,163 of the 50,000 are empty.

    Raises:
      UserError: the labels are not there, or a record cannot be told.
    """
    if not path:
        sets = _feature(source, _FEATURE)
        if sets is None:
            raise UserError(
                f"{title} has no feature {_FEATURE!r} with the labels of ReaL: take "
                "name='imagenet2012_real', or set labels= to the authors' real.json"
            )
        return [frozenset(np.ravel(labels).tolist()) for labels in sets]
    known = _read_file(path)
    files = _feature(source, "file_name")
    if files is None:
        files = [source.record_id(i) for i in range(len(source))]
    return [frozenset(known[_number(file, len(known), title)]) for file in files]


def score_real(outputs: Outputs, sets: Sequence[frozenset[int]]) -> Scored:
    """Scores predictions against sets: right is what is in the set.

    Images whose set is empty are not scored: 46,837 of ImageNet's 50,000 are.

    Args:
      outputs: with TOPS.
      sets: for each record of the source.

    Returns:
      top1, top5 (right is any of the best five) and examples, those scored.

    Source: arXiv:2006.07159, section 3.
    """
    tops = outputs.values[TOPS]
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
        {
            "top1": float(right[:, 0].mean()),
            "top5": float(right.any(1).mean()),
            "examples": len(right),
        }
    )


def score_objectnet(outputs: Outputs) -> Scored:
    """Scores ImageNet predictions on ObjectNet's classes that overlap ImageNet.

    Args:
      outputs: with TOPS and RESTRICTED; labels are places in `objectnet.CLASSES`.

    Returns:
      top1 and top5, where right is any ImageNet class that is the object's, among all
      1,000 classes, as its authors score; top1_overlap, where only classes that are
      some object of the 113 may be predicted; and examples.

    Source: objectnet.dev; github.com/abarbu/objectnet-template-tensorflow.
    """
    belongs = np.zeros((len(objectnet.CLASSES), CLASSES), bool)
    for place, numbers in enumerate(objectnet.CLASSES.values()):
        belongs[place, list(numbers)] = True
    labels = outputs.labels
    right = belongs[labels[:, None], outputs.values[TOPS]]
    return Scored(
        {
            "top1": float(right[:, 0].mean()),
            "top5": float(right.any(1).mean()),
            "top1_overlap": float(belongs[labels, outputs.values[RESTRICTED]].mean()),
            "examples": len(labels),
        }
    )


def _feature(source: Source, name: str) -> list | None:
    """Reads one feature of all records of a TFDS set; None if it has none."""
    records = getattr(source, "records", None)
    if records is None or name not in records[0]:
        return None
    found = []
    for start in range(0, len(source), 1000):
        numbers = range(start, min(start + 1000, len(source)))
        found += [record[name] for record in records.__getitems__(numbers)]
    return found


def _number(file: str | bytes, known: int, title: str) -> int:
    """Returns the place of an image among those of the validation split."""
    text = file.decode() if isinstance(file, bytes) else str(file)
    match = _NUMBER.search(text)
    if not match or not 0 < int(match[1]) <= known:
        raise UserError(
            f"{title}: {text!r} does not name an image of ImageNet's validation split "
            "as ILSVRC2012_val_00000001.JPEG does: ReaL's labels cannot be told"
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

"""The HTML page of a network that classifies pixels, with its mistakes.

page.py has the parts that it shares with the pages of other annotations. Letters: H by W pixels, L classes.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int16, Integer, Num, UInt8
from PIL import Image

from vit_jax import weights
from vit_jax.data import display, masks
from vit_jax.data.decode import DamagedImage
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.open import open_source
from vit_jax.evaluators import label_maps, segmentation
from vit_jax.tools.finetuning import confusion, page
from vit_jax.tools.finetuning.kind import Result
from vit_jax.tools.report.blocks import Table
from vit_jax.training.config import TrainConfig

_WORST, _BEST, _PAIRS = 12, 3, 12  # Numbers of images, and of pairs of classes.
_SIDE = 360  # Longer side of a picture on the page, in pixels.

LabelMap = Int16[np.ndarray, "H W"]


class Scores(NamedTuple):
    """Mean IoU of an image's classes, pixel accuracy, and the image's record number."""

    miou: float
    pixel_accuracy: float
    record: int


class Triple(NamedTuple):
    """An image, its true classes and the predicted classes."""

    record: int
    image: Num[np.ndarray, "H W C"]
    labels: LabelMap
    predicted: LabelMap


def write(config: TrainConfig, result: Result, score: str) -> str:
    """Writes the page of a run and returns its path; for arguments see `report.write`."""
    pretrained = weights.open_pretrained(result.workdir, with_task=True)
    data, how = config.data, config.evals[result.split]
    source = open_source(data, how.split)
    classifier = label_maps.PixelClassifier(
        pretrained,
        Preprocess.of_data(vars(data)),
        pretrained.class_names or source.class_names,
    )

    def triples(records: Iterable[int]) -> Iterator[Triple]:
        """Yields images with their classes, except for damaged images."""

        def read():
            for record in records:
                try:
                    image, labels = masks.read_pair(source, data, record)
                except DamagedImage:  # Training has already reported it.
                    continue
                yield (record, image, labels), image

        keys = config.batch_size, how.resize, how.overlap
        for seen, predicted in classifier.label_maps(read(), *keys):
            yield Triple(*seen, predicted)

    classes = data.num_classes
    total, scores = np.zeros((classes, classes), np.int64), []
    for one in triples(range(len(source))):
        counts = segmentation.confusion(one.labels, one.predicted, classes)
        total += counts
        if counts.any():
            metrics = segmentation.score(counts, 1).metrics
            scores.append(
                Scores(metrics["miou"], metrics["pixel_accuracy"], one.record)
            )
    shown = dict.fromkeys(
        [*heapq.nsmallest(_WORST, scores), *heapq.nlargest(_BEST, scores)]
    )
    colors = masks.palette(classes, source.class_colors)
    pages = {
        one.record: pictures(one, colors) for one in triples(s.record for s in shown)
    }
    images = [
        {
            "caption": f"mean IoU {one.miou:.1%}, {one.pixel_accuracy:.1%} of the pixels",
            "file": source.describe(one.record),
            "name": source.record_id(one.record),
            "pictures": pages[one.record],
        }
        for one in shown
    ]
    names = classifier.class_names
    curves = {"miou": "mean IoU", "pixel_accuracy": "pixel accuracy"}
    what = f"{len(names):,} classes of pixels"
    common = page.common(config, result, score, what, curves)
    values = contents(total, names, colors, images)
    return page.write("finetuning/mask_page.html", common, result.workdir, **values)


def contents(
    counts: Integer[np.ndarray, "L L"],
    names: Sequence[str],
    colors: UInt8[np.ndarray, "L 3"],
    images: Sequence[dict],
) -> dict:
    """Returns the variables of the page.

    Args:
      counts: number of pixels of each true class (rows) and predicted class (columns).
      names: names of the classes.
      colors: red, green and blue of each class.
      images: the worst images, then the best ones: "caption", "file", "name", and "pictures" as data URLs.
    """
    right, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    with np.errstate(invalid="ignore"):
        shares = (
            right / (true + predicted - right),
            true / true.sum(),
            right / true,
            right / predicted,
        )
    order = sorted(range(len(names)), key=lambda k: np.nan_to_num(shares[0][k], nan=2))
    rows = tuple(
        (names[k], *(page.percent(column[k]) for column in shares)) for k in order
    )
    wrong = counts - np.diag(right)
    pairs = [divmod(int(i), len(names)) for i in np.argsort(-wrong, axis=None)[:_PAIRS]]
    confused = tuple(
        (
            names[i],
            names[j],
            page.percent(wrong[i, j] / true[i]),
            f"{wrong[i, j]:,}",
        )
        for i, j in pairs
        if wrong[i, j]
    )
    head = ("class", "IoU", "fraction of pixels", "recall", "precision")
    confused_head = ("true class", "predicted as", "fraction of the class", "pixels")
    return {
        "legend": [
            (name, "#" + bytes(color).hex())
            for name, color in zip(names, colors, strict=True)
        ],
        "classes": Table("Scores of the classes", head, rows),
        "confusion": page.draw(confusion.matrix(counts, names)),
        "confused": Table("Confused classes", confused_head, confused, labels=2),
        "images": images,
    }


def pictures(one: Triple, colors: UInt8[np.ndarray, "L 3"]) -> list[tuple[str, str]]:
    """Returns the photograph, and overlays of the true and the predicted mask, by name."""
    height, width = one.labels.shape
    scale = _SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    shown = Image.fromarray(display.to_rgb(one.image)).resize(size)
    # Grey, so that colours stand only for classes.
    grey = np.asarray(shown.convert("L"))[..., None]

    def over(label_map: LabelMap) -> Image.Image:
        small = Image.fromarray(label_map).resize(size, Image.Resampling.NEAREST)
        return Image.fromarray(label_maps.overlay(grey, np.asarray(small), colors))

    named = {
        "photograph": shown,
        "true mask": over(one.labels),
        "predicted mask": over(one.predicted),
    }
    return [(name, page.jpeg_url(picture)) for name, picture in named.items()]

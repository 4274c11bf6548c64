"""Settings that fine-tuning chooses for a set of images, see docs/finetuning.md."""

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax.data import decode
from vit_jax.data.config import MAX_MEGAPIXELS
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source

SMALL, LEAST_SIDE = 4, 96
IMAGES, LEAST_EPOCHS, MOST_EPOCHS = 30_000, 3, 30
LEAST_STEPS = 300  # Of a run on few images, whatever the number of epochs.
BATCHES_AN_EPOCH, LEAST_BATCH = 40, 16
MOST_BATCH = {"cpu": 64}  # Largest batch by backend.
ELSEWHERE = 128  # Largest batch on other backends.
OPTIMIZER = "sgd"
RATE, RATE_BATCH, WARMUP = 0.04, 64, 0.05
UNEVEN = 3.0  # Images of the largest class, per image of the smallest.
EVALUATIONS, PATIENCE = 12, 5
# With fewer than NOISY validation images, five evaluations in a row often fail to
# improve by chance; with fewer than FEW images, the accuracy of a class is only
# approximate.
NOISY, FEW = 400, 10
# The best of a dozen scores of fewer validation images is often an early one by chance.
CHOOSING = 100
_SAMPLE = 64  # Number of images whose sizes and colours are read.
EVALUATED = 1 / 3  # Time of a forward pass, relative to a training step on the image.


@dataclasses.dataclass(frozen=True)
class Images:
    """Properties of the training images.

    Attributes:
      count: number of images.
      side: median of their short sides, in pixels.
      grey: whether all images of the sample are grey.
      uneven: number of images of the largest class divided by that of the smallest.
    """

    count: int
    side: float
    grey: bool
    uneven: float


def look_at(
    source: Source,
    labels: Sequence | None,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> Images:
    """Returns the properties of a training split, from a sample of it.

    `labels` has the class of each image; None if an image may have several. Images with
    more than `max_megapixels` are ignored.
    """
    numbers = np.linspace(0, len(source) - 1, min(_SAMPLE, len(source))).astype(int)
    sides, grey = [], True
    for i in numbers.tolist():
        data = source[i]["image"]
        if isinstance(data, np.ndarray):
            size, image = data.shape[:2], data.astype(np.int16)
        else:
            try:
                opened = Image.open(io.BytesIO(data))
                size = opened.size
                decode.check_size(size, max_megapixels)
                if grey:
                    opened.thumbnail((64, 64))
                image = np.asarray(opened.convert("RGB"), np.int16)
            except (OSError, SyntaxError, ValueError):
                continue  # Training reports damaged images.
        sides.append(min(size))
        grey = grey and np.ptp(image, axis=-1).max(initial=0) <= 8
    counts = np.bincount(labels) if labels is not None else np.ones(1, int)
    counts = counts[counts > 0]
    return Images(
        len(source),
        float(np.median(sides or [0])),
        bool(grey),
        float(counts.max() / counts.min()),
    )


def side_of(images: Images, weights: int, patch: int) -> int:
    """Returns the side to train at: a multiple of the patch, or the weights' (pixels)."""
    if not images.side or SMALL * images.side >= weights:
        return weights
    side = max(SMALL * images.side, LEAST_SIDE)
    return min(weights, max(1, round(side / patch)) * patch)


def transforms_of(
    images: Images, preprocess: Preprocess, image_size: tuple[int, int]
) -> dict[str, str]:
    """Returns `train_transform` and `eval_transform` for images of a height and width."""
    train = f"random_resized_crop(area={_area(images)})" + (
        "" if images.grey else " | flip"
    )
    how = preprocess.whole(image_size)
    whole = preprocess.squash or preprocess.fill
    if not whole and images.side > min(image_size) / 2:  # Do not crop small images.
        rows = round(image_size[0] / preprocess.crop_fraction)
        how = how.replace(
            squash=False,
            crop_fraction=image_size[0] / rows,
            crop_down=preprocess.crop_down,
        )
    return {"train_transform": train, "eval_transform": how.line}


def of_any_size(
    images: Images, preprocess: Preprocess, image_size: tuple[int, int], patch: int
) -> dict[str, str]:
    """Returns transforms to as many patches as an image of that size has."""
    tokens = math.prod(side // patch for side in image_size)
    common = f"{tokens}, patch={patch}, interpolation={preprocess.interpolation!r}"
    random = f"area={_area(images)}" + ("" if images.grey else ", flip=True")
    return {
        "train_transform": f"naflex({common}, {random})",
        "eval_transform": f"naflex({common})",
    }


def _area(images: Images) -> tuple[float, float]:
    return (0.6, 1.0) if images.grey else (0.3, 1.0)


def batch_of(images: Images, backend: str, devices: int) -> int:
    """Returns the batch size, a multiple of the number of devices."""
    power = 2 ** round(math.log2(max(images.count / BATCHES_AN_EPOCH, 1)))
    batch = max(LEAST_BATCH, min(power, MOST_BATCH.get(backend, ELSEWHERE)))
    return -(-batch // devices) * devices


def epochs_of(images: Images, most: float = MOST_EPOCHS) -> float:
    """Returns the number of epochs without a time limit.

    It is at most `most`, but few images are trained on for `LEAST_STEPS` steps.
    """
    epochs = np.clip(IMAGES / images.count, LEAST_EPOCHS, most)
    return float(max(epochs, LEAST_STEPS * LEAST_BATCH / images.count))


class Length(NamedTuple):
    """Side of the images in pixels, epochs, and seconds at the measured speed."""

    side: int
    epochs: float
    seconds: float


def fit(
    images: Images,
    validated: int,
    side: int,
    patch: int,
    speed: float,
    minutes: float,
    wanted: float,
) -> Length:
    """Fits the length of a run and the size of its images to a time limit.

    Args:
      images: properties of the training images.
      validated: number of images in the validation split.
      side: preferred side of the images, in pixels.
      patch: patch size of the network, in pixels.
      speed: training speed at that side, in images per second.
      minutes: time limit for training and evaluation; 0 for no limit.
      wanted: number of epochs without a time limit.
    """
    # An evaluation costs as much as training on this number of images. There is one per
    # epoch, but at most EVALUATIONS.
    evaluation = validated * EVALUATED

    def epochs_in(seconds: float, pixels: int) -> float:
        seen = seconds * speed * (side / pixels) ** 2
        epochs = (seen - EVALUATIONS * evaluation) / images.count
        return epochs if epochs > EVALUATIONS else seen / (images.count + evaluation)

    def seconds_of(epochs: float, pixels: int) -> float:
        evaluations = min(EVALUATIONS, max(epochs, 1))
        seen = epochs * images.count + evaluations * evaluation
        return seen / speed * (pixels / side) ** 2

    chosen, epochs = side, wanted
    if minutes:
        smaller = range(side, side // 2 - 1, -patch) or [side]
        fitting = [s for s in smaller if epochs_in(60 * minutes, s) >= LEAST_EPOCHS]
        if epochs_in(60 * minutes, side) < LEAST_EPOCHS and fitting:
            chosen = fitting[0]
        epochs = min(epochs, epochs_in(60 * minutes, chosen))
    return Length(chosen, epochs, seconds_of(epochs, chosen))


def products(model: Mapping) -> dict[str, tuple[str, str]]:
    """Returns the choice about matrix products and its reason, if there is one."""
    if not model.get("matmul_dtype"):
        return {}
    what = f"matrix products of {model['matmul_dtype']}, summed in float32"
    return {"model.matmul_dtype": (what, "this processor has AMX instructions")}


def optimizer(batch: int) -> dict:
    """Returns `config.optim` for a batch size."""
    return {
        "name": OPTIMIZER,
        "momentum": 0.9,
        "learning_rate": RATE * batch / RATE_BATCH,
        "schedule": "cosine",
        "warmup_fraction": WARMUP,
        "grad_clip_norm": 1.0,
    }


def ema_of(steps: int) -> float:
    """Returns `ema.decay` for an average over the last tenth of the steps."""
    return float(np.clip(1 - 10 / steps, 0.0, 0.9999))


def metric_of(images: Images, data: Mapping, validated: int) -> str:
    """Returns `checkpoint.best_metric`; "" if too few images are validated on.

    With uneven classes it is always set, because early checkpoints predict only the
    large classes.
    """
    if images.uneven > UNEVEN and not data.get("multi_label"):
        return "val/balanced_accuracy"
    if validated < CHOOSING:
        return ""
    return "val/map" if data.get("multi_label") else "val/top1"


def patience_of(validated: int) -> int:
    """Returns `early_stopping_evals`; 0 for few images, whose scores are noisy."""
    return PATIENCE if validated >= NOISY else 0


def interval(right: int, count: int, looks: int = 1) -> tuple[float, float]:
    """Returns the 95 % interval of a proportion of `right` in `count` (Wilson, 1927).

    `looks` is the number of proportions on the same images; this is the best of them:
    the interval fails to contain the true value with probability 5 % / looks
    (Bonferroni).
    """
    from scipy import stats

    level = 1 - 0.05 / looks
    low, high = stats.binomtest(right, count).proportion_ci(level, "wilson")
    return float(low), float(high)

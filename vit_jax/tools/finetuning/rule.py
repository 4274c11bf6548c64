"""What fine-tuning chooses for a set of images: the rule of docs/finetuning.md."""

import dataclasses
import io
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from vit_jax.data.sources.base import Source
from vit_jax.weights.pretrained import Preprocess, resize_sides

SMALL, LEAST_SIDE = 4, 96
IMAGES, LEAST_EPOCHS, MOST_EPOCHS = 30_000, 3, 30
BATCHES_AN_EPOCH, LEAST_BATCH = 40, 16
MOST_BATCH = {"cpu": 64}  # By backend ...
ELSEWHERE = 128  # ... and on others.
OPTIMIZER = "sgd"
RATE, RATE_BATCH, WARMUP = 0.04, 64, 0.05
UNEVEN = 4.0
EVALUATIONS, PATIENCE = 12, 5
# Below so many validation images 5 looks in a row are no better by chance too often, and
# below FEW of a class its accuracy is rough.
NOISY, FEW = 400, 10
_SAMPLE = 64  # Images whose size and colours are looked at.
# An image that is evaluated takes this part of the time of one that is trained on.
_EVALUATED = 1 / 3


@dataclasses.dataclass(frozen=True)
class Choice:
    """One choice: what it is, why, and the key or flag that changes it."""

    what: str
    why: str
    key: str


@dataclasses.dataclass(frozen=True)
class Images:
    """What is known of the training images.

    Attributes:
      count: number of them.
      side: median of their short sides, in pixels.
      grey: whether none of the sample has colours.
      uneven: number of the most frequent class by that of the rarest.
    """

    count: int
    side: float
    grey: bool
    uneven: float


def look_at(source: Source, labels: Sequence | None) -> Images:
    """Returns what is known of the training images, from a sample of them.

    Args:
      source: training split.
      labels: class of each; None where an image has several.
    """
    numbers = np.linspace(0, len(source) - 1, min(_SAMPLE, len(source))).astype(int)
    sides, grey = [], True
    for i in numbers.tolist():
        data = source[i]["image"]
        image = data if isinstance(data, np.ndarray) else None
        if image is None:
            try:
                opened = Image.open(io.BytesIO(data))
                opened.thumbnail((64, 64)) if grey else None
                size, image = (
                    Image.open(io.BytesIO(data)).size,
                    np.asarray(opened.convert("RGB"), np.int16),
                )
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
                # Training tells what is damaged.
                continue
        else:
            size, image = image.shape[:2], image.astype(np.int16)
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
    """Returns the side in pixels to train at, a multiple of the patch or that of weights.

    Args:
      images: of the set.
      weights: side at which the weights were trained.
      patch: of the network.
    """
    if not images.side or SMALL * images.side >= weights:
        return weights
    side = max(SMALL * images.side, LEAST_SIDE)
    return min(weights, max(1, round(side / patch)) * patch)


def transforms_of(
    images: Images, preprocess: Preprocess, image_size: tuple[int, int]
) -> dict[str, str]:
    """Returns `train_transform` and `eval_transform` for images of a height and width."""
    area = (0.6, 1.0) if images.grey else (0.3, 1.0)
    train = f"inception_crop(area={area})" + ("" if images.grey else " | flip")
    whole = preprocess.squash or preprocess.fill
    if whole or images.side <= min(image_size) / 2:  # Little to crop off.
        return {"train_transform": train, "eval_transform": "resize"}
    rows = round(image_size[0] / preprocess.crop_fraction)
    how = Preprocess(image_size, crop_fraction=image_size[0] / rows)
    rows, columns = resize_sides(how)
    resized = rows if rows == columns else (rows, columns)
    return {
        "train_transform": train,
        "eval_transform": f"resize_small({resized}) | central_crop",
    }


def batch_of(images: Images, backend: str, devices: int) -> int:
    """Returns the batch size, a multiple of the number of devices."""
    most = MOST_BATCH.get(backend, ELSEWHERE)
    wanted = max(images.count / BATCHES_AN_EPOCH, 1)
    power = 2 ** round(float(np.log2(wanted)))
    batch = int(np.clip(power, LEAST_BATCH, most))
    return -(-batch // devices) * devices


def epochs_of(images: Images) -> float:
    """Returns the length that is wanted, in epochs."""
    return float(np.clip(IMAGES / images.count, LEAST_EPOCHS, MOST_EPOCHS))


@dataclasses.dataclass(frozen=True)
class Length:
    """How long, and at which size.

    Attributes:
      side: of the images, in pixels.
      epochs: of training.
      seconds: that it takes, by the measured speed.
    """

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
) -> Length:
    """Fits the length and the size of the images into a time.

    Args:
      images: of the set.
      validated: images of the validation split.
      side: wanted, in pixels.
      patch: of the network.
      speed: trained images a second at that side.
      minutes: to train and evaluate; 0 is no limit.
    """
    wanted = epochs_of(images)

    # The validation images are looked at once an epoch, at most so many times.
    look = validated * _EVALUATED

    def epochs_in(seconds: float, pixels: int) -> float:
        seen = seconds * speed * (side / pixels) ** 2
        often = (seen - EVALUATIONS * look) / images.count
        return often if often > EVALUATIONS else seen / (images.count + look)

    def seconds_of(epochs: float, pixels: int) -> float:
        seen = epochs * images.count + min(EVALUATIONS, max(epochs, 1)) * look
        return seen / speed * (pixels / side) ** 2

    chosen = side
    if minutes:
        smaller = range(side, side // 2 - 1, -patch) or [side]
        fitting = [s for s in smaller if epochs_in(60 * minutes, s) >= LEAST_EPOCHS]
        if epochs_in(60 * minutes, side) < LEAST_EPOCHS and fitting:
            chosen = fitting[0]
        wanted = min(wanted, epochs_in(60 * minutes, chosen))
    return Length(chosen, wanted, seconds_of(wanted, chosen))


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
    """Returns `ema.decay`, whose average reaches over a tenth of the steps."""
    return float(np.clip(1 - 10 / steps, 0.0, 0.9999))


def metric_of(images: Images, data: Mapping) -> str:
    """Returns `checkpoint.best_metric`."""
    if data.get("multi_label"):
        return "val/map"
    return "val/balanced_accuracy" if images.uneven >= UNEVEN else "val/top1"


def patience_of(validated: int) -> int:
    """Returns `early_stopping_evals`; 0 where so few images mostly show noise."""
    return PATIENCE if validated >= NOISY else 0


def interval(right: int, count: int, looks: int = 1) -> tuple[float, float]:
    """Returns the 95 % interval of a proportion (Wilson, 1927).

    Args:
      right: number of right ones.
      count: number of all.
      looks: of how many proportions on the same images this is the best; each then gets
        an interval that misses with 5 % / looks (Bonferroni).
    """
    z = statistics.NormalDist().inv_cdf(1 - 0.025 / looks)
    share, root = right / count, z * z / count
    middle = (share + root / 2) / (1 + root)
    half = z * np.sqrt(share * (1 - share) / count + root / (4 * count)) / (1 + root)
    return float(middle - half), float(middle + half)

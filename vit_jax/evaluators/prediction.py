"""Classifies single images with a checkpoint that has a classifier or text tower."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, UInt8

from vit_jax.data import image_files
from vit_jax.data.class_names import arrange
from vit_jax.data.preprocess import Preprocess
from vit_jax.distributed import compilation
from vit_jax.errors import UserError
from vit_jax.evaluators.augmented import augment
from vit_jax.models import patches, text
from vit_jax.models.patches import PatchSequences
from vit_jax.models.text_tower import TextTower
from vit_jax.weights import surgery
from vit_jax.weights.calibration import Calibration
from vit_jax.weights.network_images import network_input, prepare_image
from vit_jax.weights.preprocessing import preprocessing_of
from vit_jax.weights.pretrained import Pretrained

# An image in the network's input format, or a batch of them.
Prepared = UInt8[np.ndarray, "*B h w c"] | PatchSequences

_THRESHOLD = 0.5  # Smallest probability, for models with several labels per image.


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A class, its name and its probability for an image."""

    label: int
    name: str
    probability: float


class Classifier:
    """A checkpoint, ready to classify images.

    With a text tower the classes are any texts, and the logit of a class is the image's
    similarity to its text (zero-shot classification).

    Args:
      pretrained: result of `weights.open_pretrained`.
      preprocess: preprocessing of the images; `weights.preprocessing_of(pretrained)` if
        None. Its `image_size` may differ from the checkpoint's: position embeddings are
        resized.
      class_names: class names in label order; the checkpoint's if empty.
      tower: text tower of the checkpoint, which compares images with `class_names`; None
        for a classifier.
      prompts: texts with "{}" in place of a class, see `TextTower.classes`.
      views: views of each image, one of `augmented.VIEWS`; "" for the image itself.
      coverage: probability with which the classes of an image should include the right
        one, see `Calibration.smallest_probability`; None predicts by `topk` or
        thresholds.

    Raises:
      UserError: the checkpoint has no classifier, or the arguments do not fit together.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        preprocess: Preprocess | None = None,
        class_names: tuple[str, ...] = (),
        tower: TextTower | None = None,
        prompts: Sequence[str] = ("{}",),
        views: str = "",
        coverage: float | None = None,
    ):
        preprocess = preprocess or preprocessing_of(pretrained)
        num_classes = pretrained.options["num_classes"]
        if not num_classes and not tower:
            raise UserError(
                f"{pretrained.source} has no classifier (num_classes=0): give labelled "
                "images with --neighbors=FOLDER, a fine-tuned checkpoint, or one with a "
                "text tower and --labels of any texts"
            )
        model, params = surgery.fit_network(pretrained, preprocess)
        sigmoid = pretrained.loss == "sigmoid"
        model, preprocess = augment(model, preprocess, views, sigmoid=sigmoid)
        self._decisions = None if tower else pretrained.calibration
        if coverage is not None and (views or tower):
            raise UserError(
                f"coverage={coverage:g}: sets are calibrated for a classifier and one "
                "view of each image: leave --tta and other texts out"
            )
        self._channels = model.image_shape[-1]
        self._preprocess = preprocess
        self._params = jax.device_put(params)
        if tower:
            self._names, self._sigmoid = class_names, tower.sigmoid
            self._threshold = None
            classes = jax.device_put(tower.classes(class_names, prompts))
        else:
            self._names = names_of(pretrained, class_names)
            self._sigmoid = sigmoid
            self._threshold = threshold_of(pretrained, coverage)
        self._at_least = 0 if coverage is None else 1

        def logits(params, images):
            images = network_input(images, preprocess, model.options["dtype"])
            outputs = model.apply(params, images)
            if not tower:
                return outputs["logits"]
            embeddings = text.embed_images(tower.params, outputs["pre_logits"])
            return text.logits(tower.params, embeddings, classes)

        options = compilation.options(bfloat16=model.config.rounds_products)
        self._logits = jax.jit(logits, compiler_options=options)

    def prepare(
        self, data: bytes | UInt8[np.ndarray, "H W C"], name: str = ""
    ) -> Prepared:
        """Decodes, resizes and crops an image; see `network_images.prepare_image`."""
        return prepare_image(data, self._preprocess, self._channels, name)

    def logits(self, images: Prepared) -> Float[Array, "B K"]:
        """Returns the network's output for a batch of prepared images."""
        return self._logits(self._params, images)

    def rank(
        self, logits: Float[np.ndarray, " K"], topk: int, threshold: float | None = None
    ) -> tuple[Prediction, ...]:
        """Returns the most probable classes of an image, see the function `rank`.

        The default threshold is that of `threshold_of`.
        """
        threshold = self._threshold if threshold is None else threshold
        how = {"sigmoid": self._sigmoid, "threshold": threshold}
        how |= {"decisions": self._decisions, "at_least": self._at_least}
        return rank(logits, self._names, topk, **how)


def rank(
    logits: Float[np.ndarray, " K"],
    names: tuple[str, ...],
    topk: int,
    *,
    sigmoid: bool,
    threshold: float | Sequence[float] | None = None,
    decisions: Calibration | None = None,
    at_least: int = 0,
) -> tuple[Prediction, ...]:
    """Returns the most probable classes of an image, best first; at most all.

    Args:
      logits: logits of the image.
      names: names of the classes, see `names_of`.
      topk: number of classes to return.
      sigmoid: whether each class was trained with a sigmoid, instead of all with a softmax.
      threshold: smallest probability of the classes to return, or one for each class;
        replaces `topk`.
      decisions: calibration of the logits; None leaves them as they are.
      at_least: number of classes to return even if they are below the threshold.
    """
    logits = logits.astype(np.float64)
    if decisions:
        logits = decisions.scale(logits)
    if sigmoid:
        probabilities = np.exp(-np.logaddexp(0, -logits))
    else:
        powers = np.exp(logits - logits.max())
        probabilities = powers / powers.sum()
    best = np.argsort(-logits, kind="stable")
    if threshold is None:
        best = best[:topk]
    else:
        limits = np.broadcast_to(threshold, logits.shape)
        is_above = probabilities[best] >= limits[best]
        is_above[:at_least] = True
        best = best[is_above]
    return tuple(Prediction(int(i), names[i], float(probabilities[i])) for i in best)


def threshold_of(
    pretrained: Pretrained, coverage: float | None = None
) -> float | tuple[float, ...] | None:
    """Returns the smallest probability of a predicted class, or one for each class.

    The result is None if the most probable classes are predicted.

    Args:
      coverage: coverage of the sets of classes, see `Calibration`; None without sets.

    Raises:
      UserError: the model has no calibrated sets of this coverage.
    """
    decisions = pretrained.calibration or Calibration()
    if coverage is not None:
        return decisions.smallest_probability(coverage)
    return (decisions.thresholds or _THRESHOLD) if pretrained.multi_label else None


def names_of(
    pretrained: Pretrained, class_names: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Returns the names of a checkpoint's classes, in label order.

    They are `class_names`, sorted into the order of the checkpoint's or ImageNet's
    names if they are the same names; else the checkpoint's names; else numbers.

    Raises:
      UserError: the number of names is wrong, or `class_names.arrange` fails.
    """
    num_classes = pretrained.options["num_classes"]
    names = class_names or pretrained.class_names
    if names and len(names) != num_classes:
        raise UserError(
            f"there are {len(names)} class names, but {pretrained.source} has "
            f"{num_classes} classes: give --labels with one line per class"
        )
    names = arrange(names, pretrained.class_names, where="the class names given")
    return names or tuple(f"class {i}" for i in range(num_classes))


def predict(
    classifier: Classifier,
    images: Iterable[image_files.Named],
    *,
    batch_size: int = 32,
    topk: int = 5,
    threshold: float | None = None,
    threads: int | None = None,
) -> Iterator[tuple[str, tuple[Prediction, ...] | str]]:
    """Classifies any number of images, in their order, see `stream`.

    Args:
      classifier: classifier of the images.
      images: images from `image_files.find`.
      batch_size, threads: arguments of `stream`.
      topk: number of classes per image.
      threshold: smallest probability, see `rank`.

    Yields:
      The name of an image and its most probable classes, or why it cannot be read.

    Raises:
      UserError: the network's output is not finite.
    """

    how = {"batch_size": batch_size, "threads": threads}
    for name, values in outputs(classifier, images, **how):
        if not isinstance(values, str):
            values = classifier.rank(values, topk, threshold)
        yield name, values


class Predictor(Protocol):
    """A network with a preprocessing, such as a `Classifier`."""

    def prepare(self, data: bytes, name: str) -> Prepared: ...
    def logits(self, images: Prepared) -> Float[Array, "B K"]: ...


def outputs(
    network: Predictor,
    images: Iterable[image_files.Named],
    *,
    batch_size: int = 32,
    threads: int | None = None,
) -> Iterator[tuple[str, Float[np.ndarray, " K"] | str]]:
    """Yields the name of an image and its logits, or why it cannot be read.

    Args:
      network: network to apply.
      images, batch_size, threads: arguments of `stream`.

    Raises:
      UserError: the network's output is not finite.
    """

    def compute(pixels, rows):
        return np.asarray(network.logits(patches.pad_batch(pixels, rows)))

    how = {"batch_size": batch_size, "threads": threads}
    for name, values in stream(images, network.prepare, compute, **how):
        if not isinstance(values, str):
            check_finite(values, name)
        yield name, values


def check_finite(values: Float[np.ndarray, "..."], name: str) -> None:
    """Raises UserError if an output for the image of that name is not finite."""
    if not np.isfinite(values).all():
        raise UserError(
            f"the network's output for {name} is not finite: the checkpoint is "
            "damaged, or diverged in training"
        )


def stream(
    images: Iterable[image_files.Named],
    prepare: Callable[[bytes, str], Prepared],
    compute: Callable[[Prepared, int], Any],
    *,
    batch_size: int = 32,
    threads: int | None = None,
) -> Iterator[tuple[str, Any]]:
    """Computes outputs of any number of images, in their order.

    Threads read and decode ahead while the device computes. All batches have the shape
    of the first, so that one program is compiled.

    Args:
      images: images from `image_files.find`.
      prepare: function of a file's content and name that returns the network's input.
      compute: function of B prepared images and the batch size to pad them to, which is
        the same for all batches; returns a tree of arrays whose first B rows are the
        outputs.
      batch_size: images per batch.
      threads: number of threads that decode; one per core, at most 8, if None.

    Yields:
      The name of an image and the tree of its outputs, or why it cannot be read.
    """

    def load(image: image_files.Named) -> tuple[str, Prepared | str]:
        return image[0], image_files.attempt(image, prepare)

    threads = threads or min(8, os.cpu_count() or 1)
    prepared = image_files.ahead(images, load, threads=threads, limit=2 * batch_size)
    rows = 0
    for batch in _batches(prepared, batch_size):
        good = [pixels for _, pixels in batch if not isinstance(pixels, str)]
        rows = rows or len(good)
        outputs = compute(patches.stack(good), rows) if good else None
        numbers = itertools.count()
        for name, pixels in batch:
            if isinstance(pixels, str):
                yield name, pixels
            else:
                i = next(numbers)
                yield name, jax.tree.map(lambda x, i=i: x[i], outputs)


def _batches(prepared: Iterable, batch_size: int) -> Iterator[list]:
    """Yields lists of up to `batch_size` readable images."""
    batch, good = [], 0
    for name, pixels in prepared:
        if isinstance(pixels, str) and not batch:
            yield [(name, pixels)]  # No earlier image is waiting to be classified.
            continue
        batch.append((name, pixels))
        good += not isinstance(pixels, str)
        if good == batch_size:
            yield batch
            batch, good = [], 0
    if batch:
        yield batch

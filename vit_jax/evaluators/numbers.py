"""Predicts the numbers of single images with a checkpoint of a regression.

Letters: B images, N values, T targets.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jaxtyping import Array, Float, UInt8

from vit_jax.data import image_files
from vit_jax.data.preprocess import Preprocess
from vit_jax.distributed import compilation
from vit_jax.errors import UserError
from vit_jax.evaluators import prediction
from vit_jax.evaluators.augmented import augment
from vit_jax.models.targets import Decoded, Targets
from vit_jax.weights import surgery
from vit_jax.weights.network_images import network_input, prepare_image
from vit_jax.weights.preprocessing import preprocessing_of
from vit_jax.weights.pretrained import Pretrained

COVERAGE = 0.95  # Of intervals.


@dataclasses.dataclass(frozen=True)
class Number:
    """A predicted number of an image.

    Attributes:
      target: name of the number.
      value: prediction in `unit`; for ordinal targets the median level.
      unit: unit; "" if unknown.
      low, high: ends of the 95 % interval; None if it is unknown.
      sd: standard deviation; None if the network does not predict it.
    """

    target: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    sd: float | None = None

    @property
    def text(self) -> str:
        """The number with its unit and interval."""
        text = f"{self.value:.4g} {self.unit}".strip()
        if self.low is not None:
            text += f" ({self.low:.4g} to {self.high:.4g})"
        return text


class NumberPredictor:
    """A checkpoint, ready to predict the numbers of images.

    Args:
      pretrained: result of `weights.open_pretrained`, with `targets`.
      preprocess: preprocessing of the images; `weights.preprocessing_of(pretrained)` if
        None.
      views: views of each image whose predictions are averaged, one of
        `augmented.VIEWS`; "" for the image itself.

    Raises:
      UserError: the arguments do not fit together.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        preprocess: Preprocess | None = None,
        views: str = "",
    ):
        preprocess = preprocess or preprocessing_of(pretrained)
        model, params = surgery.fit_network(pretrained, preprocess)
        model, preprocess = augment(model, preprocess, views, sigmoid=None)
        self.targets = pretrained.targets
        self._preprocess, self._channels = preprocess, model.image_shape[-1]

        def outputs(params, images):
            images = network_input(images, preprocess, model.options["dtype"])
            return model.apply(params, images)["logits"]

        options = compilation.options(bfloat16=model.config.rounds_products)
        self._params = jax.device_put(params)
        self._outputs = jax.jit(outputs, compiler_options=options)

    def prepare(
        self, data: bytes | UInt8[np.ndarray, "H W C"], name: str = ""
    ) -> prediction.Prepared:
        """Decodes, resizes and crops an image; see `network_images.prepare_image`."""
        return prepare_image(data, self._preprocess, self._channels, name)

    def logits(self, images: prediction.Prepared) -> Float[Array, "B L"]:
        """Returns the network's output for a batch of prepared images."""
        return self._outputs(self._params, images)

    def predict(
        self,
        images: Iterable[image_files.Named],
        *,
        batch_size: int = 32,
        threads: int | None = None,
    ) -> Iterator[tuple[str, tuple[Number, ...] | str]]:
        """Yields the name of an image and its numbers, or why it cannot be read.

        Args:
          images: images from `image_files.find`.
          batch_size, threads: arguments of `prediction.stream`.

        Raises:
          UserError: the network's output is not finite.
        """
        how = {"batch_size": batch_size, "threads": threads}
        for name, values in prediction.outputs(self, images, **how):
            if not isinstance(values, str):
                (values,) = numbers_of(values[None], self.targets)
            yield name, values


def numbers_of(
    outputs: Float[np.ndarray, "B L"], targets: Targets
) -> list[tuple[Number, ...]]:
    """Returns the numbers of each image, from the outputs of the classifier."""
    decoded = targets.decode(outputs.astype(np.float64))
    known = {k: v for k, v in decoded._asdict().items() if v is not None}
    known.pop("probabilities", None)
    known["value"] = known.pop("values")
    return [
        tuple(
            Number(name, unit=unit, **{k: float(v[i, t]) for k, v in known.items()})
            for t, (name, unit) in enumerate(
                zip(targets.names, targets.units, strict=True)
            )
        )
        for i in range(len(outputs))
    ]


def margins(
    decoded: Decoded, truth: Float[np.ndarray, "N T"]
) -> tuple[float, ...] | None:
    """Returns half the widths of intervals that contain 95 % of the true values.

    They are quantiles of the absolute errors of images that the network was not trained
    on (split conformal prediction, arXiv:2107.07511, section 1.1).

    Args:
      decoded: predictions for these images.
      truth: true values, NaN where one is missing.

    Returns:
      A width for each target; None if one has fewer than 19 values.
    """
    widths = []
    for predicted, true in zip(decoded.values.T, truth.T, strict=True):
        errors = np.sort(np.abs(predicted - true)[~np.isnan(true)])
        rank = math.ceil((len(errors) + 1) * COVERAGE)
        if rank > len(errors):
            return None
        widths.append(float(errors[rank - 1]))
    return tuple(widths)


def check_flags(**given: object) -> None:
    """Raises UserError if a flag about classes is given for weights of numbers."""
    for name, value in given.items():
        if value:
            raise UserError(
                f"--{name}={value} is about classes, and these weights predict numbers: "
                "leave it out"
            )

"""A model that is looked into, and what one image is to it."""

import dataclasses
import io
from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Float, UInt8
from PIL import Image

from vit_jax.analysis import attention, rollout, subject
from vit_jax.data import decode
from vit_jax.errors import UserError
from vit_jax.evaluation import prediction
from vit_jax.explorer import images
from vit_jax.explorer.rows import Rows
from vit_jax.weights import preprocess as preprocessing
from vit_jax.weights.pretrained import Preprocess, Pretrained

TOPK = 5


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a model made of an image.

    Attributes:
      classes: the most probable ones, best first; none without a classifier.
      box: top, left, bottom and right of what it saw, as fractions of the whole image.
      picture: what it saw, a PNG file.
      rows: where its tokens look.
    """

    classes: tuple[prediction.Prediction, ...]
    box: tuple[float, float, float, float]
    picture: bytes
    rows: Rows


class Subject:
    """A checkpoint, ready to be looked into.

    Args:
      pretrained: what `weights.open_pretrained` returns.
      preprocess: how images are prepared for it.
      class_names: in label order; the checkpoint's if empty.

    Raises:
      UserError: it has no attention, or something does not fit.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        preprocess: Preprocess,
        class_names: tuple[str, ...] = (),
    ):
        # Two folders, as weights are often called alike.
        self.name = "/".join(pretrained.source.strip("/").split("/")[-2:])
        self._inside = subject.make(self.name, pretrained, preprocess)
        self._model = self._inside.model
        # Computes nothing yet, but refuses a network without attention.
        self._maps(self._black())
        self._classifier = None
        if pretrained.options["classes"]:
            self._classifier = prediction.Classifier(
                pretrained, preprocess=preprocess, class_names=class_names
            )
        self.extra = ["CLS", "DIST"][: self._model.extra]  # In front of the patches.

    def describe(self) -> dict:
        """Returns what the page needs to know of the model, as for JSON."""
        options = self._model.options
        return {
            "name": self.name,
            "variant": options["variant"],
            "grid": self._model.grid,
            "size": self._model.image_shape[:2],
            "layers": options["depth"],
            "heads": options["heads"],
            "extra": self.extra,
        }

    def see(self, data: bytes, name: str) -> Seen:
        """Looks at an image.

        Args:
          data: content of an image file.
          name: of the image, for messages.

        Raises:
          images.Refused: it cannot be read.
          UserError: the network's output is not finite.
        """
        channels = self._model.image_shape[-1]
        try:
            whole = decode.decode(data, channels)
            pixels = self._inside.prepare(whole)
        except decode.DamagedImage as error:
            raise images.damaged(error, name) from error
        return Seen(
            classes=self._classes(pixels, name),
            box=box(whole.shape[:2], self._inside.preprocess),
            picture=_png(pixels),
            rows=self._rows(pixels, name),
        )

    def warm_up(self) -> None:
        """Compiles what `see` computes."""
        for compute in (self._classes, self._rows):
            compute(self._black(), "a black image")

    def _classes(self, pixels, name) -> tuple[prediction.Prediction, ...]:
        if self._classifier is None:
            return ()
        logits = np.asarray(self._classifier.logits(pixels[None]))[0]
        self._check(logits, name)
        return self._classifier.rank(logits, TOPK)

    def _rows(self, pixels: UInt8[np.ndarray, "h w c"], name: str) -> Rows:
        options, extra = self._model.options, len(self.extra)
        tokens = extra + self._model.grid[0] * self._model.grid[1]
        rows = Rows.empty(tokens, extra, options["depth"], options["heads"] + 1)
        flow = None
        for layer, maps in enumerate(self._maps(pixels)):
            flow = rollout.step(flow, maps)
            self._check(flow, name)
            rows.put(layer, np.concatenate([maps[0], flow]))
        return rows

    def _check(self, output: Float[Array | np.ndarray, "..."], name: str) -> None:
        if not np.isfinite(output).all():
            raise UserError(
                f"{self.name}'s output for {name} is not finite: the checkpoint is "
                "damaged, or diverged in training"
            )

    def _maps(self, pixels: UInt8[np.ndarray, "h w c"]) -> Iterator[Array]:
        inside = self._inside
        return attention.maps(inside.model, inside.params, inside.images(pixels[None]))

    def _black(self) -> UInt8[np.ndarray, "h w c"]:
        return np.zeros(self._model.image_shape, np.uint8)


def box(
    size: tuple[int, int], preprocess: Preprocess
) -> tuple[float, float, float, float]:
    """Returns which part of an image `weights.preprocess.prepare` keeps.

    Args:
      size: height and width of the image, in pixels.
      preprocess: as of `prepare`.

    Returns:
      Top, left, bottom and right, as fractions of the height and width.
    """
    sides = preprocessing.resized(size, preprocess)
    starts = [
        round((side - kept) / 2) / side
        for side, kept in zip(sides, preprocess.image_size, strict=True)
    ]
    ends = [
        start + kept / side
        for start, side, kept in zip(starts, sides, preprocess.image_size, strict=True)
    ]
    return (*starts, *ends)


def _png(pixels: UInt8[np.ndarray, "h w c"]) -> bytes:
    stream = io.BytesIO()
    grey = pixels.shape[-1] == 1
    Image.fromarray(pixels[..., 0] if grey else pixels).save(stream, "PNG")
    return stream.getvalue()

"""A model that is looked into, and what one image is to it."""

import dataclasses
import io
from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Float, UInt8
from PIL import Image

from vit_jax.analysis.attention import rollout_step
from vit_jax.analysis.loaded_model import LoadedModel, check_finite
from vit_jax.data import decode
from vit_jax.evaluation import prediction
from vit_jax.explorer import images
from vit_jax.explorer.rows import Rows
from vit_jax.printing import address
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
    """A checkpoint, ready to be looked into; one pass gives attention and classes.

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
        self.name = "/".join(address(pretrained.source).strip("/").split("/")[-2:])
        self._inside = LoadedModel.from_pretrained(self.name, pretrained, preprocess)
        self._model = self._inside.model
        # Computes no layer yet, but refuses a network without attention.
        self._layers(self._black())
        self._names, self._sigmoid = (), pretrained.loss == "sigmoid"
        if pretrained.options["classes"]:
            self._names = prediction.names_of(pretrained, class_names)
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
        rows, tokens = self._look(pixels, name)
        return Seen(
            classes=self._classes(tokens, name),
            box=preprocessing.box(whole.shape[:2], self._inside.preprocess),
            picture=_png(pixels),
            rows=rows,
        )

    def warm_up(self) -> None:
        """Compiles what `see` computes."""
        _, tokens = self._look(self._black(), "a black image")
        self._classes(tokens, "a black image")

    def _look(
        self, pixels: UInt8[np.ndarray, "h w c"], name: str
    ) -> tuple[Rows, Float[Array, "1 N D"]]:
        """Returns where all tokens look, and what they are after the last layer."""
        options, extra = self._model.options, len(self.extra)
        count = extra + self._model.grid[0] * self._model.grid[1]
        rows = Rows.empty(count, extra, options["depth"], options["heads"] + 1)
        layers, flow = self._layers(pixels), None
        for depth in range(options["depth"]):
            maps, tokens = next(layers)
            flow = rollout_step(flow, maps)
            check_finite(flow, f"{self.name}'s output for {name}")
            rows.put(depth, np.concatenate([maps[0], flow]))
            del maps  # Before the next layer's are there.
        return rows, tokens

    def _classes(
        self, tokens: Float[Array, "1 N D"], name: str
    ) -> tuple[prediction.Prediction, ...]:
        if not self._names:
            return ()
        outputs = self._model.finish(self._inside.params, tokens)
        logits = np.asarray(outputs["logits"])[0]
        check_finite(logits, f"{self.name}'s output for {name}")
        return prediction.rank(logits, self._names, TOPK, sigmoid=self._sigmoid)

    def _layers(
        self, pixels: UInt8[np.ndarray, "h w c"]
    ) -> Iterator[tuple[Array, Array]]:
        """Returns attention and tokens of each layer, computed when it is asked for."""
        inside = self._inside
        return inside.model.inside(inside.params, inside.normalize(pixels[None]))

    def _black(self) -> UInt8[np.ndarray, "h w c"]:
        return np.zeros(self._model.image_shape, np.uint8)


def _png(pixels: UInt8[np.ndarray, "h w c"]) -> bytes:
    stream = io.BytesIO()
    grey = pixels.shape[-1] == 1
    Image.fromarray(pixels[..., 0] if grey else pixels).save(stream, "PNG")
    return stream.getvalue()

"""What a figure is: the flags that it has, the inputs that it reads, and its drawing.

`vit_jax.visualize --help` and its checks of flags import the figures, so none imports JAX:
the modules of `vit_jax.analysis` are loaded when they are first used.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawing and the arrays that it shows.

    Attributes:
      drawing: matplotlib's figure.
      data: arrays by name.
      stem: file name of the image that it is of, without suffix; "" for all or none.
    """

    drawing: Any
    data: Mapping[str, np.ndarray]
    stem: str = ""


@dataclasses.dataclass
class Figure:
    """A figure of a model; a dataclass whose fields, made by `option`, are flags.

    Attributes:
      help: meaning, for `visualize --help`.
      reads: "weights", "images" (`draw_batch` gets the first of them, --shown at most) or
        "all images".
      reads_layers: whether `update` is called with all layers of the images.
      reads_originals: whether batches hold the images before preprocessing.
      min_images: smallest number of images in a batch; 0 for any.
      loaded: the `LoadedModel` that is drawn, from `start` on; for a batch that of the size
        of its images, see `LoadedModel.fitted`.
    """

    help: ClassVar[str]
    reads: ClassVar[str] = "weights"
    reads_layers: ClassVar[bool] = False
    reads_originals: ClassVar[bool] = False
    min_images: ClassVar[int] = 0

    def missing(self, loaded) -> str:
        """Returns what a `LoadedModel` would need to have for this figure, or ""."""
        if self.reads_layers and not loaded.model.config.has_encoder:
            return "no attention to draw: give a Vision Transformer or a hybrid"
        return ""

    @staticmethod
    def of_any_size(loaded, why: str) -> str:
        """Returns why a `LoadedModel` of images of any size cannot be drawn, or ""."""
        most = loaded.preprocess.max_tokens
        return f"max_tokens={most}: {why}; set --max_tokens=0" if most else ""

    def too_few(self, name: str, num_images: int) -> str:
        """Returns why a number of images cannot be drawn, or ""."""
        if num_images >= self.min_images:
            return ""
        return (
            f"images={num_images}: too few for --figure={name}; give {self.min_images} "
            "or more"
        )

    def start(self, loaded, batch_size: int = 0, other=None) -> None:
        """Takes the model to draw.

        Args:
          loaded: a `LoadedModel` that misses nothing.
          batch_size: images in the model at a time; 0 chooses by memory.
          other: a second model, which reads `batch.pixels[1]`, or None.

        Raises:
          UserError: an option is out of range for this model.
        """
        self.loaded = loaded

    def update(self, layer, images: range) -> None:
        """Adds a `Layer` of a chunk.

        Args:
          layer: attention and tokens; rows beyond those of `images` are padding.
          images: indices of the chunk's images in the batch.
        """

    def draw_batch(self, batch) -> Iterable[Picture]:
        """Draws a `Batch` whose layers have all been passed to `update`, or adds it."""
        return ()

    def draw(self) -> Iterable[Picture]:
        """Draws weights, or all batches."""
        return ()


def option(default: Any, help: str, parse: Callable[[str], Any] = str) -> Any:
    """Returns a field of a figure that is a flag of `visualize`.

    Args:
      default: value without the flag.
      help: meaning of the flag.
      parse: function of the flag's text, which raises argparse.ArgumentTypeError.
    """
    return dataclasses.field(default=default, metadata={"help": help, "type": parse})


def numbers(text: str) -> tuple[int, ...]:
    """Parses "0,11"."""
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not numbers from 0 on with commas between them"
        )
    return tuple(map(int, words))


class LayerBuffer:
    """An array per layer and chunk, assembled to one array per batch."""

    def __init__(self) -> None:
        self._layers: dict[int, list[np.ndarray]] = {}  # By first image of the chunk.

    def append(self, images: range, array) -> None:
        """Adds an array (images, ...) of the next layer of a chunk."""
        self._layers.setdefault(images.start, []).append(np.asarray(array))

    def pop(self, num_images: int) -> np.ndarray:
        """Returns (layers, images, ...) without padding, and clears the buffer."""
        chunks = [np.stack(layers) for layers in self._layers.values()]
        self._layers = {}
        return np.concatenate(chunks, axis=1)[:, :num_images]


def layer_ticks(depth: int) -> tuple[int, ...]:
    """Returns layer numbers from 1, at most 12."""
    return tuple(range(1, depth + 1, -(-depth // 12)))

"""The interface of a figure: its flags, the inputs that it reads, and its drawing.

`vit_jax.visualize --help` and the checks of its flags import the figures. Therefore
none of them imports JAX: the modules of `vit_jax.analysis` are loaded when they are
first used.
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
      drawing: figure of matplotlib.
      data: arrays by name.
      stem: file name, without suffix, of the image in the drawing; "" for all or none.
    """

    drawing: Any
    data: Mapping[str, np.ndarray]
    stem: str = ""


@dataclasses.dataclass
class Figure:
    """A figure of a model; a dataclass whose fields, made by `option`, are flags.

    Attributes:
      help: description for `visualize --help`.
      reads: "weights", "images" (`draw_batch` gets only the first ones, up to --shown)
        or "all images".
      reads_layers: whether `update` is called with all layers of the images.
      reads_originals: whether batches hold the images before preprocessing.
      min_images: smallest number of images in a batch; 0 for any.
      loaded: the `LoadedModel` that is drawn, set by `start`; during a batch, the model
        for the size of its images, see `LoadedModel.fitted`.
    """

    help: ClassVar[str]
    reads: ClassVar[str] = "weights"
    reads_layers: ClassVar[bool] = False
    reads_originals: ClassVar[bool] = False
    min_images: ClassVar[int] = 0

    def missing(self, loaded) -> str:
        """Returns what a `LoadedModel` lacks for this figure, or ""."""
        if self.reads_layers and not loaded.model.config.has_encoder:
            return "no attention to draw: give a Vision Transformer or a hybrid"
        return ""

    @staticmethod
    def of_any_size(loaded, why: str) -> str:
        """Returns why a `LoadedModel` for images of any size cannot be drawn, or ""."""
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
        """Sets the model to draw.

        Args:
          loaded: a `LoadedModel` for which `missing` is "".
          batch_size: number of images in the model at a time; 0 chooses by memory.
          other: second model, whose images are `batch.pixels[1]`, or None.

        Raises:
          UserError: an option is out of range for this model.
        """
        self.loaded = loaded

    def update(self, layer, images: range) -> None:
        """Adds a `Layer` of a chunk of images.

        Args:
          layer: attention and tokens; rows beyond those of `images` are padding.
          images: indices of the chunk's images in the batch.
        """

    def draw_batch(self, batch) -> Iterable[Picture]:
        """Draws a `Batch` whose layers `update` has received, or stores it."""
        return ()

    def draw(self) -> Iterable[Picture]:
        """Draws the weights, or all batches."""
        return ()


def option(default: Any, help: str, parse: Callable[[str], Any] = str) -> Any:
    """Returns a field of a figure that becomes a flag of `visualize`.

    Args:
      default: value without the flag.
      help: description of the flag.
      parse: function that converts the flag's text; raises argparse.ArgumentTypeError.
    """
    return dataclasses.field(default=default, metadata={"help": help, "type": parse})


def numbers(text: str) -> tuple[int, ...]:
    """Parses numbers separated by commas, such as "0,11"."""
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not numbers from 0 on, separated by commas"
        )
    return tuple(map(int, words))


class LayerBuffer:
    """Collects an array per layer and chunk, and joins them to one array per batch."""

    def __init__(self) -> None:
        self._layers: dict[int, list[np.ndarray]] = {}  # By a chunk's first image.

    def append(self, images: range, array) -> None:
        """Adds an array (images, ...) of a chunk's next layer."""
        self._layers.setdefault(images.start, []).append(np.asarray(array))

    def pop(self, num_images: int) -> np.ndarray:
        """Returns (layers, images, ...) without padding, and clears the buffer."""
        chunks = [np.stack(layers) for layers in self._layers.values()]
        self._layers = {}
        return np.concatenate(chunks, axis=1)[:, :num_images]


def layer_ticks(depth: int) -> tuple[int, ...]:
    """Returns at most 12 layer numbers, counted from 1."""
    return tuple(range(1, depth + 1, -(-depth // 12)))

"""Attention of a query patch or token, by layer and head."""

import argparse
import dataclasses

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import (
    Figure,
    LayerBuffer,
    Picture,
    numbers,
    option,
)
from vit_jax.errors import UserError

_MAX_LAYERS, _MAX_HEADS = 12, 16  # Limits of a sheet; the data has all of them.


def query_option():
    """Returns the field of the query: row and column of a patch, or None."""
    help = "ROW,COLUMN of the patch that is the query; default: the class token"
    return option(None, help, _place)


def _place(text: str) -> tuple[int, int]:
    row, _, column = text.partition(",")
    if not (row.isdecimal() and column.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROW,COLUMN, such as 3,10")
    return int(row), int(column)


class Query:
    """The query whose attention is drawn, as weights of the tokens.

    Args:
      model: the network.
      patch: row and column of a patch; None for the token that the classifier reads, or
        for the mean of all patches if it reads no single token.

    Attributes:
      name: name of the query in titles.
      weights: weights of the tokens, (tokens,) float32 with sum 1.
      centre: x and y of the patch as fractions of the image; None if the query is not a
        single patch.

    Raises:
      UserError: the patch is outside the grid.
    """

    def __init__(self, model, patch: tuple[int, int] | None):
        Y, X = model.grid
        self.weights = np.zeros(model.num_prefix_tokens + Y * X, np.float32)
        self.centre = None
        if patch is not None:
            row, column = patch
            if not (0 <= row < Y and 0 <= column < X):
                raise UserError(
                    f"--query={row},{column}: no such patch among {Y}x{X}; choose a row "
                    f"from 0 to {Y - 1} and a column from 0 to {X - 1}"
                )
            self.name = f"patch ({row}, {column})"
            self.weights[model.num_prefix_tokens + row * X + column] = 1
            self.centre = (column + 0.5) / X, (row + 0.5) / Y
        elif model.options.get("pool") == "token":
            self.name, self.weights[0] = "class token", 1
        else:
            self.name = "all patches"
            self.weights[model.num_prefix_tokens :] = 1 / (Y * X)


@dataclasses.dataclass
class QueryFigure(Figure):
    """A figure of the attention of one query."""

    query: tuple[int, int] | None = query_option()

    def start(self, loaded, batch_size=0, other=None):
        self.loaded = loaded
        most = loaded.preprocess.max_tokens
        if not most:
            Query(loaded.model, self.query)
        elif self.query:  # Grids differ between images; queries are built later.
            row, column = self.query
            if min(row, column) < 0 or (row + 1) * (column + 1) > most:
                raise UserError(
                    f"--query={row},{column}: no image of at most {most} patches has "
                    "this patch: choose one nearer to the first, 0,0"
                )

    @property
    def asking(self) -> Query:
        """The query in the grid of the images."""
        return Query(self.loaded.model, self.query)


@dataclasses.dataclass
class Attention(QueryFigure):
    """One sheet per image: a row per layer and a column per head, scaled separately."""

    help = (
        "attention of the query by layer and head, one figure per image; for more than "
        "12 layers, evenly spaced ones or those of --layers"
    )
    reads = "images"
    reads_layers = True

    layers: tuple[int, ...] = option(
        (), "layers of the attention figure: 0,11; default: evenly spaced", numbers
    )

    def start(self, loaded, batch_size=0, other=None):
        super().start(loaded)
        self._buffer, depth = LayerBuffer(), loaded.model.options["depth"]
        for layer in self.layers:
            if layer >= depth:
                raise UserError(
                    f"--layers={layer}: {loaded.name} has {depth} layers; choose from "
                    f"0 to {depth - 1}"
                )

    def update(self, layer, images):
        weights = self.asking.weights
        self._buffer.append(
            images, analysis.attention.weighted_query(layer.attention, weights)
        )

    def draw_batch(self, batch):
        maps = self._buffer.pop(len(batch.names)).swapaxes(0, 1)
        grid = np.array(self.loaded.model.grid)
        for stem, pixels, of_image in zip(
            batch.stems, batch.pixels[0], maps, strict=True
        ):
            data = {"attention": of_image, "grid": grid, "image": pixels}
            yield Picture(self._draw_sheet(pixels, of_image), data, stem)

    def _draw_sheet(self, pixels: np.ndarray, maps: np.ndarray):
        model, asking = self.loaded.model, self.asking
        depth, num_heads, _ = maps.shape
        layers = self.layers or _evenly_spaced(depth, _MAX_LAYERS)
        heads = _evenly_spaced(num_heads, _MAX_HEADS)
        patches = maps[..., model.num_prefix_tokens :].reshape(
            depth, num_heads, *model.grid
        )
        tiles, captions = [], []
        for layer in layers:
            tiles += [*(patches[layer, head] for head in heads), None]
            captions += [
                *(f"to {patches[layer, head].max():.1%}" for head in heads),
                "",
            ]
        image = len(heads)  # Index of the image's tile, at the end of the first row.
        tiles[image], captions[image] = pixels, "image"
        for i, head in enumerate(heads):
            captions[i] = f"head {head + 1}: {captions[i]}"
        return analysis.charts.draw_tiles(
            tiles,
            1 + len(heads),
            title=f"{self.loaded.name}: attention of the {asking.name}, from the "
            "minimum of each map (dark) to its maximum (yellow)",
            captions=captions,
            row_labels=[f"layer {layer + 1}" for layer in layers],
            tile_width=0.8 * (pixels.shape[1] / pixels.shape[0]) ** 0.5,
            rings={image: asking.centre} if asking.centre else {},
        )


def _evenly_spaced(count: int, max_count: int) -> list[int]:
    """Returns indices below `count`: all, or `max_count` evenly spaced ones."""
    indices = np.linspace(0, count - 1, min(count, max_count))
    return [int(index) for index in np.unique(indices.round())]

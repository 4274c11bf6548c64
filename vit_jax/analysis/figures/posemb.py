"""Similarity of the position embeddings of patches (arXiv:2010.11929, figure 7 centre)."""

import dataclasses

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, Picture, option

_MAX_CELLS = 1500  # Number of cells across, 15 inches.


@dataclasses.dataclass
class Posemb(Figure):
    """A grid of grids: for each patch, its similarity to all patches.

    Only some patches of a large grid are drawn; the data has all of them. With images
    of any size, there are also figures of the embeddings resized to the images' grids.
    """

    help = "cosine similarity of the position embeddings of patches"

    layer: int = option(0, "layer of the posemb figure, from 0 on; default: 0", int)

    def missing(self, loaded):
        model = loaded.model
        learned = model.config.has_encoder and model.options["posemb"] != "none"
        return "" if learned else "no position embeddings"

    def start(self, loaded, batch_size=0, other=None):
        self.loaded = self._own = loaded
        if loaded.preprocess.max_tokens:
            self.reads = "images"

    def draw_batch(self, batch):
        return [self._draw(self.loaded, stem) for stem in batch.stems]

    def draw(self):
        yield self._draw(self._own)

    def _draw(self, loaded, stem: str = "") -> Picture:
        model = loaded.model
        similarity = analysis.embeddings.position_similarity(
            model, loaded.params, self.layer
        )
        rows, columns = map(drawn_patches, similarity.shape[:2])
        drawing = analysis.charts.draw_heatmap(
            _mosaic(similarity[np.ix_(rows, columns)]),
            title=f"{loaded.name}: similarity of positions ({model.options['posemb']})",
            x_label="column of the patch",
            y_label="row of the patch",
            colorbar_label="cosine similarity",
            limits=(-1, 1),
            ticks=tuple(
                _grid_ticks(patches, side, max(len(rows), len(columns)))
                for patches, side in zip(
                    (columns, rows), similarity.shape[1::-1], strict=True
                )
            ),
            origin="upper",
        )
        return Picture(drawing, {"similarity": similarity}, stem)


def drawn_patches(side: int) -> range:
    """Returns the rows (or columns) of patches whose grids fit into the figure.

    Args:
      side: number of patches down (or across).
    """
    step = 1
    while -(-side // step) * (side + 1) > max(_MAX_CELLS, side + 1):
        step += 1
    return range(0, side, step)


def _grid_ticks(
    patches: range, side: int, longest: int
) -> tuple[list[float], list[str]]:
    """Returns the centres of some grids, evenly spaced, and the patch numbers from 1.

    Args:
      patches: rows (or columns) that are drawn.
      side: number of patches down (or across).
      longest: number of drawn rows or drawn columns, whichever is larger.
    """
    shown = range(0, len(patches), -(-longest // 16))
    return [i * (side + 1) + (side - 1) / 2 for i in shown], [
        f"{patches[i] + 1}" for i in shown
    ]


def _mosaic(grids: np.ndarray) -> np.ndarray:
    """Returns grids (rows, columns, height, width) side by side, separated by NaN."""
    y, x, Y, X = grids.shape
    padded = np.full((y, Y + 1, x, X + 1), np.nan, np.float32)
    padded[:, :Y, :, :X] = grids.transpose(0, 2, 1, 3)
    return padded.reshape(y * (Y + 1), x * (X + 1))[:-1, :-1]

"""Attention rollout of the query, over the image (arXiv:2005.00928)."""

import dataclasses

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.attention import QueryFigure
from vit_jax.analysis.figures.figure import Picture, option


@dataclasses.dataclass
class Rollout(QueryFigure):
    """One figure per image: the image, and the rollout over it."""

    help = "attention of the query over all layers together, on the image"
    reads = "images"
    reads_layers = True
    reads_originals = True

    combine: str = option("mean", "how rollout fuses heads: mean (default), max, min")
    discard: float = option(
        0.9,
        "fraction of the weakest attention that rollout discards; default: 0.9",
        float,
    )
    discard_from: str = option(
        "rows",
        "what rollout discards that fraction of: rows (default), or matrix, as "
        "vit-explain does",
    )

    def start(self, loaded, batch_size=0, other=None):
        super().start(loaded)
        self._how = self.combine, self.discard, self.discard_from
        analysis.attention.check_rollout_options(*self._how)
        self._rollouts = {}  # By a chunk's first image.

    def update(self, layer, images):
        self._rollouts[images.start] = analysis.attention.rollout_step(
            self._rollouts.get(images.start),
            layer.attention,
            *self._how,
        )

    def draw_batch(self, batch):
        chunks = [
            np.einsum("n,bnm->bm", self.asking.weights, np.asarray(rollout))
            for rollout in self._rollouts.values()
        ]
        self._rollouts = {}
        tokens = np.concatenate(chunks)[: len(batch.names)]
        caption = f"{self.combine} of the heads"
        if self.discard:
            caption += f" without the smallest {self.discard:.0%}"
        for stem, image, of_image in zip(
            batch.stems, batch.originals, tokens, strict=True
        ):
            overlay = analysis.overlay.overlay_tokens(self.loaded, image, of_image)
            drawing = analysis.charts.draw_tiles(
                [image, overlay],
                2,
                title=f"{self.loaded.name}: rollout, {self.asking.name}",
                captions=["image", caption],
                tile_width=analysis.charts.native_tile_width(image),
            )
            grid = np.array(self.loaded.model.grid)
            data = {"rollout": of_image, "grid": grid, "overlay": overlay}
            yield Picture(drawing, data, stem)

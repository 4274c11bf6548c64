"""Attention within windows (Swin Transformer), over the image."""

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, Picture


class Windows(Figure):
    """One sheet per image: attention that patches receive in their windows, by stage.

    One row has the blocks whose windows are not shifted, the other row those with
    shifts.
    """

    help = "attention that patches receive in their windows, by stage (Swin)"
    reads = "images"

    def missing(self, loaded):
        has_windows = loaded.model.config.has_windows
        return "" if has_windows else "no attention in windows: give a Swin Transformer"

    def draw_batch(self, batch):
        received = analysis.attention.received_in_windows(
            self.loaded.model,
            self.loaded.params,
            self.loaded.normalize(batch.pixels[0]),
        )
        for i, (stem, pixels) in enumerate(
            zip(batch.stems, batch.pixels[0], strict=True)
        ):
            maps = {name: np.asarray(values[i]) for name, values in received.items()}
            data = {name.replace(" ", "_"): values for name, values in maps.items()}
            drawing = self._draw_sheet(pixels, maps)
            yield Picture(drawing, data | {"image": pixels}, stem)

    def _draw_sheet(self, pixels, maps):
        overlay = analysis.overlay
        stages = [name for name in maps if "shifted" not in name]
        tiles = []
        for suffix in ("", " shifted"):
            for stage in stages:
                values, tile = maps.get(stage + suffix), None
                if values is not None:
                    tile = overlay.upsample(
                        overlay.rescale(values).ravel(), values.shape, pixels.shape[:2]
                    )
                    tile = overlay.blend(pixels, tile)
                tiles.append(tile)
            tiles.append(None)
        tiles[len(stages)] = pixels
        return analysis.charts.draw_tiles(
            tiles,
            len(stages) + 1,
            title=f"{self.loaded.name}: attention within windows",
            captions=[*stages, "image"],
            row_labels=["windows", "shifted"],
            tile_width=1.4,
        )

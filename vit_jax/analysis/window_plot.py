"""Attention within windows, drawn over the image: one sheet per image."""

from collections.abc import Iterator

import jax
import numpy as np

from vit_jax.analysis import canvas, overlay
from vit_jax.analysis.canvas import Picture, UniqueStems
from vit_jax.analysis.loaded_model import Batch, LoadedModel
from vit_jax.errors import UserError


class WindowPlot:
    """The attention that each patch gets in its window, by stage.

    Args:
      loaded: a model with `attention_maps`, see `Model`.
      stems: file names.

    Raises:
      UserError: the model has none.
    """

    def __init__(self, loaded: LoadedModel, stems: UniqueStems):
        if not loaded.model.has_attention_maps:
            raise UserError(
                f"--figure=windows: {loaded.name} has no attention in windows; give a Swin "
                "Transformer, or leave it out"
            )
        self._loaded, self._stems = loaded, stems
        self._maps = jax.jit(loaded.model.attention_maps)

    def draw(self, batch: Batch) -> Iterator[Picture]:
        """Draws one sheet per image: a row for windows and for shifted ones."""
        images = self._loaded.normalize(batch.pixels[0])
        maps = jax.device_get(self._maps(self._loaded.params, images))
        for i, (name, pixels) in enumerate(
            zip(batch.names, batch.pixels[0], strict=True)
        ):
            of_image = {stage: values[i] for stage, values in maps.items()}
            figure = self._draw_sheet(pixels, of_image)
            yield Picture(
                f"windows/{self._stems.stem(name)}",
                figure,
                {key.replace(" ", "_"): values for key, values in of_image.items()}
                | {"image": pixels},
            )

    def _draw_sheet(self, pixels: np.ndarray, maps: dict[str, np.ndarray]):
        stages = [name for name in maps if "shifted" not in name]
        rows = [stages, [f"{name} shifted" for name in stages]]
        tiles: list[np.ndarray | None] = []
        for names, last in zip(
            rows, (pixels.repeat(3 // pixels.shape[-1], -1), None), strict=True
        ):
            tiles += [
                _over(pixels, maps[name]) if name in maps else None for name in names
            ]
            tiles.append(last)
        return canvas.draw_tiles(
            tiles,
            len(stages) + 1,
            title=f"{self._loaded.name}: attention within windows",
            captions=[*stages, "image"],
            row_labels=["windows", "shifted"],
            tile_width=1.4,
        )


def _over(pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns an image under the values of the patches of a stage."""
    shown = overlay.upsample(
        overlay.rescale(values).ravel(), values.shape, pixels.shape[:2]
    )
    return overlay.blend(pixels, shown)

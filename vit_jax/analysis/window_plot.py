"""Attention within windows, drawn over the image: one sheet per image."""

import collections
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.analysis import canvas, overlay
from vit_jax.analysis.canvas import Picture, UniqueStems
from vit_jax.analysis.loaded_model import Batch, LoadedModel
from vit_jax.errors import UserError
from vit_jax.models.network import BlockWindows


class WindowPlot:
    """The attention that each patch gets in its window, by stage.

    Args:
      loaded: a model with `window_attention`, see `Model`.
      stems: file names.

    Raises:
      UserError: the model has none.
    """

    def __init__(self, loaded: LoadedModel, stems: UniqueStems):
        if not loaded.model.has_windows:
            raise UserError(
                f"--figure=windows: {loaded.name} has no attention in windows; give a Swin "
                "Transformer, or leave it out"
            )
        self._loaded, self._stems = loaded, stems
        self._maps = jax.jit(
            lambda params, images: received(
                loaded.model.window_attention(params, images)[1]
            )
        )

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


def received(blocks: Sequence[BlockWindows]) -> dict[str, Float[Array, "B y x"]]:
    """Returns what each patch gets, the mean of heads and of the blocks of a kind.

    It is 1 where all patches of a window get the same.

    Args:
      blocks: of `Model.window_attention`.

    Returns:
      By "stage 1" and "stage 1 shifted", and so on.
    """
    of_kind = collections.defaultdict(list)
    for block in blocks:
        gets = block.weights.mean(2).sum(2)
        count = math.prod(block.grid)
        # Padding is put behind the last patch, and left out.
        places = jnp.where(block.patches < 0, count, block.patches)
        values = jnp.zeros((len(gets), count + 1)).at[:, places].set(gets)
        name = f"stage {block.stage + 1}{' shifted' if block.shifted else ''}"
        of_kind[name].append(values[:, :-1].reshape(-1, *block.grid))
    return {name: sum(values) / len(values) for name, values in of_kind.items()}


def _over(pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns an image under the values of the patches of a stage."""
    shown = overlay.upsample(
        overlay.rescale(values).ravel(), values.shape, pixels.shape[:2]
    )
    return overlay.blend(pixels, shown)

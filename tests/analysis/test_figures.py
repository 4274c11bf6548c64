"""Sizes of chunks and batches; tests/test_visualize.py tests the written figures."""

import pytest

from vit_jax import models
from vit_jax.analysis.figures import FigureOptions, chunk_and_batch_size
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.weights.pretrained import Preprocess


@pytest.mark.parametrize(
    ("variant", "side", "options", "sizes"),
    [
        ("S/16", 224, FigureOptions(("cka",)), (32, 32)),
        ("B/16", 512, FigureOptions(("cka",)), (5, 5)),
        ("L/16", 512, FigureOptions(("norms", "cka")), (3, 6)),
        ("B/8", 512, FigureOptions(("cka",)), (1, 4)),
        ("B/8", 512, FigureOptions(("norms",)), (1, 1)),
        ("S/16", 224, FigureOptions(("cka",), batch_size=3), (3, 6)),
        ("S/16", 224, FigureOptions(("norms", "rollout"), max_shown=2), (32, 32)),
        ("S/16", 224, FigureOptions(("rollout",), max_shown=2), (2, 2)),
    ],
)
def test_chunks_fit_in_memory_and_batches_suffice_for_cka(
    variant, side, options, sizes
):
    model = models.create(variant, num_classes=5, image_size=(side, side))
    loaded = LoadedModel("s", model, {}, Preprocess((side, side)))
    assert chunk_and_batch_size(loaded, options) == sizes
    if not options.batch_size:
        one = 4 * model.options["num_heads"] * (1 + model.grid[0] ** 2) ** 2
        assert sizes[0] == 1 or sizes[0] * one <= 256 << 20
        assert loaded.max_chunk_size(4) == max(1, min(32, (64 << 20) // one))

"""Models loaded for analysis, and images that pass through them layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params

from vit_jax import models
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import intermediates
from vit_jax.weights.pretrained import Pretrained

OPTIONS = {
    "variant": "Ti/8",
    "num_classes": 5,
    "image_size": (16, 24),
    "width": 12,
    "depth": 3,
    "num_heads": 2,
    "mlp_dim": 17,
}
PREPROCESS = Preprocess((16, 24), (0.4,), (0.25,))
NAMES = [f"{i}.png" for i in range(5)]


@pytest.fixture(scope="module")
def loaded():
    model = models.create(**OPTIONS)
    return LoadedModel("tiny", model, draw_params(model), PREPROCESS)


@pytest.fixture(scope="module")
def pixels():
    shape = 5, 16, 24, 3
    return np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)


def test_chunks_give_the_layers_of_the_whole_batch(loaded, pixels):
    whole = list(
        intermediates.layers(loaded.model, loaded.params, loaded.normalize(pixels))
    )
    parts = [range(2), range(2, 4), range(4, 5)]
    steps = loaded.iter_layers(pixels, NAMES, 2)
    for i, (layer, images) in enumerate(steps):
        wanted = whole[i // 3]
        assert images == parts[i % 3]
        assert len(layer.tokens) == 2  # The last chunk is padded.
        for found, expected in zip(layer, wanted, strict=True):
            np.testing.assert_allclose(
                found[: len(images)],
                expected[images.start : images.stop],
                rtol=1e-3,
                atol=1e-4,
            )
    assert i == 8


def test_an_output_that_is_not_finite_names_the_image(loaded, pixels):
    params = jax.tree.map(lambda leaf: leaf, loaded.params)
    # Only a bright image overflows.
    params["embedding"] = params["embedding"] | {
        "kernel": jnp.full_like(params["embedding"]["kernel"], 3e37),
        "bias": jnp.zeros(12),
    }
    lost = LoadedModel(
        "lost", loaded.model, params, Preprocess((16, 24), (0.0,), (1.0,))
    )
    dark = np.zeros_like(pixels)
    dark[3] = 255
    with pytest.raises(UserError, match=r"lost's output for 3\.png is not finite: the"):
        list(lost.iter_layers(dark, NAMES, 2))


def test_class_names_must_be_as_many_as_classes(loaded):
    checkpoint = Pretrained(
        params=loaded.params, options=OPTIONS, format="vit_jax", source="tiny"
    )

    def named(names=()):
        return LoadedModel.from_pretrained("tiny", checkpoint, PREPROCESS, names)

    for names in (("apple", "bear"), tuple("abcdef")):
        with pytest.raises(UserError, match=f"there are {len(names)} class names, but"):
            named(names)
    assert named().class_name(1) == "class 1"
    assert named(tuple("abcde")).class_name(1) == "b"

"""Features of patches of every kind of network, and their components as colours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params, slow_but

from vit_jax import models
from vit_jax.analysis import representations

SMALL = {"width": 12, "depth": 2, "num_heads": 2, "mlp_dim": 16}
SWIN = {"patch_size": 2, "width": 8, "stage_depths": (1, 1), "num_heads": (2, 4)}
NETWORKS = {
    "registers": ("Ti/8", SMALL | {"num_register_tokens": 2}, (2, 3)),
    "hybrid": ("R26+S/32", SMALL | {"stem_width": 32, "stage_depths": (1,) * 4}, None),
    "ResNet": ("R50x1", {"stage_depths": (1, 1), "stem_width": 32}, (2, 3)),
    "Swin": ("Swin-T", SWIN | {"window_size": 4}, (4, 6)),
    "Mixer": (
        "Mixer-S/8",
        {"width": 12, "depth": 1, "tokens_mlp_dim": 4} | {"channels_mlp_dim": 8},
        (2, 3),
    ),
}


@pytest.mark.parametrize("name", slow_but(("registers", "Mixer"), NETWORKS))
def test_features_of_patches_are_what_the_pooling_averages(name):
    variant, options, grid = NETWORKS[name]
    size = (64, 96) if grid is None else (16, 24)
    model = models.create(variant, num_classes=0, image_size=size, **options)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, *model.image_shape))
    pooled_alone = name in ("ResNet", "Swin", "Mixer")
    whole = model.apply if pooled_alone else model.encode
    both = jax.jit(lambda *args: (model.patch_features(*args), whole(*args)))
    found, expected = both(params, images)
    grid = grid or (2, 3)
    assert found.shape[:3] == (2, *grid) and found.dtype == jnp.float32
    if pooled_alone:
        pooled = expected["pre_logits"]
        np.testing.assert_allclose(found.mean((1, 2)), pooled, atol=1e-5)
    else:
        tokens = expected[:, model.num_prefix_tokens :]
        np.testing.assert_array_equal(found.reshape(tokens.shape), tokens)


def test_components_tell_parts_apart():
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(2, 10))
    parts = rng.integers(0, 2, (3, 4, 5))
    features = directions[parts] + 0.01 * rng.normal(size=(3, 4, 5, 10))
    found, shares = representations.project(features.astype(np.float32))
    assert shares[0] > 0.95
    first = found[..., 0]
    low, high = first[parts == 0], first[parts == 1]
    assert low.max() < high.min() or high.max() < low.min()
    # The sign does not depend on that of the decomposition.
    again, _ = representations.project(features[::-1].astype(np.float32))
    np.testing.assert_allclose(again[::-1, ..., 0], first, atol=1e-4)
    colours = representations.to_intensities(found)
    assert colours.min() == 0 and colours.max() == 1

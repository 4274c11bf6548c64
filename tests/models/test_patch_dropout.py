"""Training with patch dropout computes what the kept patches alone would give."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, draw_params, slow_but, tiny_config

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import cost, stacking

KINDS = {
    "token": {"num_register_tokens": 2},
    "rope": {"rope": "mixed", "pool": "gap"},
    "every": {"posemb_placement": "every", "scan": True, "remat_policy": "full"},
}


def build(**options):
    options = TINY | {"depth": 2, "patch_dropout": 0.5} | options
    return models.create("B/4", num_classes=5, image_size=(8, 12), **options)


@pytest.mark.parametrize("kind", slow_but(["token"], KINDS))
def test_each_image_has_the_outputs_of_half_of_its_patches(kind):
    model = build(**KINDS[kind])
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (5, *model.image_shape))
    found = jax.jit(
        lambda images: model.apply(params, images, train=True, key=jax.random.key(2))
    )(images)["pre_logits"]

    @jax.jit
    def features(visible):
        tokens = model.encode(params, images, visible=jnp.tile(visible, (5, 1)))
        if model.options["pool"] == "token":
            return tokens[:, 0]
        return tokens[:, model.num_prefix_tokens :].mean(1)

    subsets = [*itertools.combinations(range(6), 3)]
    outputs = np.stack([features(jnp.array(subset)) for subset in subsets])
    near = np.isclose(outputs, found, rtol=1e-4, atol=1e-4).all(-1)
    assert near.sum(0).tolist() == [1] * 5  # Images, each of one subset.
    assert len({*near.argmax(0)}) > 1


@pytest.mark.slow
def test_at_least_one_patch_stays_and_evaluation_drops_none():
    dropping, plain = build(patch_dropout=0.99), build(patch_dropout=0.0)
    params = draw_params(plain)
    images = jax.random.normal(jax.random.key(1), (2, *plain.image_shape))

    def lower(model):
        return jax.jit(model.apply).lower(params, images).as_text()

    assert lower(dropping) == lower(plain)
    tokens = dropping.encode(params, images, train=True, key=jax.random.key(2))
    assert tokens.shape == (2, 1 + 1, 12)


def test_training_counts_the_products_of_the_kept_patches():
    plain, half = (cost.training_flops(build(patch_dropout=d)) for d in (0.0, 0.5))
    embedding = 6 * 6 * 12 * 4 * 4 * 3  # Of all patches, in three passes.
    assert half - embedding < 0.6 * (plain - embedding)


@pytest.mark.parametrize(
    "options", [{"posemb": "relative"}, {"relative_bias": "every"}]
)
def test_positions_of_all_patches_are_refused(options):
    ((name, value),) = options.items()
    more = {"posemb_placement": "every"} if name == "posemb" else {}
    with pytest.raises(UserError, match=rf"patch_dropout=0.5 .*{name}='{value}'"):
        build(**options, **more)


@pytest.mark.parametrize(
    "task", ["mae", "simmim", "masked_patch", "segmentation", "dinov2"]
)
def test_tasks_of_all_patches_refuse_it(task):
    config = tiny_config(model={"patch_dropout": 0.25}, task={"name": task})
    with pytest.raises(UserError, match=rf"patch_dropout=0.25: .*'{task}'"):
        config.build_model()


def test_stacked_parameters_are_those_of_blocks_one_by_one():
    stacked = build(**KINDS["every"])
    params = draw_params(stacked)
    images = jax.random.normal(jax.random.key(1), (3, *stacked.image_shape))
    key = jax.random.key(2)
    by_one = stacked.replace(scan=False, remat_policy="none")
    first, second = (
        jax.jit(functools.partial(m.apply, train=True))(p, images, key=key)["logits"]
        for m, p in ((stacked, params), (by_one, stacking.unstack(params)))
    )
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)

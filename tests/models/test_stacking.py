import functools

import jax
import numpy as np
import optax
import pytest
from helpers import draw_params

from vit_jax import models
from vit_jax.models import stacking

SMALL = {"width": 12, "depth": 3, "num_heads": 3, "mlp_dim": 20}


@functools.cache
def params_of(variant="B/4", **options):
    model = models.create(variant, num_classes=5, image_size=(8, 12), **options)
    return draw_params(model)


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"posemb_placement": "every"}, marks=pytest.mark.slow)]
)
def test_unstack_undoes_stack_under_jit_too(options):
    params = params_of(**SMALL, **options)
    stacked = jax.jit(stacking.stack)(params)
    kernel = stacked["Transformer"]["encoderblock"]["MlpBlock_3"]["Dense_0"]["kernel"]
    assert kernel.shape == (3, 12, 20)
    block = params["Transformer"]["encoderblock_2"]
    np.testing.assert_array_equal(kernel[2], block["MlpBlock_3"]["Dense_0"]["kernel"])
    assert_equal_trees(jax.jit(stacking.unstack)(stacked), params)
    assert_equal_trees(stacking.unstack(stacking.stack(params)), params)


def test_more_than_ten_blocks_keep_their_order():
    shapes = {f"encoderblock_{i}": {"a": np.full(2, i)} for i in range(12)}
    stacked = stacking.stack({"Transformer": shapes})
    found = stacked["Transformer"]["encoderblock"]["a"]
    np.testing.assert_array_equal(found[:, 0], np.arange(12))


def test_shapes_are_stacked_as_arrays_are():
    params = params_of(**SMALL)
    shapes = jax.eval_shape(lambda: params)
    for function in (stacking.stack, stacking.unstack):
        expected = jax.eval_shape(function, shapes)
        assert function(shapes) == expected
        shapes, params = expected, function(params)


def test_both_leave_alone_what_has_no_blocks_or_is_of_their_layout():
    resnet = {"root_block": {"conv_root": np.ones(3)}, "head": np.zeros(2)}
    assert stacking.stack(resnet) == stacking.unstack(resnet) == resnet
    params = params_of(**SMALL)
    assert_equal_trees(stacking.unstack(params), params)
    stacked = stacking.stack(params)
    assert_equal_trees(stacking.stack(stacked), stacked)


def test_moments_of_an_optimiser_are_converted_with_their_parameters():
    params = params_of(**SMALL)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = {"opt": tx.init(params), "params": params, "average": None}
    stacked = stacking.stack(params)
    expected = {"opt": tx.init(stacked), "params": stacked, "average": None}
    convert = functools.partial(stacking.convert, like=expected, params=stacked)
    assert_equal_trees(convert(state, stacking.stack), expected)
    assert_equal_trees(convert(expected, stacking.unstack), state)


def test_parameters_of_another_network_stay_as_they_are():
    params, teacher = params_of(**SMALL), params_of(**SMALL | {"depth": 2})
    like = {"params": stacking.stack(params), "teacher": teacher}
    unstacked = {"params": params, "teacher": teacher}
    convert = functools.partial(stacking.convert, like=like, params=like["params"])
    assert_equal_trees(convert(unstacked, stacking.stack), like)
    assert_equal_trees(convert(like, stacking.unstack), unstacked)


def test_only_paths_of_stacked_blocks_are_stacked():
    assert stacking.is_stacked("Transformer/encoderblock/LayerNorm_0/scale")
    assert not stacking.is_stacked("Transformer/encoderblock_1/LayerNorm_0/scale")
    assert not stacking.is_stacked("Transformer/encoder_norm/scale")

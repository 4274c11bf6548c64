"""Relevance, against the full matrices of the paper on a network written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_vit
import pytest

from vit_jax.analysis.relevance import relevance
from vit_jax.errors import UserError

DEPTH = 2
TINY = {"width": 8, "depth": DEPTH, "heads": 2, "mlp_dim": 9}


def drawn(**options):
    return plain_vit.drawn(scale=0.6, **{**TINY, **options})


@functools.partial(jax.jit, static_argnames="head")
def slopes_and_weights(params, image, label, head):
    N = 7 if head == "token" else 6

    def logit(added):
        logits, weights, _ = plain_vit.forward(
            params, image, patch=4, heads=2, head=head, added=added
        )
        return logits[label], weights

    return jax.grad(logit, has_aux=True)([[jnp.zeros((N, N))] * 2] * DEPTH)


def by_matrices(params, image, label, head):
    """Follows all tokens' relevance up, layer by layer, as the paper states it."""
    whole = np.eye(7 if head == "token" else 6)
    slopes, weights = slopes_and_weights(params, image, label, head)
    for of_layer, slope in zip(weights, slopes, strict=True):
        pairs = zip(of_layer, slope, strict=True)
        drawn = np.mean([np.maximum(0, a * s) for a, s in pairs], axis=0)
        whole = whole + drawn @ whole
    return whole[0] if head == "token" else whole.mean(0)


@pytest.mark.parametrize("head", ["token", pytest.param("gap", marks=pytest.mark.slow)])
def test_it_is_that_of_the_paper_s_matrices(head):
    model, params, images = drawn(head=head)
    for classes in ((4, 2), (0, 2)):
        found = relevance(model, params, images, jnp.array(classes))
        for row, image, label in zip(found, images, classes, strict=True):
            wanted = by_matrices(params, image, label, head)
            np.testing.assert_allclose(row, wanted, rtol=1e-3, atol=1e-5)
    assert (found >= 0).all()


@pytest.mark.slow
def test_attention_pooling_and_two_tokens_have_one_too():
    for options in ({"head": "map"}, {"distillation": True}, {"posemb": "none"}):
        model, params, images = drawn(**options)
        found = relevance(model, params, images, jnp.array([1, 3]))
        assert found.shape == (2, 6 + model.extra)
        assert (found >= 0).all() and (found > 0).any()
        other = relevance(model, params, images, jnp.array([1, 0]))
        np.testing.assert_allclose(found[0], other[0], rtol=1e-5)
        assert abs(found[1] - other[1]).max() > 1e-6


def test_a_token_without_influence_has_no_relevance():
    model, params, images = drawn(depth=1)
    attention = params["Transformer"]["encoderblock_0"]
    attention["MultiHeadDotProductAttention_1"]["out"]["kernel"] *= 0
    found = relevance(model, params, images, jnp.array([1, 3]))
    np.testing.assert_array_equal(found, [[1, 0, 0, 0, 0, 0, 0]] * 2)


def test_a_class_that_is_not_there_is_refused():
    model, params, images = drawn()
    with pytest.raises(UserError, match="class 7 is not one of the 5"):
        relevance(model, params, images, jnp.array([7, 0]))

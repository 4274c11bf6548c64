"""Relevance, against the full matrices of the paper on a network written out."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import plain_vit
import pytest

from vit_jax.analysis.relevance import relevance
from vit_jax.errors import UserError
from vit_jax.models import parts

DEPTH = 2
TINY = {"width": 8, "depth": DEPTH, "heads": 2, "mlp_dim": 9}


def drawn(**options):
    return plain_vit.drawn(scale=0.6, **{**TINY, **options})


@functools.partial(jax.jit, static_argnames="head")
def slopes_and_weights(params, image, label, head):
    N = 6 + ("cls" in params) + ("dist" in params)

    def logit(added):
        logits, weights, _ = plain_vit.forward(
            params, image, patch=4, heads=2, head=head, added=added
        )
        return logits[label], weights

    return jax.grad(logit, has_aux=True)([[jnp.zeros((N, N))] * 2] * DEPTH)


def by_matrices(params, image, label, head="token"):
    """Follows all tokens' relevance up, layer by layer, as the paper states it."""
    slopes, weights = slopes_and_weights(params, image, label, head)
    whole = np.eye(len(weights[0][0]))
    for of_layer, slope in zip(weights, slopes, strict=True):
        whole = whole + spoke_for(of_layer, slope) @ whole
    if head == "map":
        return by_pooling(params, image, label) @ whole
    if head == "gap":
        return whole.mean(0)
    return whole[: 1 + ("dist" in params)].mean(0)


def by_pooling(params, image, label):
    """Returns how much attention pooling looks at each token, for a class."""
    _, _, tokens = plain_vit.forward(params, image, patch=4, heads=2, head="map")
    x = plain_vit.norm(tokens[-1], params["Transformer"]["encoder_norm"], 1e-6)
    pool = params["MAPHead_0"]

    def logit(added):
        attention = pool["MultiHeadDotProductAttention_0"]
        y, weights = plain_vit.attend(pool["probe"][0], x, attention, added)
        z = plain_vit.norm(y, pool["LayerNorm_0"], 1e-6)
        y = y + plain_vit.mlp(z, pool["MlpBlock_0"])
        return (y @ params["head"]["kernel"])[0, label], weights

    slopes, weights = jax.grad(logit, has_aux=True)([jnp.zeros((1, 6))] * 2)
    return spoke_for(weights, slopes)[0]


def spoke_for(weights, slopes):
    pairs = zip(weights, slopes, strict=True)
    return np.mean([np.maximum(0, a * s) for a, s in pairs], axis=0)


@pytest.mark.parametrize(
    "options",
    [
        {"head": "token"},
        pytest.param({"head": "gap"}, marks=pytest.mark.slow),
        pytest.param({"head": "map"}, marks=pytest.mark.slow),
        pytest.param({"distillation": True}, marks=pytest.mark.slow),
        pytest.param({"posemb": "none"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: str(*options.values()),
)
def test_it_is_that_of_the_paper_s_matrices(options):
    model, params, images = drawn(**options)
    plain = params
    if "posemb" in options:  # Which is as if all positions were 0.
        nothing = {"pos_embedding": jnp.zeros((1, 7, 8))}
        plain = params | {
            "Transformer": params["Transformer"] | {"posembed_input": nothing}
        }
    for classes in ((4, 2), (0, 2)):
        found = relevance(model, params, images, jnp.array(classes))
        for row, image, label in zip(found, images, classes, strict=True):
            wanted = by_matrices(plain, image, label, options.get("head", "token"))
            np.testing.assert_allclose(row, wanted, rtol=1e-3, atol=1e-5)
    assert (found >= 0).all()


def test_one_layer_s_attention_is_alive_on_the_way_back(monkeypatch):
    model, params, images = drawn()
    alive, pull = [], parts.pull

    def watched(*args):
        shapes = [array.shape for array in jax.live_arrays()]
        alive.append(shapes.count((2, 2, 7, 7)))
        return pull(*args)

    monkeypatch.setattr(parts, "pull", watched)
    gc.collect()  # Of earlier tests.
    relevance(model, params, images, jnp.array([1, 3]))
    assert alive == [0] * DEPTH


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

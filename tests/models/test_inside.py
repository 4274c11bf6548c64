"""The inside of networks: against a plain one, `apply`, and the memory that is said."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import plain_vit
import pytest
from helpers import slow_but

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import intermediates, stacking

TINY = {"width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 20}
SLOW = pytest.mark.slow
POOLS = ["token", pytest.param("map", marks=SLOW), pytest.param("gap", marks=SLOW)]


def drawn(variant="B/4", **options):
    return plain_vit.drawn(variant, scale=0.4, **{**TINY, **options})


@pytest.mark.parametrize("pool", POOLS)
def test_layers_are_those_of_a_network_written_out(pool):
    model, params, images = drawn(pool=pool)
    found = list(intermediates.layers(model, params, images))
    for b, image in enumerate(images):
        run = functools.partial(plain_vit.forward, patch=4, num_heads=3, pool=pool)
        logits, weights, tokens = jax.jit(run)(params, image)
        for i, layer in enumerate(found):
            np.testing.assert_allclose(
                layer.attention[b], jnp.stack(weights[i]), atol=2e-5
            )
            np.testing.assert_allclose(layer.tokens[b], tokens[i], atol=1e-4)
        ours = intermediates.classify_tokens(model, params, found[-1].tokens)["logits"][
            b
        ]
        np.testing.assert_allclose(ours, logits, atol=1e-4)


FEW = [
    {"distillation": True, "fc_norm": True},
    {"num_register_tokens": 2, "layer_scale_init": 0.5, "activation": "swiglu"},
]
OTHERS = [
    {"pool": "gap", "class_token": True, "representation_layer": True},
    {"pool": "none", "posemb": "sincos2d", "posemb_placement": "shared"},
    {"posemb": "learned2d", "posemb_placement": "every", "num_classes": 0},
    {"posemb": "relative", "posemb_placement": "every", "activation": "gelu"},
    {"posemb": "relative", "posemb_placement": "shared", "layer_norm_eps": 1e-2},
    {"variant": "R50+B/32", "stage_depths": (1,), "stem_width": 32},
    {"dtype": "bfloat16", "pool": "map"},
]


@pytest.mark.parametrize(
    "options",
    slow_but(FEW, FEW + OTHERS),
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_last_tokens_lead_to_what_apply_gives(options):
    model, params, images = drawn(**options)
    wanted = jax.jit(model.apply)(params, images)
    for layer in intermediates.layers(model, params, images):
        assert layer.attention.dtype == layer.tokens.dtype == jnp.float32
        np.testing.assert_allclose(layer.attention.sum(-1), 1, rtol=1e-5)
    found = intermediates.classify_tokens(model, params, layer.tokens)
    assert found.keys() == wanted.keys()
    # What XLA fuses in one program it rounds less often than in several.
    loose = 0.1 if options.get("dtype") == "bfloat16" else 1e-5
    for name in found:
        np.testing.assert_allclose(found[name], wanted[name], rtol=loose, atol=loose)


@pytest.mark.parametrize(
    "posemb_placement", [pytest.param("stem", marks=SLOW), "every"]
)
def test_the_layout_of_the_parameters_does_not_matter(posemb_placement):
    options = {"posemb_placement": posemb_placement}
    model, params, images = drawn(**options)
    scanned = models.create(
        "B/4", num_classes=5, image_size=(8, 12), scan=True, **TINY, **options
    )
    stacked = stacking.stack(params)
    one, other = (
        list(intermediates.layers(m, p, images))
        for m, p in ((model, params), (scanned, stacked))
    )
    assert len(one) == len(other) == 2
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.attention, b.attention)
        np.testing.assert_array_equal(a.tokens, b.tokens)
    wanted = jax.jit(scanned.apply)(stacked, images)["logits"]
    np.testing.assert_allclose(
        intermediates.classify_tokens(scanned, stacked, other[-1].tokens)["logits"],
        wanted,
        atol=1e-5,
    )
    pulls = [
        list(intermediates.attention_gradients(m, p, images, jnp.array([1, 3]))[1])
        for m, p in ((model, params), (scanned, stacked))
    ]
    for a, b in zip(*pulls, strict=True):
        np.testing.assert_array_equal(a.gradient, b.gradient)


@pytest.mark.parametrize("pool", POOLS)
def test_gradients_are_those_of_the_network_written_out(pool):
    model, params, images = drawn(pool=pool)
    classes, N = jnp.array([4, 2]), 7 if pool == "token" else 6
    looked_at, pulls = intermediates.attention_gradients(model, params, images, classes)
    pulls = list(pulls)[::-1]
    for b, (image, label) in enumerate(zip(images, classes, strict=True)):

        def logit(added, image=image, label=label):
            out = plain_vit.forward(
                params, image, patch=4, num_heads=3, pool=pool, added=added
            )
            return out[0][label], out[1]

        slopes, weights = jax.jit(jax.grad(logit, has_aux=True))(
            [[jnp.zeros((N, N))] * 3] * 2
        )
        for i, pull in enumerate(pulls):
            np.testing.assert_allclose(
                pull.gradient[b], jnp.stack(slopes[i]), atol=1e-4, rtol=1e-3
            )
            np.testing.assert_allclose(
                pull.attention[b], jnp.stack(weights[i]), atol=2e-5
            )
    if pool == "token":
        np.testing.assert_array_equal(looked_at, [[1, 0, 0, 0, 0, 0, 0]] * 2)
    elif pool == "gap":
        np.testing.assert_allclose(looked_at, np.full((2, 6), 1 / 6), rtol=1e-6)


def test_both_tokens_of_deit_are_looked_at():
    model, params, images = drawn(distillation=True)
    looked_at, _ = intermediates.attention_gradients(
        model, params, images, jnp.array([0, 1])
    )
    np.testing.assert_allclose(looked_at[1], [0.5, 0.5, 0, 0, 0, 0, 0, 0])


def test_the_class_token_and_the_patches_are_looked_at_alike():
    model, params, images = drawn(pool="token_gap")
    looked_at, _ = intermediates.attention_gradients(
        model, params, images, jnp.array([0, 1])
    )
    np.testing.assert_allclose(looked_at[1], [1 / 2, *[1 / 12] * 6], rtol=1e-6)


def alive(B, H, N):
    """Counts the arrays of the size of a layer's attention."""
    return sum(array.shape == (B, H, N, N) for array in jax.live_arrays())


@pytest.mark.slow
def test_the_attention_of_one_layer_is_there_at_a_time():
    gc.collect()  # Of earlier tests; what is counted here is freed by its references.
    model, params, images = drawn(depth=5)
    before = alive(2, 3, 7)
    for layer in intermediates.layers(model, params, images):
        assert alive(2, 3, 7) == before + 1
        del layer
        assert alive(2, 3, 7) == before
    _, pulls = intermediates.attention_gradients(
        model, params, images, jnp.array([0, 1])
    )
    assert alive(2, 3, 7) == before
    for pull in pulls:
        assert alive(2, 3, 7) == before + 2
        del pull
        assert alive(2, 3, 7) == before


def test_what_cannot_be_seen_is_refused():
    resnet = models.create("R50x1", num_classes=5, image_size=(32, 32))
    images = jnp.zeros((1, 32, 32, 3))
    for look in (
        lambda: intermediates.layers(resnet, {}, images),
        lambda: intermediates.classify_tokens(resnet, {}, images[..., 0]),
        lambda: intermediates.attention_gradients(resnet, {}, images, jnp.array([0])),
    ):
        with pytest.raises(UserError, match="a ResNet has no attention:"):
            look()
    model, params, images = drawn()
    with pytest.raises(UserError, match=r"class 5 is not one of the 5 classes"):
        intermediates.attention_gradients(model, params, images, jnp.array([0, 5]))
    for options in ({"pool": "none"}, {"num_classes": 0}):
        model, params, images = drawn(**options)
        with pytest.raises(UserError, match=r"num_classes=.*no logit"):
            intermediates.attention_gradients(model, params, images, jnp.array([0, 0]))

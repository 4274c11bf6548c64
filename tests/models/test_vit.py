import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights import google

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TINY = {"width": 12, "depth": 2, "heads": 3, "mlp_dim": 20}

# 1000 classes, 224 pixels, class token, no representation layer.
COUNTS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
}


def count(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("variant", COUNTS)
def test_variant_has_the_published_number_of_parameters(variant):
    assert count(models.create(variant, classes=1000)) == COUNTS[variant]


def test_every_size_has_a_parameter_count_above():
    assert {variant.split("/")[0] for variant in COUNTS} == set(variants.SIZES)


def test_representation_layer_adds_one_square_dense_layer():
    plain = count(models.create("B/16", classes=21_843))
    full = count(models.create("B/16", classes=21_843, representation=True))
    assert full - plain == 768 * 768 + 768


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("google_vit_token", {}),
        ("google_vit_token_rep", {"representation": True}),
        ("google_vit_gap", {"head": "gap"}),
    ],
)
def test_logits_agree_with_the_original_code(case, options):
    params = google.load(GOLDEN / f"{case}.npz")
    io = np.load(GOLDEN / f"{case}.io.npz")
    model = models.create(
        "B/16",
        classes=10,
        image_size=(64, 64),
        width=64,
        depth=3,
        heads=4,
        mlp_dim=128,
        **options,
    )
    out = jax.jit(model.apply)(params, io["images"])
    np.testing.assert_allclose(out["logits"], io["logits"], atol=1e-5, rtol=0)
    if "pre_logits" in io:
        np.testing.assert_allclose(
            out["pre_logits"], io["pre_logits"], atol=1e-5, rtol=0
        )


def test_non_square_images_and_one_channel_work():
    model = models.create(
        "B/4", classes=5, image_size=(12, 20), channels=1, head="gap", **TINY
    )
    params = model.init(jax.random.key(0))
    assert model.grid == (3, 5)
    assert params["Transformer"]["posembed_input"]["pos_embedding"].shape == (1, 15, 12)
    out = model.apply(params, jnp.ones((2, 12, 20, 1)))
    assert out["logits"].shape == (2, 5)
    assert out["pre_logits"].shape == (2, 12)


def test_head_starts_at_zero_with_its_bias():
    model = models.create("B/4", classes=5, image_size=(8, 8), head_bias=-10.0, **TINY)
    out = model.apply(model.init(jax.random.key(0)), jnp.ones((2, 8, 8, 3)))
    np.testing.assert_array_equal(out["logits"], np.full((2, 5), -10.0))


def trained_like(params):
    """Gives every parameter a value that shows."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            x + 0.3 * jax.random.normal(k, x.shape)
            for x, k in zip(leaves, keys, strict=True)
        ],
    )


def test_bfloat16_keeps_float32_parameters_and_logits_and_stays_near():
    images = jax.random.normal(jax.random.key(1), (2, 8, 12, 3))
    outs = {}
    for dtype in ("float32", "bfloat16"):
        model = models.create("B/4", classes=5, image_size=(8, 12), dtype=dtype, **TINY)
        params = trained_like(model.init(jax.random.key(0)))
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        outs[dtype] = jax.jit(model.apply)(params, images.astype(dtype))["logits"]
        assert outs[dtype].dtype == jnp.float32
    # bfloat16 has 8 bits: one part in 256 an operation.
    np.testing.assert_allclose(outs["bfloat16"], outs["float32"], atol=0.15)
    assert np.abs(outs["bfloat16"] - outs["float32"]).max() > 1e-5


@pytest.mark.parametrize("option", ["dropout", "stochastic_depth"])
def test_random_layers_act_in_training_only(option):
    model = models.create("B/4", classes=5, image_size=(8, 8), **{option: 0.5}, **TINY)
    params = trained_like(model.init(jax.random.key(0)))
    images = jnp.ones((6, 8, 8, 3))

    def logits(**kwargs):
        return model.apply(params, images, **kwargs)["logits"]

    a, b = (logits(train=True, key=jax.random.key(k)) for k in (1, 2))
    assert np.abs(a - b).max() > 1e-3
    np.testing.assert_array_equal(a, logits(train=True, key=jax.random.key(1)))
    np.testing.assert_allclose(logits()[0], logits()[5], rtol=1e-5)


def test_dropout_follows_the_embedding_and_every_dense_layer_but_query_key_value():
    model = models.create("B/4", classes=5, image_size=(8, 8), dropout=0.5, **TINY)
    order = []

    def note(call, args, kwargs, context):
        acts = not isinstance(context.module, nn.Dropout) or context.module.rate
        if isinstance(context.module, (nn.Dense, nn.DenseGeneral, nn.Dropout)) and acts:
            order.append(context.module.name.partition("_")[0])
        return call(*args, **kwargs)

    params = model.init(jax.random.key(0))
    with nn.intercept_methods(note):
        model.apply(params, jnp.ones((2, 8, 8, 3)), train=True, key=jax.random.key(0))
    block = ["query", "key", "value", "out", "Dropout", *["Dense", "Dropout"] * 2]
    assert order == ["Dropout", *block, *block, "head"]


def test_gelu_flavours_differ_a_little():
    outs = []
    for gelu in ("tanh", "erf"):
        model = models.create("B/4", classes=5, image_size=(8, 8), gelu=gelu, **TINY)
        params = trained_like(model.init(jax.random.key(0)))
        outs.append(model.apply(params, jnp.ones((1, 8, 8, 3)))["logits"])
    assert 1e-7 < np.abs(outs[0] - outs[1]).max() < 1e-2


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("B16", {}, "model.variant='B16' is not SIZE/PATCH"),
        ("X/16", {}, "a size out of Ti, S, B, L, H"),
        (
            "B/16",
            {"image_size": (224, 230)},
            "width 230 is not a multiple of the patch",
        ),
        ("B/16", {"image_size": (20, 32)}, "height 20 .* such as 16"),
        ("B/16", {"heads": 7}, "width 768 does not divide into 7 heads"),
    ],
)
def test_impossible_models_are_refused(variant, options, message):
    with pytest.raises(UserError, match=message):
        models.create(variant, classes=3, **options)

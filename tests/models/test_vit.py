import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import draw_params

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.models import encoder, layers
from vit_jax.models.layers import MergedDense
from vit_jax.weights import export
from vit_jax.weights.pretrained import Pretrained

TINY = {"width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 20}


def create(variant="B/4", num_classes=5, image_size=(8, 12), **options):
    return models.create(
        variant, num_classes=num_classes, image_size=image_size, **TINY | options
    )


def test_non_square_images_and_one_channel_work():
    model = create(image_size=(12, 20), channels=1, pool="gap")
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert model.grid == (3, 5)
    assert params["Transformer"]["posembed_input"]["pos_embedding"].shape == (1, 15, 12)
    out = jax.eval_shape(model.apply, params, jnp.ones((2, 12, 20, 1)))
    assert out["logits"].shape == (2, 5)
    assert out["pre_logits"].shape == (2, 12)


@pytest.mark.slow
def test_bfloat16_keeps_float32_parameters_and_logits_and_stays_near():
    images = jax.random.normal(jax.random.key(1), (2, 8, 12, 3))
    outs = {}
    for dtype in ("float32", "bfloat16"):
        model = create(dtype=dtype)
        params = draw_params(model)
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        outs[dtype] = jax.jit(model.apply)(params, images.astype(dtype))["logits"]
        assert outs[dtype].dtype == jnp.float32
    # bfloat16 has 8 bits: one part in 256 an operation.
    np.testing.assert_allclose(outs["bfloat16"], outs["float32"], atol=0.15)
    assert np.abs(outs["bfloat16"] - outs["float32"]).max() > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("option", ["dropout", "drop_path_rate"])
def test_random_layers_act_in_training_only(option):
    model = create(image_size=(8, 8), **{option: 0.5})
    params = draw_params(model)
    images = jnp.ones((6, 8, 8, 3))

    def logits(**kwargs):
        return model.apply(params, images, **kwargs)["logits"]

    a, b = (logits(train=True, key=jax.random.key(k)) for k in (1, 2))
    assert np.abs(a - b).max() > 1e-3
    np.testing.assert_array_equal(a, logits(train=True, key=jax.random.key(1)))
    np.testing.assert_allclose(logits()[0], logits()[5], rtol=1e-5)


@pytest.mark.slow
def test_dropout_follows_the_embedding_and_every_dense_layer_but_query_key_value(
    monkeypatch,
):
    model = create(image_size=(8, 8), dropout=0.5)
    order = []

    def note(call, args, kwargs, context):
        if isinstance(context.module, (nn.Dense, MergedDense)):
            order.append(context.module.name.partition("_")[0])
        return call(*args, **kwargs)

    def drop(x, rate, key):
        order.extend(["Dropout"] if rate and key is not None else [])
        return x

    monkeypatch.setattr(layers, "dropout", drop)
    monkeypatch.setattr(encoder, "dropout", drop)

    params = draw_params(model)
    with nn.intercept_methods(note):
        model.apply(params, jnp.ones((2, 8, 8, 3)), train=True, key=jax.random.key(0))
    block = ["query", "key", "value", "out", "Dropout", *["Dense", "Dropout"] * 2]
    assert order == ["Dropout", *block, *block, "head"]


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("B16", {}, "model.variant='B16' is not SIZE/PATCH"),
        ("X/16", {}, "a size out of Ti, S, B, L, So400m, H, g, G"),
        ("R50+B/8", {}, r"hybrids are R50\+SIZE/16, R50\+SIZE/32, R26\+SIZE/32"),
        ("R51x1", {}, "ResNets are R50, R101, R152, R200"),
        ("R50x0", {}, "each with a width factor"),
        ("R50x1", {"pool": "gap"}, "unknown config key model.pool; the nearest"),
        ("R50x1", {"stem_width": 48}, "stem_width=48 is not a multiple of the 32"),
        ("R50x1", {"stage_depths": (1, 0, 2)}, r"s=\(1, 0, 2\): set at least 1"),
        ("B/16", {"stage_depths": (1,)}, "unknown config key model.stage_depths; the"),
        ("B/16", {"pool": "tok"}, "pool='tok' is not one of token, gap, token_gap"),
        (
            "B/16",
            {"pool": "token_gap", "fc_norm": True},
            "fc_norm=True .* model.pool='token_gap'",
        ),
        ("B/16", {"posemb": "2d"}, "posemb='2d' is not one of learned, learned2d"),
        ("B/16", {"posemb_placement": "all"}, "placement='all' is not one of stem"),
        (
            "B/16",
            {"activation": "relu"},
            "activation='relu' is not one of gelu_tanh, gelu, quick_gelu, swiglu",
        ),
        (
            "B/16",
            {"posemb": "relative", "posemb_placement": "stem"},
            "posemb_placement='stem' with model.posemb='relative'",
        ),
        (
            "B/16",
            {"pool": "map", "distillation": True},
            "needs a class token, not model.pool='map'",
        ),
        (
            "B/16",
            {"posemb": "sincos2d", "width": 18, "num_heads": 3},
            "width=18 is not a multiple of 4, .*posemb='sincos2d'",
        ),
        (
            "R50+B/32",
            {"image_size": (48, 64)},
            "height 48 .* patch size 32 .* such as 64",
        ),
        ("B/16", {"image_size": (224, 230)}, "width 230 is not a multiple of the"),
        ("B/16", {"image_size": (20, 32)}, "height 20 .* such as 16"),
        ("B/16", {"num_heads": 7}, "width=768 is not a multiple of model.num_heads=7"),
    ],
)
def test_impossible_models_are_refused(variant, options, message):
    with pytest.raises(UserError, match=message):
        models.create(variant, num_classes=3, **options)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("B/4", TINY | {"pool": "map", "activation": "gelu", "posemb": "sincos2d"}),
        ("R50+B/16", TINY | {"stage_depths": (1, 1, 2), "stem_width": 32}),
        ("R50x1", {"stage_depths": [1, 2], "stem_width": 32}),
    ],
)
def test_options_build_the_same_model_again(variant, options):
    model = models.create(variant, num_classes=5, image_size=(32, 48), **options)
    assert models.create(**json.loads(json.dumps(model.options))) == model


def test_options_of_an_earlier_version_build_the_model():
    stored = TINY | {"num_classes": 5, "image_size": (32, 48), "token_init_std": 0.02}
    assert models.create("B/4", **stored).options["init"] == "google"


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"pool": "token"}, (2, 12)),
        ({"pool": "gap"}, (2, 12)),
        ({"pool": "map"}, (2, 12)),
        ({"pool": "token_gap", "num_register_tokens": 2}, (2, 24)),
        ({"pool": "none"}, (2, 6, 12)),
        ({"pool": "none", "class_token": True}, (2, 7, 12)),
        ({"distillation": True}, (2, 12)),
    ],
)
@pytest.mark.parametrize("num_classes", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_every_head_with_and_without_a_classifier(options, shape, num_classes):
    model = create(num_classes=num_classes, **options)
    params = jax.eval_shape(model.init, jax.random.key(0))
    out = jax.eval_shape(model.apply, params, jnp.ones((2, 8, 12, 3)))
    assert out["pre_logits"].shape == shape
    assert ("logits" in out) == bool(num_classes)
    if num_classes:
        assert out["logits"].shape == (*shape[:-1], num_classes)


@pytest.mark.slow
def test_both_tokens_and_both_classifiers_begin_as_the_key_says():
    given = {"distillation": True, "width": 384, "depth": 1, "num_heads": 4}
    for init, std in (("google", 0.0), ("timm", 0.02)):
        model = create(**given, num_classes=5, init=init)
        params = jax.jit(model.init)(jax.random.key(0))
        for found in (params["cls"], params["dist"]):
            assert float(found.std()) == pytest.approx(std, rel=0.15)
        for name in ("head", "head_dist"):
            found = params[name]["kernel"]
            assert float(found.std()) == pytest.approx(std, rel=0.15)


@pytest.mark.parametrize("registers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_pools_leave_registers_out_and_take_their_own_tokens(registers):
    kept = {"class_token": True, "num_register_tokens": registers}
    images = jax.random.normal(jax.random.key(1), (2, 8, 12, 3))
    tokens = create(pool="none", **kept)
    params = draw_params(tokens)

    def features(model):
        other = {k: v for k, v in draw_params(model).items() if k == "head"}
        return jax.jit(model.apply)(params | other, images)["pre_logits"]

    each = np.asarray(features(tokens))
    assert each.shape[1] == 1 + registers + 6
    first, mean = each[:, 0], each[:, 1 + registers :].mean(1)
    expected = {"token": first, "gap": mean, "token_gap": np.hstack([first, mean])}
    for pool, values in expected.items():
        found = features(create(pool=pool, **kept))
        np.testing.assert_allclose(found, values, atol=1e-6)


def test_distillation_is_the_mean_of_two_classifiers():
    model = create(distillation=True)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, 8, 12, 3))
    full = jax.jit(model.apply)(params, images)["logits"]
    halves = []
    for name in ("head", "head_dist"):
        muted = params | {name: jax.tree.map(jnp.zeros_like, params[name])}
        halves.append(jax.jit(model.apply)(muted, images)["logits"])
        assert np.abs(halves[-1]).max() > 1e-3
    np.testing.assert_allclose(full, halves[0] + halves[1], atol=1e-5)


def test_pooled_norm_comes_after_the_mean():
    model = create(pool="gap", fc_norm=True)
    params = draw_params(model)
    assert "encoder_norm" not in params["Transformer"]
    params["fc_norm"] = {"scale": jnp.ones(12), "bias": jnp.zeros(12)}
    features = jax.jit(model.apply)(params, jnp.ones((2, 8, 12, 3)))["pre_logits"]
    np.testing.assert_allclose(features.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(features.std(-1), 1, atol=1e-3)


def test_rms_norms_have_no_mean_and_no_bias(tmp_path):
    norms = {"pre_norm": True, "qk_norm": True, "attention_out_norm": True}
    norms |= {"mlp_norm": True, "pool": "map"}
    keys = {"width": 12, "depth": 1, "num_heads": 1, "mlp_dim": 20, **norms}
    model, plain = (
        models.create("Ti/4", num_classes=5, image_size=(8, 12), rms_norm=kind, **keys)
        for kind in (True, False)
    )
    params = jax.device_get(draw_params(model))
    ours, theirs = (
        {name for name in flatten_dict(tree, sep="/") if "norm" in name.lower()}
        for tree in (params, jax.eval_shape(plain.init, jax.random.key(0)))
    )
    assert ours == {name for name in theirs if name.endswith("/scale")}
    assert len(ours) == 9
    # The last norm is that of what comes without it.
    before = models.create(**{**model.options, "final_norm": False})
    scale = params["Transformer"]["encoder_norm"]["scale"]
    images = jax.random.normal(jax.random.key(1), (2, 8, 12, 3))
    x = np.float64(before.encode(params, images))
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(model.encode(params, images), expected, rtol=1e-5)
    pretrained = Pretrained(params, model.options, "workdir", "here")
    with pytest.raises(UserError, match="rms_norm=True"):
        export.export(pretrained, "timm", tmp_path / "timm")
    export.export(pretrained, "safetensors", tmp_path / "a.safetensors")
    assert weights.open_pretrained(tmp_path / "a.safetensors").options["rms_norm"]

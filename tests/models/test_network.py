"""Networks that are built from their config, and what is refused of them."""

import dataclasses
import itertools
import json
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but
from jax.extend import core

from vit_jax import models, weights
from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import NetworkConfig, cost, intermediates, variants
from vit_jax.models.layers import classify
from vit_jax.weights import export
from vit_jax.weights.pretrained import Pretrained


class Mean(nn.Module):
    """Classifies the mean pixel; or does what a test wants to be refused."""

    num_classes: int
    wrong: str = ""

    @nn.compact
    def __call__(self, images, *, train=False):
        if self.wrong == "raises":
            return images @ jnp.ones((7, 2))
        if self.wrong == "state":
            self.variable("cache", "last", jnp.zeros, ())
        features = images.mean((1, 2)).astype(jnp.float32)
        if self.wrong == "sized":
            images *= self.param("mask", nn.initializers.ones, (1, *images.shape[1:]))
            features = images.mean((1, 2)).astype(jnp.float32)
        if self.wrong == "empty":
            return {"logits": features}
        features *= self.param("scale", nn.initializers.ones, (1, 3))
        if self.wrong == "loops":
            kernel = self.param("kernel", nn.initializers.ones, (3, 3))
            features = jax.lax.while_loop(
                lambda x: x.sum() < 9, lambda x: x @ kernel, features
            )
        if self.wrong == "name":
            return {"logits": nn.Dense(self.num_classes, name="fc")(features)}
        outputs = classify(features, self.num_classes, 0.0)
        return {
            "tuple": (outputs["pre_logits"],),
            "shape": outputs | {"pre_logits": images.astype(jnp.float32)},
            "dtype": outputs
            | {"logits": outputs.get("logits", features).astype("bfloat16")},
            "num_classes": outputs | {"logits": features},
        }.get(self.wrong, outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanConfig(NetworkConfig):
    """The mean pixel."""

    patch_size = 4
    wrong: str = key("", "What is wrong with it.")

    def build(self, num_classes, image_shape):
        if self.wrong == "build":
            raise KeyError("width")
        return None if self.wrong == "nothing" else Mean(num_classes, self.wrong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoBuildConfig(NetworkConfig):
    """No network."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakenConfig(MeanConfig):
    """A key that every network takes."""

    num_classes: int = key(3, "Classes.")


def create(name="Mean", num_classes=5, image_size=(8, 12), **options):
    variant = f"{__name__}:{name}Config"
    return models.create(
        variant, num_classes=num_classes, image_size=image_size, **options
    )


def test_a_network_has_options_that_build_it_again_and_costs():
    model = create()
    assert models.create(**json.loads(json.dumps(model.options))) == model
    assert (model.config.patch_size, model.grid, model.num_prefix_tokens) == (
        4,
        (2, 3),
        0,
    )
    assert not model.config.has_encoder
    assert not model.config.stacked
    params = model.init(jax.random.key(0))
    images = jnp.ones((2, 8, 12, 3))
    outputs = model.apply(params, images, train=True, key=jax.random.key(1))
    np.testing.assert_array_equal(outputs["pre_logits"], np.ones((2, 3)))
    assert (cost.parameters(model), cost.macs_per_image(model)) == (23, 15)
    assert (cost.tokens(model), cost.training_exaflops(model, 10)) == (0, 9e-16)
    assert cost.activation_bytes(model) == 2 * 3 * 4  # Before and after `scale`.
    assert models.side_multiple(f"{__name__}:MeanConfig") == 4
    assert create(num_classes=0).representations


def test_the_cost_of_a_loop_of_unknown_length_is_not_known():
    model = create(wrong="loops")
    assert cost.training_exaflops(model, 10) is None
    with pytest.raises(UserError, match=r"MeanConfig': its cost is unknown: .* while"):
        cost.macs_per_image(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrong": "build"}, "MeanConfig': runs the code .* raised KeyError: 'width'"),
        ({"wrong": "nothing"}, "`build` returned None: return a Flax module"),
        ({"name": "NoBuild"}, r"NoBuildConfig lacks build\(self, num_classes, image"),
        ({"wrong": "raises"}, "MeanConfig': runs the code .* raised TypeError"),
        ({"wrong": "state"}, "has cache: .* collection 'batch_stats'"),
        ({"wrong": "tuple"}, r"returned \(.*: return a dict with 'logits'"),
        ({"wrong": "shape"}, r"'pre_logits' of shape \(2, 8, 12, 3\) .*\(2, width\)"),
        ({"wrong": "dtype"}, "'logits' of shape .* bfloat16 .* and float32"),
        ({"wrong": "num_classes"}, r"'logits' of shape \(2, 3\) .* make it \(2, 5\)"),
        ({"wrong": "empty", "num_classes": 3}, "has no parameters"),
        ({"wrong": "name"}, "has no Dense layer named 'head'"),
        ({"name": "Taken"}, "has a key 'num_classes', which is an argument"),
        (
            {"image_size": (9, 12)},
            "height 9 is not a multiple of the patch size 4 .* as 8",
        ),
        ({"wrnog": "x"}, "unknown config key model.wrnog; .* is model.wrong"),
    ],
)
def test_what_is_no_network_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        create(**options)


SMALL = {"width": 12, "depth": 2, "num_heads": 2}
SWIN = {"patch_size": 2, "width": 8, "stage_depths": (1, 1), "num_heads": (2, 4)}
KINDS = {
    "Ti/8": SMALL | {"mlp_dim": 20},
    "Axial-B/8": SMALL | {"mlp_dim": 20},
    "Swin-T": SWIN | {"window_size": 4},
    "SwinV2-T": SWIN | {"window_size": 4},
    "R50x1": {"stage_depths": (1, 1), "stem_width": 32},
    "Mixer-S/8": {"width": 12, "depth": 2, "tokens_mlp_dim": 4, "channels_mlp_dim": 8},
}


def products(jaxpr):
    """Yields the dtypes of the operands of each matrix product and convolution."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield [str(x.aval.dtype) for x in equation.invars]
        for inner in core.jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    slow_but(
        [(name, "bfloat16") for name in ("Ti/8", "Swin-T", "R50x1")],
        itertools.product(KINDS, ("float32", "bfloat16")),
    ),
)
def test_the_dtype_of_the_computation_is_that_of_the_network(variant, dtype):
    model = models.create(
        variant, num_classes=3, image_size=(16, 24), dtype=dtype, **KINDS[variant]
    )
    found = []
    for of_params, of_images in itertools.product(("float32", "bfloat16"), repeat=2):
        shape = jax.ShapeDtypeStruct
        params = jax.tree.map(lambda x: shape(x.shape, of_params), model.shapes)  # noqa: B023
        images = shape((2, 16, 24, 3), of_images)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            jaxpr = jax.make_jaxpr(model.apply)(params, images)
        found.append(list(products(jaxpr.jaxpr)))
        fewer = {"params": of_params, "images": of_images}
        fewer = {k for k, v in fewer.items() if (v, dtype) == ("bfloat16", "float32")}
        text = "computes in float32.*dtype='bfloat16'"
        assert {str(w.message).split()[0] for w in warned} == fewer
        assert all(re.search(text, str(w.message)) for w in warned)
    assert found[0] == found[1] == found[2] == found[3]
    assert [dtype, dtype] in found[0]


def test_parameters_for_one_size_of_image_are_told():
    model = create()
    model.check_sizes(model.at_size((16, 12)))
    model = create(wrong="sized")
    model.check_sizes(model)
    with pytest.raises(UserError, match="MeanConfig' cannot be resized"):
        model.check_sizes(model.at_size((16, 12)))


def test_what_looks_inside_names_the_network():
    model = create()
    params = model.init(jax.random.key(0))
    with pytest.raises(UserError, match="a Mean has no attention:"):
        intermediates.layers(model, params, jnp.ones((1, 8, 12, 3)))


def test_a_network_of_the_project_is_found_by_the_form_of_its_variants(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(variants.CONFIGS, r"Mean-\w+", MeanConfig)
    model = models.create("Mean-S", num_classes=5, image_size=(8, 12))
    assert isinstance(model.module, Mean)
    assert models.create("Ti/4", num_classes=5, image_size=(8, 12)).config.has_encoder
    with pytest.raises(UserError, match="'Mean' is not SIZE/PATCH"):
        models.create("Mean", num_classes=5)
    # Our own files hold it; formats of others do not.
    params = jax.device_get(model.init(jax.random.key(0)))
    pretrained = Pretrained(params, model.options, "workdir", "here")
    export.export(pretrained, "safetensors", tmp_path / "mean.safetensors")
    found = weights.open_pretrained(tmp_path / "mean.safetensors")
    assert models.create(**found.options) == model
    with pytest.raises(UserError, match="--to=timm: the format does not support"):
        export.export(pretrained, "timm", tmp_path / "timm")

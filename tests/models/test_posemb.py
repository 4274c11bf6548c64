"""Position embeddings become those of another image size as each library makes them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params
from safetensors.numpy import load_file

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models.positions.learned import resize_positions

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TINY = {"num_classes": 3, "width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 20}


def build(image_size=(12, 20), **options):
    return models.create("B/4", image_size=image_size, **TINY, **options)


def sides(size):
    return tuple(int(pixels) // 4 for pixels in size.split("x"))


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("size", ["16x16", "20x20", "48x32", "12x28", "40x40"])
def test_dino_resizes_by_a_factor_and_mae_to_a_size(size, array):
    case = np.load(GOLDEN / "dino_forward.npz")
    weights = load_file(GOLDEN / "dino_student.safetensors")
    given = array(weights["backbone.pos_embed"])
    by_factor, to_size = (
        resize_positions(given, (8, 8), sides(size), num_prefix_tokens=1, method=method)
        for method in ("bicubic_dino", "bicubic_plain")
    )
    np.testing.assert_allclose(by_factor, case[f"{size}/posemb"], atol=1e-5)
    expected = case[f"{size}/posemb_by_size"]
    np.testing.assert_allclose(to_size[:, 1:], expected, atol=1e-5)
    assert np.abs(by_factor[:, 1:] - expected).max() > 0.2


@pytest.mark.parametrize(("registers", "method"), [(0, "bicubic_dino"), (4, "bicubic")])
@pytest.mark.parametrize("size", ["48x48", "24x24", "40x28"])
def test_dinov2_resizes_with_registers_in_another_way(size, registers, method):
    case = np.load(GOLDEN / "dinov2.io.npz")
    resized = resize_positions(
        case[f"posemb{registers}/32x32"],
        (8, 8),
        sides(size),
        num_prefix_tokens=1,
        method=method,
    )
    np.testing.assert_allclose(resized, case[f"posemb{registers}/{size}"], atol=1e-5)


@pytest.mark.parametrize("side", [3, 6])
def test_mae_resizes_its_fixed_positions(side):
    case = np.load(GOLDEN / "mae.io.npz")
    resized = resize_positions(
        case["sincos/32_4x4"][None],
        (4, 4),
        (side, side),
        num_prefix_tokens=1,
        method="bicubic_plain",
    )
    expected = case[f"resized/pos_embed_{side}x{side}"]
    np.testing.assert_allclose(resized, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"posemb_placement": "every", "posemb_resize": "bicubic", "scan": True},
            marks=pytest.mark.slow,
        ),
        {"posemb": "learned2d", "pool": "gap", "posemb_placement": "shared"},
        pytest.param(
            {"distillation": True, "num_register_tokens": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_one_set_of_parameters_serves_two_sizes(options):
    large = build(**options)
    small = large.at_size((8, 12))
    params, images = draw_params(large), jnp.ones((2, 8, 12, 3))

    @jax.jit
    def compute(params, on_host):
        logits = lambda params: small.apply(small.resize(params, large), images)[
            "logits"
        ]
        slopes = jax.grad(lambda params: logits(params)[:, 0].sum())(params)
        return logits(params), small.apply(on_host, images)["logits"], slopes

    # The host's resize, which weights are fitted with, is the same.
    on_host = small.resize(jax.device_get(params), large)
    found, expected, slopes = compute(params, on_host)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert jax.tree.structure(slopes) == jax.tree.structure(params)
    for name, table in slopes["Transformer"].items():
        if name.startswith("posembed"):
            assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(table))
    same = jax.tree.map(
        lambda a, b: a is b, params["head"], small.resize(params, large)["head"]
    )
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("kind", ["sincos2d", "none"])
def test_positions_without_parameters_need_no_resize(kind):
    large = build(posemb=kind)
    params = draw_params(large)
    resized = large.at_size((8, 12)).resize(params, large)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, params, resized)))


def test_a_resnet_has_no_positions():
    model = models.create("R50x1", num_classes=2, stage_depths=(1,), stem_width=32)
    assert model.at_size((64, 32)).resize({"a": np.ones(1)}, model) == {"a": np.ones(1)}


def test_relative_positions_are_refused():
    large = build(posemb="relative", posemb_placement="every")
    with pytest.raises(UserError, match="'relative' cannot be resized"):
        large.at_size((8, 12)).resize({}, large)


def test_a_method_of_no_name_is_refused():
    with pytest.raises(
        UserError, match="posemb_resize='cubic' is not one of linear, b"
    ):
        build(posemb_resize="cubic")

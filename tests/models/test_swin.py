"""Swin Transformers against Microsoft's code, timm and transformers, and as any network."""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import draw_params, tiny_config
from jax.sharding import PartitionSpec
from trees import specs

from vit_jax import models, weights
from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.models import cost, swin
from vit_jax.models.positions.relative_bias import resize_bias_table
from vit_jax.training import config as configuration
from vit_jax.training import loop
from vit_jax.weights import export

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = dict(np.load(GOLDEN / "swin.io.npz"))
SIZES = sorted({name.split("/")[0] for name in CASES if name.endswith("/image")})
FEW = ["16x16", "30x44"]  # One that the windows divide, and one that they do not.
OTHERS = [size for size in SIZES if size not in FEW]
LIBRARIES = {"timm": "timm", "microsoft": "microsoft", "transformers": "hf"}
TINY = {
    "patch_size": 2,
    "width": 8,
    "stage_depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
}


@pytest.fixture(scope="module")
def originals():
    """The published cases by version: options and parameters."""
    found = {
        v: weights.open_pretrained(GOLDEN / f"swin_{v}.safetensors")
        for v in ("v1", "v2")
    }
    return {version: (f.options, f.params) for version, f in found.items()}


_APPLY = {}  # Compiled, by the options: cases differ in parameters too.


def apply_of(model):
    return _APPLY.setdefault(repr(model.options), jax.jit(model.apply))


@pytest.mark.parametrize("sizes", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("case", "more", "limit"),
    [
        ("swin_v1", {}, 1e-5),
        ("swin_v2", {}, 1e-5),
        pytest.param(
            "swin_v2_pretrained_window",
            {"pretrained_window_sizes": (8, 4)},
            1e-5,
            marks=pytest.mark.slow,
        ),
        ("swin_v2_clamped_scale", {}, 1e-4),
    ],
)
def test_logits_are_each_librarys(originals, sizes, case, more, limit):
    options, params = originals[case[5:7]]
    params = flatten_dict(params, sep="/")
    for name, scale in CASES.items():
        if name.startswith(f"{case}/") and name.endswith("logit_scale"):
            _, stage, _, block, *_ = name.split("/")[1].split(".")
            params[f"stage_{stage}/block_{block}/attn/logit_scale"] = scale.reshape(-1)
    params = {tuple(name.split("/")): value for name, value in params.items()}
    compared = 0
    for library, size in itertools.product(LIBRARIES, sizes):
        wanted = CASES.get(f"{case}/{size}/{LIBRARIES[library]}_logits")
        if wanted is None:  # Microsoft's code refuses grids that windows do not divide.
            assert library == "microsoft"
            continue
        changed = more | {"window_padding": library}
        changed["image_size"] = tuple(map(int, size.split("x")))
        model = models.create(**options | changed)
        images = CASES[f"{size}/image"]
        logits = apply_of(model)(unflatten_dict(params), images)["logits"]
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=limit)
        compared += 1
    assert compared == (5 if sizes == FEW else 13)


def test_the_mask_of_the_shift_is_microsofts():
    config = swin.SwinConfig(**TINY)
    _, shifted = config.layout((16, 16))[0]
    np.testing.assert_array_equal(shifted.mask(), CASES["mask"])
    assert config.layout((16, 16))[0][0].mask() is None


@pytest.mark.parametrize("padding", swin.WINDOW_PADDINGS)
@pytest.mark.parametrize("grid", [(8, 8), (9, 6), (12, 4), (3, 7)])
def test_windows_are_undone(padding, grid):
    config = swin.SwinConfig(**TINY, window_padding=padding)
    x = jnp.arange(grid[0] * grid[1], dtype=jnp.float32).reshape(1, -1, 1)
    for windows in config.layout(grid)[0]:
        split = windows.split(x)
        assert split.shape[2] == windows.size[0] * windows.size[1]
        np.testing.assert_array_equal(windows.join(split), x)


@pytest.mark.parametrize(
    ("method", "library", "sizes"),
    [
        ("bicubic", "microsoft", ((6, 6), (2, 2))),
        ("geometric", "timm", ((6, 6), (2, 2), (3, 5))),
    ],
)
def test_bias_tables_are_resized_as_each_library_does(method, library, sizes):
    table = CASES["resize/table_4x4"]
    for size in sizes:
        found = resize_bias_table(table, (4, 4), size, method)
        wanted = CASES[f"resize/{library}_{size[0]}x{size[1]}"]
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        traced = resize_bias_table(jnp.asarray(table), (4, 4), size, method)
        np.testing.assert_allclose(traced, wanted, atol=1e-5)


# Parameters and multiply-accumulates (10^9) of Microsoft's model hub.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "millions", "billions"),
    [
        ("Swin-T", 224, 28, 4.5),
        ("Swin-B/w12", 384, 88, 47.1),
        ("SwinV2-B/w16", 256, 88, 21.8),
    ],
)
def test_published_sizes_cost_what_is_published(name, side, millions, billions):
    model = models.create(name, num_classes=1_000, image_size=(side, side))
    assert cost.parameters(model) == pytest.approx(millions * 1e6, rel=0.02)
    assert cost.macs_per_image(model) == pytest.approx(billions * 1e9, rel=0.02)


def test_every_published_name_is_a_network():
    for name in swin.SwinConfig.names:
        config = swin.SwinConfig(variant=name)
        assert config.v2 == name.startswith("SwinV2")
        assert config.window == int(name.partition("/w")[2] or 7)


def test_v2_begins_with_branches_that_add_nothing():
    one = TINY | {"stage_depths": (1,), "num_heads": (2,)}
    model = models.create("SwinV2-T/w4", num_classes=0, image_size=(16, 16), **one)
    params, apply = jax.jit(model.init)(jax.random.key(0)), jax.jit(model.apply)
    images = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    block = params["stage_0"]["block_0"]
    for name in ("norm1", "norm2"):
        assert not np.any(block[name]["scale"])
    np.testing.assert_allclose(np.exp(block["attn"]["logit_scale"]), 10, rtol=1e-6)
    other = jax.tree.map(lambda x: x, params)
    other["stage_0"]["block_0"]["mlp"]["Dense_0"]["kernel"] *= 3
    np.testing.assert_array_equal(
        apply(params, images)["pre_logits"], apply(other, images)["pre_logits"]
    )


@pytest.mark.slow
def test_stochastic_depth_skips_the_branches_of_whole_images():
    model = models.create(
        "Swin-T", num_classes=0, image_size=(16, 16), drop_path_rate=0.9, **TINY
    )
    params, images = draw_params(model), np.ones((64, 16, 16, 3), np.float32)
    apply = jax.jit(functools.partial(model.apply, train=True))
    found = jax.device_get(apply(params, images, key=jax.random.key(1)))
    assert len(np.unique(np.round(found["pre_logits"], 4), axis=0)) > 8
    still = jax.device_get(jax.jit(model.apply)(params, images)["pre_logits"])
    assert len(np.unique(np.round(still, 4), axis=0)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "Swin-X"}, "'Swin-X' is not Swin-SIZE or SwinV2-SIZE"),
        ({"variant": "Swin-T/w0"}, "'Swin-T/w0' is not Swin-SIZE"),
        ({"image_size": (18, 15)}, "width 15 is not a multiple of the patch size 2"),
        ({"stage_depths": (2, 2, 2)}, r"stage_depths=\(2, 2, 2\) and model.num_heads="),
        ({"stage_depths": (2, 0)}, "at least 1 in both for each stage"),
        (
            {"num_heads": (2, 3)},
            "the 16 features of stage 2 are not a multiple of 3 heads",
        ),
        (
            {"pretrained_window_sizes": (4, 4, 4)},
            "one size for each of the 2 stages",
        ),
        ({"window_padding": "same"}, "model.window_padding='same' is not one of timm"),
    ],
)
def test_what_is_no_swin_is_refused(changes, message):
    stated = {"variant": "Swin-T", "num_classes": 3, "image_size": (16, 16), **TINY}
    with pytest.raises(UserError, match=message):
        models.create(**stated | changes)


@pytest.mark.slow
def test_a_run_is_a_model_for_another_size_and_window(tmp_path):
    config = fields.to_dict(tiny_config(total_steps=1, data={"image_size": (16, 16)}))
    model = {"variant": "Swin-T", **TINY, "stage_depths": (1, 2)}
    config = configuration.complete(config | {"model": model})
    report = loop.train(config, tmp_path / "run")
    assert 0 <= report["final"]["val"]["params"]["top1"] <= 1
    found = weights.open_pretrained(tmp_path / "run")
    out = tmp_path / "swin.pth"
    export.export(found, "microsoft", out)
    again = weights.open_pretrained(out)
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)
    larger = {"image_size": (24, 24), "window_size": 6, "num_classes": 3}
    loaded = weights.load(out, models.create(**model | larger), head="new")
    table = loaded.params["stage_1"]["block_1"]["attn"]["bias_table"]
    assert table.shape == (11 * 11, 4)


def test_positions_for_another_size_of_image_follow_the_windows():
    model = models.create("Swin-T", num_classes=3, image_size=(16, 16), **TINY)
    params = draw_params(model)
    # The first stage has windows of 4 at both sizes, the second of 4 and of 2.
    small = model.at_size((8, 8)).resize(params, model)
    first, second = (
        small[f"stage_{i}"]["block_1"]["attn"]["bias_table"] for i in (0, 1)
    )
    assert first.shape == (49, 2)
    assert second.shape == (9, 4)
    found = jax.jit(model.at_size((8, 8)).apply)(small, jnp.ones((1, 8, 8, 3)))
    assert np.all(np.isfinite(found["logits"]))
    same = model.at_size((32, 24)).resize(params, model)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    second = models.create("SwinV2-T/w4", num_classes=3, image_size=(16, 16), **TINY)
    params = draw_params(second)
    jax.tree.map(
        np.testing.assert_array_equal,
        second.at_size((8, 8)).resize(params, second),
        params,
    )


def test_hidden_units_are_split_over_the_axis_model():
    model = models.create("Swin-T", num_classes=4, image_size=(16, 16), **TINY)
    found = specs(model)
    assert found["stage_1/block_0/mlp/Dense_0/kernel"] == PartitionSpec(None, "model")
    assert found["stage_1/block_0/mlp/Dense_1/kernel"] == PartitionSpec("model", None)

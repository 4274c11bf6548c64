import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from trees import assert_same, encoder, random_flat

from vit_jax.errors import UserError
from vit_jax.models import flexivit, resizing
from vit_jax.models.positions.learned import resize_positions
from vit_jax.weights import rewriting, surgery
from vit_jax.weights.surgery import FitRow

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
POSITIONS = "Transformer/posembed_input/pos_embedding"


def fit(given, model, source=None, **options):
    """Fits flat parameters to a model that draws its own from another seed."""
    return surgery.fit(
        unflatten_dict(given, sep="/"),
        model,
        source or encoder(),
        init=lambda: unflatten_dict(random_flat(model, seed=9), sep="/"),
        **options,
    )


def test_what_fits_is_loaded_as_it_is():
    flat = random_flat(encoder())
    fitted, rows = fit(flat, encoder())
    assert_same(fitted, flat)
    assert rows == [FitRow(f"{len(flat)} parameters", "loaded")]


def test_replaced_head_is_zero_but_for_its_bias_and_takes_pre_logits_with_it():
    flat = random_flat(encoder(representation_layer=True))
    model = encoder(num_classes=4, image_size=(16, 20))
    fitted, rows = fit(flat, model, head="new", head_bias_init=-10.0)
    np.testing.assert_array_equal(fitted["head"]["kernel"], np.zeros((12, 4)))
    np.testing.assert_array_equal(fitted["head"]["bias"], np.full(4, -10))
    assert "pre_logits" not in fitted
    assert rows == [
        FitRow(f"{len(flat) - 5} parameters", "loaded"),
        FitRow("head", "replaced by a linear layer of zeros", (12, 7), (12, 4)),
        FitRow("pre_logits", "dropped with the head", (12, 12)),
        FitRow(
            "position embeddings",
            "resized from (3, 3) to (4, 5)",
            (1, 10, 12),
            (1, 21, 12),
        ),
    ]


def test_replaced_head_begins_as_the_network_says():
    flat = random_flat(encoder(distillation=True))
    model = encoder(num_classes=4, init="timm", distillation=True)
    fitted, rows = fit(flat, model, head="new", head_bias_init=-10.0)
    fresh = random_flat(model, seed=9)
    for name, row in zip(("head", "head_dist"), rows[1:], strict=False):
        kernel = fresh[f"{name}/kernel"]
        np.testing.assert_array_equal(fitted[name]["kernel"], kernel)
        np.testing.assert_array_equal(fitted[name]["bias"], np.full(4, -10))
        assert row == FitRow(name, "replaced by a new one", (12, 7), (12, 4))
    kept, _ = fit(flat, encoder(init="timm", distillation=True))
    assert_same(kept, flat)


def test_replaced_head_with_a_representation_layer_draws_that_anew():
    model = encoder(representation_layer=True)
    flat = random_flat(encoder())
    fitted, rows = fit(flat, model, head="new")
    # Zeros there as well would never learn.
    fresh = random_flat(model, seed=9)
    np.testing.assert_array_equal(
        fitted["pre_logits"]["kernel"], fresh["pre_logits/kernel"]
    )
    assert FitRow("pre_logits/bias", "new: as initialised", None, (12,)) in rows


def test_both_heads_of_a_distilled_model_are_replaced():
    flat = random_flat(encoder(distillation=True))
    fitted, rows = fit(flat, encoder(distillation=True, num_classes=3), head="new")
    for name in ("head", "head_dist"):
        np.testing.assert_array_equal(fitted[name]["kernel"], np.zeros((12, 3)))
    assert [row.what for row in rows[1:]] == ["head", "head_dist"]


@pytest.mark.parametrize("representation", [False, True])
def test_dropped_head_leaves_the_features(representation):
    flat = random_flat(encoder(representation_layer=True))
    model = encoder(num_classes=0, representation_layer=representation)
    fitted, rows = fit(flat, model, head="drop")
    assert_same(fitted, {k: flat[k] for k in random_flat(model)})
    names = ["head"] if representation else ["head", "pre_logits"]
    assert [row.what for row in rows[1:]] == names


def test_head_is_dropped_only_for_a_model_without_one():
    with pytest.raises(UserError, match="without classes, but this one has 7"):
        fit(random_flat(encoder()), encoder(), head="drop")


def test_unknown_choices_are_refused():
    flat = random_flat(encoder())
    with pytest.raises(UserError, match="head='replace' is not one of keep, new, drop"):
        fit(flat, encoder(), head="replace")
    with pytest.raises(UserError, match="posemb_resize='nearest' is not one of"):
        fit(flat, encoder(), posemb_resize="nearest")


def test_positions_of_every_layer_are_resized_by_the_method_asked_for():
    source = encoder(posemb_placement="every", image_size=(12, 20))
    flat = random_flat(source)
    model = encoder(posemb_placement="every", image_size=(8, 24))
    fitted, rows = fit(flat, model, source, posemb_resize="bicubic")
    for i in range(2):
        name = f"Transformer/posembed_{i}/pos_embedding"
        expected = resize_positions(
            flat[name], (3, 5), (2, 6), num_prefix_tokens=1, method="bicubic"
        )
        found = fitted["Transformer"][f"posembed_{i}"]["pos_embedding"]
        np.testing.assert_array_equal(found, expected)
        action = "resized from (3, 5) to (2, 6), bicubic"
        assert FitRow(name, action, (1, 16, 12), (1, 13, 12)) in rows


def test_grids_of_as_many_cells_are_still_resized():
    source = encoder(image_size=(8, 24))
    flat = random_flat(source)
    fitted, _ = fit(flat, encoder(image_size=(12, 16)), source)
    found = fitted["Transformer"]["posembed_input"]["pos_embedding"]
    expected = resize_positions(flat[POSITIONS], (2, 6), (3, 4), num_prefix_tokens=1)
    np.testing.assert_array_equal(found, expected)


def test_tables_of_rows_and_columns_are_resized():
    source = encoder(posemb="learned2d", image_size=(12, 20))
    flat, model = random_flat(source), encoder(posemb="learned2d", image_size=(16, 20))
    fitted, rows = fit(flat, model, source)
    name = "Transformer/posembed_input/row_embedding"
    assert rows[1:] == [FitRow(name, "resized from (3, 5) to (4, 5)", (3, 6), (4, 6))]
    found = fitted["Transformer"]["posembed_input"]["row_embedding"]
    np.testing.assert_array_equal(found, resizing.resize_table(flat[name], 4))


@pytest.mark.parametrize(
    ("old", "new", "rows_of", "allow"),
    [
        ({"pool": "token"}, {"pool": "gap"}, [], ["^cls$"]),
        ({"pool": "gap"}, {"pool": "token"}, ["zero"], ["^cls$"]),
        ({"distillation": True}, {}, ["cls"], ["dist"]),
        ({}, {"distillation": True}, ["cls", "zero"], ["dist"]),
    ],
    ids=["cls dropped", "cls added", "dist dropped", "dist added"],
)
def test_rows_of_extra_tokens_follow_the_tokens(old, new, rows_of, allow):
    flat, model = random_flat(encoder(**old)), encoder(**new)
    fitted, rows = fit(flat, model, allow_mismatch=allow)
    found = fitted["Transformer"]["posembed_input"]["pos_embedding"]
    given = flat[POSITIONS]
    known = {"zero": np.zeros((1, 12), np.float32), "cls": given[0, :1]}
    expected = np.concatenate([*(known[name] for name in rows_of), given[0, -9:]])
    np.testing.assert_array_equal(found[0], expected)
    assert any(
        r.what == "position embeddings" and "replaced by rows of" in r[1] for r in rows
    )
    for name in ("cls", "dist"):  # New ones stay as the model draws them.
        if name in fitted and name not in flat:
            np.testing.assert_array_equal(fitted[name], random_flat(model, 9)[name])


def test_patches_and_channels_change_together():
    flat = random_flat(encoder("Ti/4", image_size=(12, 12)))
    model = encoder("Ti/7", image_size=(21, 21), channels=1)
    fitted, rows = fit(flat, model)
    expected = flexivit.resize_patch_kernel(
        surgery.convert_input_channels(flat["embedding/kernel"], 1), 7
    )
    np.testing.assert_array_equal(fitted["embedding"]["kernel"], expected)
    name = "embedding/kernel"
    assert rows[1:] == [
        FitRow(
            name,
            "input channels changed from 3 to 1 (repeat)",
            (4, 4, 3, 12),
            (4, 4, 1, 12),
        ),
        FitRow(
            name,
            "patches resized from 4 to 7 (FlexiViT, bilinear_plain)",
            (4, 4, 1, 12),
            (7, 7, 1, 12),
        ),
    ]


def test_doubles_are_rounded_and_said_to_be():
    flat = random_flat(encoder())
    doubles = flat | {"cls": flat["cls"].astype(np.float64) + 1e-12}
    fitted, rows = fit(doubles, encoder())
    assert_same(fitted, flat)
    assert rows[1] == FitRow("1 parameters", "rounded to the model's precision")


def test_missing_and_left_over_parameters_may_be_allowed_by_name():
    flat = random_flat(encoder(pool="gap"))
    model = encoder(pool="map")
    flat |= {"extra/kernel": np.ones((2, 3), np.float32)}
    fitted, rows = fit(flat, model, allow_mismatch=["^MAPHead_0/", "extra"])
    fresh = random_flat(model, seed=9)
    np.testing.assert_array_equal(
        fitted["MAPHead_0"]["probe"], fresh["MAPHead_0/probe"]
    )
    assert FitRow("extra/kernel", "left over: not used", (2, 3)) in rows
    assert (
        FitRow("MAPHead_0/probe", "missing: as initialised", None, (1, 1, 12)) in rows
    )
    missing = sum(name.startswith("MAPHead_0/") for name in fresh)
    assert len(rows) == 1 + missing + 1


MISFITS = [
    (
        {"head/kernel": np.ones((12, 5))},
        r"does not fit .*: head/kernel is \(12, 5\) in the checkpoint but \(12, 7\)",
    ),
    (
        {"embedding/kernel": np.ones((4, 2, 3, 12))},
        r"embedding/kernel is \(4, 2, 3, 12\) in the checkpoint but \(4, 4, 3, 12\)",
    ),
    ({POSITIONS: np.ones(())}, r"pos_embedding is \(\) in .* but \(1, 10, 12\)"),
    ({"probe": np.ones(3)}, "probe is left over; to allow some, list them in con"),
    ({"head/bias": None, "head/kernel": None}, "head/kernel is missing; to allow some"),
    ({"head/bias": None}, "head/bias is missing; .*config.init.allow_mismatch$"),
    (
        {"Transformer/encoderblock_0/LayerNorm_0/scale": None},
        "_0/scale is missing; .*config.init.allow_mismatch$",
    ),
    ({"head/bias": None}, "'bia\\$' matches no .* \\(head/bias\\)", "bia$"),
    ({}, r"'head' matches no .* \(none\): remove it", "head"),
    ({}, r"'\(head' is not a regular expression: missing \)", "(head"),
]


@pytest.mark.parametrize("row", MISFITS, ids=lambda row: row[1])
def test_what_does_not_fit_is_named(row):
    changes, message, *allow = row
    flat = random_flat(encoder()) | changes
    flat = {name: value for name, value in flat.items() if value is not None}
    with pytest.raises(UserError, match=message):
        fit(flat, encoder(), allow_mismatch=allow)


def test_long_lists_are_cut():
    with pytest.raises(UserError, match="; and 37 more; to allow some"):
        fit({"a": np.ones(3)}, encoder(), allow_mismatch=())


# Resizes.


@pytest.mark.parametrize("side", [24, 7])
def test_position_embeddings_resize_as_in_the_original_code(side):
    case = np.load(GOLDEN / "google_posemb_interp.npz")
    resized = resize_positions(
        case["posemb_14"], (14, 14), (side, side), num_prefix_tokens=1
    )
    np.testing.assert_allclose(resized, case[f"posemb_{side}"], atol=1e-6)
    assert resized.dtype == np.float32


@pytest.mark.parametrize("grid", [(3, 4), (9, 11), (8, 2), (14, 3)])
def test_bicubic_resize_is_that_of_pytorch(grid):
    case = np.load(GOLDEN / "torch_bicubic.npz")
    resized = resize_positions(
        case["posemb_5x7"], (5, 7), grid, num_prefix_tokens=2, method="bicubic"
    )
    expected = case[f"posemb_{grid[0]}x{grid[1]}"]
    np.testing.assert_allclose(resized, expected, atol=1e-5)


def test_resize_is_exact_on_a_plane_over_a_non_square_grid():
    def plane(rows, columns):
        y, x = np.meshgrid(
            np.linspace(0, 1, rows), np.linspace(0, 1, columns), indexing="ij"
        )
        return np.stack([y, x, 2 * y - 3 * x], axis=-1).reshape(1, -1, 3)

    resized = resize_positions(plane(3, 5), (3, 5), (7, 4), num_prefix_tokens=0)
    np.testing.assert_allclose(resized, plane(7, 4), atol=1e-12)


@pytest.mark.parametrize("method", resizing.RESIZE_METHODS)
def test_resize_to_the_same_grid_changes_nothing(method):
    embedding = np.random.default_rng(0).normal(size=(1, 2 + 15, 6))
    same = resize_positions(
        embedding, (3, 5), (3, 5), num_prefix_tokens=2, method=method
    )
    np.testing.assert_allclose(same, embedding, atol=1e-12)


@pytest.mark.parametrize("method", resizing.RESIZE_METHODS)
def test_tables_of_rows_and_columns_resize_like_the_grid_of_their_sums(method):
    rng = np.random.default_rng(0)
    rows, columns = rng.normal(size=(3, 6)), rng.normal(size=(5, 6))
    whole = (rows[:, None] + columns).reshape(1, 15, 6)
    resized = resize_positions(
        whole, (3, 5), (7, 4), num_prefix_tokens=0, method=method
    )
    rows, columns = (
        resizing.resize_table(t, n, method=method, longer=7)
        for t, n in ((rows, 7), (columns, 4))
    )
    np.testing.assert_allclose(
        (rows[:, None] + columns).reshape(1, 28, 6), resized, atol=1e-12
    )


def test_rows_that_do_not_fit_the_grid_are_refused():
    with pytest.raises(UserError, match="has 10 rows, but 1 prefix tokens and a grid"):
        resize_positions(np.ones((1, 10, 2)), (4, 4), (2, 2), num_prefix_tokens=1)


def test_kernels_of_grey_and_rgb_images_agree_on_grey_ones():
    rng = np.random.default_rng(0)
    grey = rng.normal(size=(4, 4, 1)).astype(np.float32)
    rgb = np.repeat(grey, 3, axis=2)

    def embed(image, kernel):
        return np.einsum("yxc,yxcd->d", image, kernel)

    of_rgb = rng.normal(size=(4, 4, 3, 5)).astype(np.float32)
    of_grey = surgery.convert_input_channels(of_rgb, 1)
    assert of_grey.shape == (4, 4, 1, 5)
    np.testing.assert_allclose(embed(grey, of_grey), embed(rgb, of_rgb), atol=1e-5)
    back = surgery.convert_input_channels(of_grey, 3)
    assert back.dtype == np.float32
    np.testing.assert_allclose(embed(rgb, back), embed(grey, of_grey), atol=1e-5)
    four = surgery.convert_input_channels(of_rgb, 4)
    np.testing.assert_array_equal(four, of_rgb[:, :, [0, 1, 2, 0]] * np.float32(3 / 4))


# LayerScale.


def test_layer_scale_is_multiplied_in_for_a_model_without():
    scaled, plain = encoder(layer_scale_init=0.1), encoder()
    flat = random_flat(scaled)
    fitted, rows = fit(flat, plain)
    action = "multiplied into the layers before it"
    assert FitRow("LayerScale", action) in rows
    images = np.random.default_rng(0).normal(size=(2, *plain.image_shape))
    images = jnp.asarray(images, jnp.float32)
    expected = scaled.apply(unflatten_dict(flat, sep="/"), images)["logits"]
    np.testing.assert_allclose(
        plain.apply(fitted, images)["logits"], expected, rtol=1e-4, atol=1e-4
    )


def test_layer_scale_that_a_checkpoint_lacks_is_one():
    scaled, flat = encoder(layer_scale_init=0.1), random_flat(encoder())
    fitted, rows = fit(dict(flat), scaled)
    assert FitRow("LayerScale", "not in the checkpoint, set to ones") in rows
    block = fitted["Transformer"]["encoderblock_1"]
    for name in ("LayerScale_1", "LayerScale_3"):
        np.testing.assert_array_equal(block[name]["gamma"], np.ones(12))
        assert block[name]["gamma"].dtype == np.float32


def test_a_network_of_another_library_that_has_no_classifier_is_refused_with_one():
    options = encoder(num_classes=7).options
    rewriting.check_network(options, "Theirs", {"num_classes": (0, 7)})
    with pytest.raises(UserError, match="num_classes=7: Theirs"):
        rewriting.check_network(options, "Theirs", {"num_classes": (0,)})

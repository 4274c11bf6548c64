"""Swin Transformers as files of Microsoft, timm and transformers, read and written."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from trees import edit_config

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import export, pretrained, surgery
from vit_jax.weights.formats import torch_file
from vit_jax.weights.formats.registry import WRITERS

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
FILES = {version: GOLDEN / f"swin_{version}.safetensors" for version in ("v1", "v2")}
CASES = dict(np.load(GOLDEN / "swin.io.npz"))


def logits_of(found, images, **options):
    model = models.create(**found.options | options)
    return jax.jit(model.apply)(found.params, jnp.asarray(images))["logits"]


def assert_same_weights(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


def test_microsofts_file_says_size_and_windows():
    for version, variant in (("v1", "Swin-T"), ("v2", "SwinV2-T")):
        found = weights.open_pretrained(FILES[version])
        assert found.format == "microsoft"
        assert found.notes == ()
        told = found.options
        assert (told["variant"], told["window_size"]) == (variant, 4)
        assert (told["image_size"], told["patch_size"]) == ((32, 32), 2)
        assert (told["num_heads"], told["window_padding"]) == ((2, 4), "microsoft")
        assert found.preprocess.image_size == (32, 32)


def test_coordinates_say_the_windows_of_pretraining(tmp_path):
    flat = load_file(FILES["v2"])
    case = "swin_v2_pretrained_window/"
    grown = {k.removeprefix(case): v for k, v in CASES.items() if k.startswith(case)}
    grown = {k: v for k, v in grown.items() if k.endswith("coords_table")}
    assert len(grown) == 4
    save_file(flat | grown, tmp_path / "grown.safetensors")
    found = weights.open_pretrained(tmp_path / "grown.safetensors")
    assert found.options["pretrained_window_sizes"] == (8, 4)
    wanted = CASES[f"{case}32x32/microsoft_logits"]
    ours = logits_of(found, CASES["32x32/image"])
    np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_what_simmim_pretrained_is_the_network_without_its_decoder(tmp_path):
    flat = {
        f"encoder.{k}": v for k, v in load_file(FILES["v1"]).items() if "head" not in k
    }
    flat["encoder.mask_token"] = np.zeros((1, 1, 16), np.float32)
    flat["decoder.0.weight"] = np.zeros((48, 32, 1, 1), np.float32)
    torch_file.write(tmp_path / "simmim.pth", {"model": flat})
    found = weights.open_pretrained(tmp_path / "simmim.pth")
    assert found.options["num_classes"] == 0
    assert [note.split(":")[0] for note in found.notes] == ["decoder", "mask token"]
    whole = weights.open_pretrained(FILES["v1"])
    jax.tree.map(
        np.testing.assert_array_equal,
        found.params,
        {k: v for k, v in whole.params.items() if k != "head"},
    )


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("to", ["microsoft", "timm", "hf", "safetensors"])
def test_each_format_holds_the_weights(tmp_path, version, to):
    found = weights.open_pretrained(FILES[version])
    out = tmp_path / f"out{WRITERS[to].suffix}"
    _, notes = export.export(found, to, out)
    again = weights.open_pretrained(out)
    assert_same_weights(again, found)
    kept = ("variant", "width", "stage_depths", "num_heads", "num_classes", "mlp_ratio")
    assert {k: again.options[k] for k in kept} == {k: found.options[k] for k in kept}
    library = {"timm": "timm", "hf": "transformers"}.get(to, "microsoft")
    assert again.options["window_padding"] == library
    told = [
        note for note in notes if note.startswith("window_padding: microsoft replaced")
    ]
    assert len(told) == (library != "microsoft")
    if to != "microsoft":  # Whose file says neither.
        assert again.options["window_size"] == 4
        assert again.options["image_size"] == (32, 32)
        preprocess = pretrained.Preprocess((16, 48), (0.5,), (0.5,))
        model, params = surgery.fit_network(again, preprocess)
        logits = jax.eval_shape(model.apply, params, jnp.zeros((1, 16, 48, 3)))
        assert logits["logits"].shape == (1, found.options["num_classes"])


def test_windows_of_a_bare_file_of_timm_are_asked_for(tmp_path):
    export.export(weights.open_pretrained(FILES["v2"]), "timm", tmp_path / "timm")
    bare = tmp_path / "bare.safetensors"
    shutil.move(tmp_path / "timm" / "model.safetensors", bare)
    with pytest.raises(UserError, match="window sizes .*--architecture="):
        weights.open_pretrained(bare)
    name = "swinv2_tiny_window16_256"
    found = weights.open_pretrained(bare, architecture=name)
    assert found.options["window_size"] == 16
    assert found.options["image_size"] == (256, 256)


def test_windows_are_as_timms_name_or_arguments_say(tmp_path):
    export.export(weights.open_pretrained(FILES["v2"]), "timm", tmp_path / "timm")
    args = json.loads((tmp_path / "timm" / "config.json").read_text())["model_args"]
    del args["window_size"], args["pretrained_window_sizes"]
    name = "swinv2_tiny_window16_256.ms_in1k"
    edit_config(tmp_path / "timm", model_args=args, architecture=name)
    told = weights.open_pretrained(tmp_path / "timm").options
    assert (told["window_size"], told["pretrained_window_sizes"]) == (16, (0,))
    name = "swinv2_base_window12to24_192to384.ms_in1k"
    edit_config(tmp_path / "timm", architecture=name)
    with pytest.raises(UserError, match="one size for each of the 2 stages"):
        weights.open_pretrained(tmp_path / "timm")  # It is of four.


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("absolute_pos_embed", np.zeros((1, 256, 16), np.float32), "is not supported"),
        *(
            (f"layers.{name}", None, "is missing: give the whole file")
            for name in (
                "1.blocks.0.attn.relative_position_bias_table",
                "0.blocks.0.mlp.fc1.weight",
                "0.blocks.1.norm1.weight",
            )
        ),
    ],
)
def test_arrays_that_ours_have_not_are_refused(tmp_path, name, value, message):
    arrays = load_file(FILES["v1"]) | {name: value}
    arrays = {k: v for k, v in arrays.items() if v is not None}
    save_file(arrays, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=f"{name} {message}"):
        weights.open_pretrained(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        (
            "timm",
            {"architecture": "swin_s3_tiny_224"},
            "architecture of timm is not known",
        ),
        (
            *("timm", {"model_args": {"always_partition": True}}),
            "always_partition=True in model_args is not supported",
        ),
        (
            "hf",
            {"use_absolute_embeddings": True},
            "use_absolute_embeddings=True in config",
        ),
        ("hf", {"model_type": "donut-swin"}, "model_type='donut-swin' in config.json"),
        ("hf", None, "no config.json; one of swin or"),
    ],
)
def test_configs_that_ours_have_not_are_refused(tmp_path, to, changes, message):
    export.export(weights.open_pretrained(FILES["v1"]), to, tmp_path / "a")
    if changes is None:
        (tmp_path / "a" / "config.json").unlink()
    else:
        edit_config(tmp_path / "a", **changes)
    with pytest.raises(UserError, match=message):
        weights.open_pretrained(tmp_path / "a")


def test_what_a_library_cannot_state_is_not_written(tmp_path):
    found = weights.open_pretrained(FILES["v1"])
    found.options["layer_norm_eps"] = 1e-6
    for to, library in (("timm", "timm"), ("microsoft", "microsoft")):
        with pytest.raises(
            UserError, match=f"layer_norm_eps=1e-06: Swin .* of {library}"
        ):
            export.export(found, to, tmp_path / f"{to}.pth")
    with pytest.raises(UserError, match="patch_norm_eps=1e-06: Swin .* transformers"):
        export.export(found, "hf", tmp_path / "hf")
    found.options["patch_norm_eps"] = 1e-5
    export.export(found, "hf", tmp_path / "hf")
    again = weights.open_pretrained(tmp_path / "hf").options
    assert (again["layer_norm_eps"], again["patch_norm_eps"]) == (1e-6, 1e-5)

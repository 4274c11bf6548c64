"""NaFlexVit's files, in and out; test_timm_naflex_parity.py asks timm itself."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from trees import checkpoint, encoder

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.models.patches import PatchSequences
from vit_jax.weights import Preprocess, export

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
IO = np.load(GOLDEN / "naflex.io.npz")  # Of timm; tests/golden/README.md.
FILE = GOLDEN / "naflexvit_timm"


def apply(pretrained):
    sequences = PatchSequences(IO["pixels"], IO["grids"])
    model = models.create(**pretrained.options)
    return jax.jit(model.apply)(pretrained.params, sequences)["logits"]


def test_logits_are_the_golden_ones_at_five_aspect_ratios():
    found = weights.open_pretrained(FILE)
    assert found.options["image_size"] == (8, 8)
    assert found.preprocess.image_size == (384, 384)
    np.testing.assert_allclose(apply(found), IO["naflexvit_logits"], atol=1e-5)


def test_a_folder_is_written_back_to_the_bit(tmp_path):
    found = weights.open_pretrained(FILE)
    export.export(found, "timm_naflex", tmp_path / "a")
    first, again = (
        load_file(folder / "model.safetensors") for folder in (FILE, tmp_path / "a")
    )
    assert first.keys() == again.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    twice = weights.open_pretrained(tmp_path / "a")
    assert twice.preprocess == found.preprocess
    np.testing.assert_array_equal(apply(twice), apply(found))


def test_a_class_token_has_its_position_in_itself(tmp_path):
    given = checkpoint(encoder("Ti/2", image_size=(8, 8), posemb_resize="bilinear"))
    _, notes = export.export(given, "timm_naflex", tmp_path / "a")
    assert any("class token" in note for note in notes)
    found = weights.open_pretrained(tmp_path / "a")
    assert found.options["posemb_resize"] == "bilinear"
    np.testing.assert_allclose(apply(found), apply(given), atol=1e-5)


def edited(tmp_path, architecture=None, **args):
    folder = tmp_path / "a"
    shutil.copytree(FILE, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architecture"] = architecture or config["architecture"]
    config["model_args"] |= args
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BASE = "naflexvit_base_patch16"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            f"{BASE}_par_gap",
            {"pos_embed_align_corners": True},
            "pos_embed_ar_preserving=True",
        ),
        (f"{BASE}_map", {"global_pool": "map"}, "pool_include_prefix=False"),
        (None, {"global_pool": "avgmax"}, "global_pool='avgmax'"),
        (None, {"rope_type": "axial"}, "rope_type='axial'"),
        (None, {"pos_embed_use_grid_sample": True}, "pos_embed_use_grid_sample=True"),
        (None, {"pos_embed_interp_mode": "nearest"}, "interp_mode='nearest'"),
        (None, {"pos_embed_align_corners": True}, "align_corners=True"),
        (None, {"pos_embed": "rope"}, "pos_embed='rope'"),
        (None, {"input_norm_layer": "layernorm"}, "input_norm_layer='layernorm'"),
        (None, {"attn_pool_num_heads": 6}, "attn_pool_num_heads=6"),
        (None, {"patch_size": 5}, "patch_size=5"),
        (None, {"patch_size": [2, 4]}, r"patch_size=\[2, 4\]"),
        (None, {"act_layer": "relu"}, "act_layer='relu'"),
    ],
)
def test_networks_that_are_not_ours_are_refused_by_key_and_value(
    tmp_path, name, args, message
):
    with pytest.raises(UserError, match=message) as error:
        weights.open_pretrained(edited(tmp_path, name, **args))
    assert "\n" not in str(error.value)


def test_a_file_without_a_config_needs_the_name(tmp_path):
    shutil.copy(FILE / "model.safetensors", tmp_path)
    path = tmp_path / "model.safetensors"
    with pytest.raises(UserError, match=r"embeds\.proj\.weight.*--architecture="):
        weights.open_pretrained(path)
    with pytest.raises(UserError, match="patch_size=16"):
        weights.open_pretrained(path, architecture="naflexvit_base_patch16_gap")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rope", "axial"), ("posemb", "sincos2d"), ("posemb_resize", "bicubic_dino")),
        *(("layer_norm_eps", 1e-5), ("pool", "token_gap"), ("activation", "swiglu")),
    ],
)
def test_networks_that_are_not_written_are_refused(tmp_path, key, value):
    given = checkpoint(encoder(**{"posemb_resize": "bicubic", key: value}))
    with pytest.raises(UserError, match=f"{key}='?{value}.*NaFlexVit"):
        export.export(given, "timm_naflex", tmp_path / "a")


@pytest.mark.parametrize("to", ["timm", "timm_naflex"])
def test_the_most_patches_of_an_image_are_told_to_be_left_out(tmp_path, to):
    how = Preprocess((12, 12), squash=True, max_tokens=9)
    given = checkpoint(encoder(posemb_resize="bicubic"), preprocess=how)
    _, notes = export.export(given, to, tmp_path / "a")
    assert any("max_tokens=9" in note for note in notes)

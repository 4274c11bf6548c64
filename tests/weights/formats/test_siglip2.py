"""Siglip2's files, in and out; test_siglip2_parity.py asks transformers itself."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from trees import checkpoint, encoder

import vit_jax
from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.models.patches import PatchSequences
from vit_jax.weights import Preprocess, export
from vit_jax.weights.text_tower import text_tower

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
IO = np.load(GOLDEN / "naflex.io.npz")  # Of transformers; tests/golden/README.md.


def test_both_towers_are_the_golden_ones_at_five_aspect_ratios():
    found = weights.open_pretrained(GOLDEN / "siglip2_hf")
    model, tower = models.create(**found.options), text_tower(found)
    sequences = PatchSequences(IO["pixels"], IO["grids"])
    features = jax.jit(model.apply)(found.params, sequences)["pre_logits"]
    images, texts = tower.embed_images(features), tower.embed_tokens(IO["tokens"])
    np.testing.assert_allclose(images, IO["siglip2_image_embeds"], atol=1e-5)
    np.testing.assert_allclose(texts, IO["siglip2_text_embeds"], atol=1e-5)
    logits = tower.logits(images, texts)
    np.testing.assert_allclose(logits, IO["siglip2_logits"], atol=1e-5)


def test_a_folder_is_written_back_to_the_bit(tmp_path):
    found = weights.open_pretrained(GOLDEN / "siglip2_hf")
    export.export(found, "hf_siglip2", tmp_path / "a")
    first, again = (
        load_file(folder / "model.safetensors")
        for folder in (GOLDEN / "siglip2_hf", tmp_path / "a")
    )
    assert first.keys() == again.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    for file in ("config.json", "preprocessor_config.json"):
        theirs, ours = (
            json.loads((folder / file).read_text())
            for folder in (GOLDEN / "siglip2_hf", tmp_path / "a")
        )
        if file == "preprocessor_config.json":
            assert ours.items() >= theirs.items()
            continue
        for tower in ("vision_config", "text_config"):
            shared = theirs[tower].keys() & ours[tower].keys()
            assert {"model_type", "num_attention_heads"} <= shared
            assert all(theirs[tower][key] == ours[tower][key] for key in shared)
    twice = weights.open_pretrained(tmp_path / "a")
    assert (twice.options, twice.preprocess) == (found.options, found.preprocess)


def test_an_image_keeps_its_aspect_without_any_flag():
    model = vit_jax.load_model(GOLDEN / "siglip2_hf", tell=lambda line: None)
    assert model.preprocessing.max_tokens == 18
    features = model.features(np.zeros((20, 70, 3), np.uint8), tokens="patches")
    assert features[0].shape == (2, 7, 12)


def test_a_bare_file_is_read_with_its_usual_patches(tmp_path):
    options = {"num_heads": 12, "posemb_resize": "bilinear", "num_classes": 0}
    given = checkpoint(encoder("Ti/16", image_size=(48, 48), pool="map", **options))
    export.export(given, "hf_siglip2", tmp_path / "a")
    bare = shutil.copy(tmp_path / "a/model.safetensors", tmp_path)
    found = weights.open_pretrained(bare)
    flat, again = (flatten_dict(x.params, sep="/") for x in (given, found))
    for name, value in flat.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    assert found.options["image_size"] == (48, 48)
    assert found.preprocess.max_tokens == 256
    assert any("patch_size=16" in note for note in found.notes)


def test_what_siglip2_has_not_is_refused_and_what_changes_told(tmp_path):
    options = {"num_classes": 0, "pool": "map", "posemb_resize": "bilinear"}
    for key, value in (
        *(("posemb_resize", "bicubic"), ("posemb", "sincos2d"), ("pool", "token")),
        ("num_register_tokens", 2),
    ):
        given = checkpoint(encoder(**options | {key: value}))
        with pytest.raises(UserError, match=f"{key}='?{value}.*Siglip2"):
            export.export(given, "hf_siglip2", tmp_path / "a")
    fixed = Preprocess((12, 12), squash=True)
    given = checkpoint(encoder(**options), preprocess=fixed)
    _, notes = export.export(given, "hf_siglip2", tmp_path / "b")
    assert any("at most 9 patches" in note for note in notes)
    assert weights.open_pretrained(tmp_path / "b").preprocess.max_tokens == 9

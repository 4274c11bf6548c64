"""Files of MLP-Mixers, Google's of either time and timm's, in and out."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import export

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
FILE, OF_TIMM = GOLDEN / "mixer.npz", GOLDEN / "mixer_timm.safetensors"
CASES = dict(np.load(GOLDEN / "mixer.io.npz"))


def first_name(name):
    """Returns the name that an array had in the first files."""
    for new, old in (
        ("stem/", "embedding/"),
        ("pre_head_layer_norm/", "Mixer/encoder_norm/"),
        ("MixerBlock_", "Mixer/encoderblock_"),
        ("_mixing/Dense_0/kernel", "_mixing_phase_0/kernel1"),
        ("_mixing/Dense_0/bias", "_mixing_phase_0/bias1"),
        ("_mixing/Dense_1/kernel", "_mixing_phase_0/kernel2"),
        ("_mixing/Dense_1/bias", "_mixing_phase_0/bias2"),
    ):
        name = name.replace(new, old)
    return name


@pytest.fixture(scope="module")
def arrays():
    with np.load(FILE) as stored:
        return dict(stored)


def test_options_are_read_off_the_shapes():
    found = weights.open_pretrained(FILE)
    assert found.options == {
        "variant": "Mixer-B/8",
        "width": 24,
        "depth": 3,
        "tokens_mlp_dim": 20,
        "channels_mlp_dim": 40,
        "activation": "gelu_tanh",
        "num_classes": 10,
        "image_size": (32, 32),
        "channels": 3,
    }
    assert found.preprocess.mean == (0.5,) * 3
    assert found.preprocess.interpolation == "bilinear_plain"


def test_the_first_names_and_prefixes_are_read(arrays, tmp_path):
    wanted = weights.open_pretrained(FILE).params
    for number, rename in enumerate(
        (first_name, lambda n: f"opt/target/{n}", lambda n: f"params/{n}")
    ):
        np.savez(
            tmp_path / f"{number}.npz", **{rename(k): v for k, v in arrays.items()}
        )
        found = weights.open_pretrained(tmp_path / f"{number}.npz").params
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_the_file_is_written_as_it_was(arrays, tmp_path):
    export.export(weights.open_pretrained(FILE), "google", tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as again:
        assert set(again) == arrays.keys()
        for name, value in arrays.items():
            np.testing.assert_array_equal(again[name], value)


def test_another_activation_is_told(tmp_path):
    found = weights.open_pretrained(FILE)
    found.options["activation"] = "gelu"
    _, notes = export.export(found, "google", tmp_path / "again.npz")
    assert any(
        note.startswith("activation: gelu replaced by gelu_tanh") for note in notes
    )


def test_a_part_of_a_file_and_what_a_format_has_not_are_refused(arrays, tmp_path):
    del arrays["stem/kernel"]
    np.savez(tmp_path / "part.npz", **arrays)
    with pytest.raises(UserError, match=r"part.npz: embedding/kernel is missing: give"):
        weights.open_pretrained(tmp_path / "part.npz")
    part = load_file(OF_TIMM)
    del part["blocks.0.mlp_channels.fc1.weight"]
    save_file(part, tmp_path / "part.safetensors")
    with pytest.raises(UserError, match=r"mlp_channels.fc1.weight is missing: give th"):
        weights.open_pretrained(tmp_path / "part.safetensors")
    found = weights.open_pretrained(FILE)
    rows, columns = models.create(**found.options).grid
    sides = rows // 2 * 8, columns * 2 * 8
    rectangle = dataclasses.replace(
        found, options=found.options | {"image_size": sides}
    )
    with pytest.raises(
        UserError, match=f"a grid of {rows // 2}x{2 * columns}: a reader"
    ):
        export.export(rectangle, "google", tmp_path / "rectangle.npz")
    for to, message in (
        ("hf", "--to=hf: the format does not support "),
        ("timm", "no MLP-Mixer with patch 8, width=24 and depth=3"),
    ):
        with pytest.raises(UserError, match=message):
            export.export(found, to, tmp_path / to)


def test_logits_are_theirs_with_either_gelu():
    found = weights.open_pretrained(OF_TIMM)
    assert found.format == "timm"
    for activation, name in (("gelu", "erf"), ("gelu_tanh", "tanh")):
        model = models.create(**found.options | {"activation": activation})
        ours = jax.jit(model.apply)(found.params, CASES["image"])["logits"]
        np.testing.assert_allclose(ours, CASES[f"timm_logits_{name}"], atol=1e-5)


def test_weights_are_those_of_googles_file():
    found, google = map(weights.open_pretrained, (OF_TIMM, FILE))
    jax.tree.map(np.testing.assert_array_equal, found.params, google.params)
    assert found.options == google.options | {"activation": "gelu"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architecture": "gmixer_12_224"}, "architecture of timm is not known"),
        (
            {"model_args": {"stem_norm": True}},
            "stem_norm=True in model_args is not supp",
        ),
        (
            {"global_pool": ""},
            "global_pool='' of an MLP-Mixer is not supported, only 'av",
        ),
    ],
)
def test_mixers_of_timm_that_ours_are_not_are_refused(tmp_path, config, message):
    shutil.copy(OF_TIMM, tmp_path / "model.safetensors")
    text = json.dumps({"architecture": "mixer_b16_224"} | config)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        weights.open_pretrained(tmp_path)

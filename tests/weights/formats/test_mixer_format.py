"""Files of MLP-Mixers: the names of today, the first ones, and what is refused."""

import pathlib

import jax
import numpy as np
import pytest

from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.weights import export

FILE = pathlib.Path(__file__).parents[2] / "golden" / "mixer.npz"


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
    assert any(note.startswith("activation: gelu became gelu_tanh") for note in notes)


def test_a_part_of_a_file_and_other_formats_are_refused(arrays, tmp_path):
    del arrays["stem/kernel"]
    np.savez(tmp_path / "part.npz", **arrays)
    with pytest.raises(UserError, match=r"part.npz: embedding/kernel is missing: give"):
        weights.open_pretrained(tmp_path / "part.npz")
    found = weights.open_pretrained(FILE)
    with pytest.raises(UserError, match="--to=hf: the format has no network such as "):
        export.export(found, "hf", tmp_path / "hf")

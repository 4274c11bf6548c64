"""timm's MLP-Mixers: files read and written, against its stored logits and itself."""

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
FILE = GOLDEN / "mixer_timm.safetensors"
CASES = dict(np.load(GOLDEN / "mixer.io.npz"))


def folder_with(path, **config):
    path.mkdir()
    shutil.copy(FILE, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_logits_are_theirs_with_either_gelu():
    found = weights.open_pretrained(FILE)
    assert found.format == "timm"
    for activation, name in (("gelu", "erf"), ("gelu_tanh", "tanh")):
        model = models.create(**found.options | {"activation": activation})
        ours = jax.jit(model.apply)(found.params, CASES["image"])["logits"]
        np.testing.assert_allclose(ours, CASES[f"timm_logits_{name}"], atol=1e-5)


def test_weights_are_those_of_googles_file():
    found, google = map(weights.open_pretrained, (FILE, GOLDEN / "mixer.npz"))
    jax.tree.map(np.testing.assert_array_equal, found.params, google.params)
    assert found.options == google.options | {"activation": "gelu"}


def test_what_ours_have_not_is_refused(tmp_path):
    name = "mixer_b16_224"
    for number, (config, message) in enumerate(
        [
            ({"architecture": "gmixer_12_224"}, "not an architecture of timm that is"),
            (
                {"architecture": name, "model_args": {"stem_norm": True}},
                "stem_norm=True in model_args is not supported",
            ),
            (
                {"architecture": name, "global_pool": ""},
                "global_pool='' of an MLP-Mixer is not supported, only 'avg'",
            ),
        ]
    ):
        path = folder_with(tmp_path / str(number), **config)
        with pytest.raises(UserError, match=message):
            weights.open_pretrained(path)
    part = load_file(FILE)
    del part["blocks.0.mlp_channels.fc1.weight"]
    save_file(part, tmp_path / "part.safetensors")
    with pytest.raises(
        UserError, match=r"mlp_channels.fc1.weight is missing: give the"
    ):
        weights.open_pretrained(tmp_path / "part.safetensors")


def test_another_size_is_not_written(tmp_path):
    found = weights.open_pretrained(FILE)
    with pytest.raises(
        UserError, match="no MLP-Mixer with patch 8, width=24 and depth=3"
    ):
        export.export(found, "timm", tmp_path / "timm")


@pytest.mark.parity
@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
def test_timm_reads_and_writes_the_same_network(tmp_path, size):
    from import_timm import import_timm, torch

    timm = import_timm()
    args = {"img_size": size, "mlp_ratio": (0.05, 0.3), "in_chans": 2}
    network = timm.create_model("mixer_s32_224", num_classes=7, **args).eval()
    torch.manual_seed(3)
    torch.nn.init.normal_(network.head.weight, std=0.5)
    theirs = tmp_path / "theirs"
    timm.models.save_for_hf(network, theirs, safe_serialization=True, model_args=args)
    found = weights.open_pretrained(theirs)
    assert found.options["tokens_mlp_dim"] == 25  # Truncated, as 153 of 153.6.
    assert found.options["channels_mlp_dim"] == 153
    _, notes = export.export(found, "timm", tmp_path / "ours")
    assert not any(note.startswith("activation") for note in notes)
    again = timm.create_model(f"local-dir:{tmp_path}/ours", pretrained=True).eval()
    model = models.create(**found.options)
    assert model.image_shape == (*size, 2)
    images = np.random.default_rng(1).normal(size=(2, *size, 2)).astype(np.float32)
    ours = jax.jit(model.apply)(found.params, images)["logits"]
    with torch.no_grad():
        moved = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        for logits in (network(moved), again(moved)):
            limit = 1e-5 * np.abs(logits.numpy()).max()
            np.testing.assert_allclose(ours, logits.numpy(), rtol=0, atol=limit)
    found.options["activation"] = "gelu_tanh"
    _, notes = export.export(found, "timm", tmp_path / "tanh")
    assert any(note.startswith("activation: gelu_tanh became gelu") for note in notes)

"""Files of masked autoencoders, in and out; with the extra `parity` transformers too."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from import_timm import import_timm
from safetensors.numpy import load_file, save_file
from trees import assert_same, checkpoint, encoder

from vit_jax import models, weights
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.tasks.mae import MaeConfig
from vit_jax.weights import export, preprocessing_of
from vit_jax.weights.formats import torch_file

# Of facebookresearch/mae efb2a80 and transformers 5.23; tests/golden/README.md.
GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
IO = np.load(GOLDEN / "mae.io.npz")
FACEBOOK = GOLDEN / "mae_facebook.safetensors"
TASK = {
    "name": "mae",
    "mask_ratio": 0.75,
    "decoder_width": 16,
    "decoder_depth": 2,
    "decoder_num_heads": 4,
    "decoder_mlp_dim": 32,
}
BATCH = {
    "image": jnp.asarray(IO["image"].transpose(0, 2, 3, 1)),
    "noise": jnp.asarray(IO["noise"]),
}


def logits_of(found):
    """Returns what the task with its decoder predicts of the golden images."""
    model = models.create(**found.options)
    data = DataConfig(image_size=model.image_shape[:2], num_classes=0)
    task = MaeConfig(**found.task).build(model, data, RunLength(4, 1.0))
    params = {"network": found.params, **found.task_params}
    return jax.jit(task.predict)(params, BATCH)[0]


def stored(path, arrays):
    """Stores a state dict as facebookresearch does, and returns the path."""
    torch_file.write(path, {"model": arrays})
    return path


def test_a_file_with_a_decoder_is_read_whole(tmp_path):
    path = stored(tmp_path / "mae.pth", load_file(FACEBOOK))
    found = weights.open_pretrained(path, num_heads=4)
    assert (found.format, found.source) == ("mae", str(path))
    assert found.task == TASK | {"normalize_targets": True}
    assert found.options["posemb"] == "sincos2d_mae"
    assert (found.options["activation"], found.options["layer_norm_eps"]) == (
        "gelu",
        1e-6,
    )
    assert "posembed_input" not in found.params["Transformer"]
    notes = "\n".join(found.notes)
    assert "decoder's heads: number unknown, assumed 4" in notes
    assert "targets: normalisation unknown" in notes
    np.testing.assert_allclose(logits_of(found), IO["ratio0.75/logits"], atol=1e-5)
    preprocess = found.preprocess
    assert preprocess.mean == (0.485, 0.456, 0.406)
    assert (preprocess.interpolation, preprocess.crop_fraction) == ("bicubic", 0.875)


def renamed(folder, path):
    """Stores the golden folder as transformers 5.23 saves it, and returns the path."""
    path.mkdir()
    old, new = "decoder.decoder_layers.", "decoder.decoder_encoder.layer."
    arrays = load_file(folder / "model.safetensors")
    arrays = {name.replace(old, new): value for name, value in arrays.items()}
    save_file(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text((folder / "config.json").read_text())
    return path


@pytest.mark.parametrize("names", ["published", "saved by 5.23"])
def test_transformers_models_are_read_whole(tmp_path, names):
    path = GOLDEN / "mae_hf"
    if names != "published":
        path = renamed(path, tmp_path / "hf")
    found = weights.open_pretrained(path)
    assert found.task == TASK | {"normalize_targets": False}
    assert found.options["layer_norm_eps"] == 1e-12
    np.testing.assert_allclose(logits_of(found), IO["hf_eps1e-12/logits"], atol=1e-5)
    assert_same(
        found.params,
        flatten_dict(weights.open_pretrained(FACEBOOK, num_heads=4).params, sep="/"),
    )


def encoder_alone():
    arrays = load_file(FACEBOOK)
    return {
        name: value
        for name, value in arrays.items()
        if not name.startswith("decoder_") and name != "mask_token"
    }


def test_an_encoder_alone_is_told_by_its_fixed_positions(tmp_path):
    """Of a file as of timm; what was trained on has other positions, or classes."""
    arrays = encoder_alone()
    found = weights.open_pretrained(stored(tmp_path / "a.pth", arrays), num_heads=4)
    assert (found.format, found.options["posemb"]) == ("mae", "sincos2d_mae")
    assert (found.task, found.task_params) == ({}, {})
    assert found.preprocess.mean == (0.485, 0.456, 0.406)
    moved = arrays | {"pos_embed": arrays["pos_embed"] + np.float32(1e-3)}
    found = weights.open_pretrained(stored(tmp_path / "b.pth", moved), num_heads=4)
    assert (found.format, found.options["posemb"]) == ("dino", "learned")
    head = {"head.weight": np.ones((3, 32), np.float32), "head.bias": np.ones(3)}
    head = {name: value.astype(np.float32) for name, value in head.items()}
    path = stored(tmp_path / "c.pth", arrays | head)
    assert weights.open_pretrained(path, num_heads=4).format == "timm"


def test_a_fine_tuned_file_has_the_images_of_its_pretraining(tmp_path):
    """Of facebookresearch's code: `mae_finetuned_vit_base.pth`, under any name."""
    arrays = encoder_alone()
    arrays = {
        name.replace("norm.", "fc_norm.", 1) if name.startswith("norm.") else name: v
        for name, v in arrays.items()
    }
    arrays["pos_embed"] = arrays["pos_embed"] + np.float32(1e-3)
    arrays |= {
        "head.weight": np.ones((3, 32), np.float32),
        "head.bias": np.ones(3, np.float32),
    }
    found = weights.open_pretrained(stored(tmp_path / "a.pth", arrays), num_heads=4)
    assert (found.options["pool"], found.options["fc_norm"]) == ("gap", True)
    pretraining = weights.open_pretrained(FACEBOOK, num_heads=4).preprocess
    assert preprocessing_of(found) == pretraining
    large = dataclasses.replace(
        found, options=found.options | {"image_size": (448, 448)}
    )
    assert preprocessing_of(large).crop_fraction == 1.0
    biased = dataclasses.replace(
        found, options=found.options | {"relative_bias": "every"}
    )
    assert set(preprocessing_of(biased).mean) == {0.5}  # BEiT.


def test_a_vitmaemodel_is_an_encoder_alone(tmp_path):
    arrays = load_file(GOLDEN / "mae_hf" / "model.safetensors")
    arrays = {k.removeprefix("vit."): v for k, v in arrays.items() if "vit." in k}
    config = json.loads((GOLDEN / "mae_hf" / "config.json").read_text())
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.dumps(config | {"architectures": ["ViTMAEModel"]})
    (tmp_path / "config.json").write_text(text)
    found = weights.open_pretrained(tmp_path)
    assert (found.format, found.options["posemb"]) == ("mae", "sincos2d_mae")
    assert (found.task, found.task_params) == ({}, {})
    export.export(found, "hf_mae", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert_same(again, arrays)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["architectures"] == ["ViTMAEModel"]


@pytest.mark.parametrize("arrays", ["whole", "encoder"])
def test_a_file_of_facebookresearch_is_written_back_to_the_bit(tmp_path, arrays):
    arrays = load_file(FACEBOOK) if arrays == "whole" else encoder_alone()
    path = stored(tmp_path / "a.pth", arrays)
    found = weights.open_pretrained(path, num_heads=4)
    _, notes = export.export(found, "mae", tmp_path / "b.pth")
    assert "preprocessing: facebookresearch/mae uses ImageNet's mean and std" in notes
    assert_same(torch_file.read(tmp_path / "b.pth"), arrays)


def test_a_folder_of_transformers_is_written_back_to_the_bit(tmp_path):
    found = weights.open_pretrained(GOLDEN / "mae_hf")
    export.export(found, "hf_mae", tmp_path / "out")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).exists()
    arrays = load_file(GOLDEN / "mae_hf" / "model.safetensors")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), arrays)
    written, config = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "out", GOLDEN / "mae_hf")
    )
    shared = written.keys() & config.keys()
    assert {k: written[k] for k in shared} == {k: config[k] for k in shared}
    assert config.keys() - shared <= {
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "initializer_range"),
        "transformers_version",
    }
    again = weights.open_pretrained(tmp_path / "out")
    # Of 32 pixels the crop's fraction is that of whole pixels.
    assert again.preprocess.resize_sides == found.preprocess.resize_sides
    assert again.preprocess.mean == found.preprocess.mean
    assert again.task == found.task


def test_a_file_of_the_other_library_gives_the_same(tmp_path):
    found = weights.open_pretrained(GOLDEN / "mae_hf")
    _, notes = export.export(found, "mae", tmp_path / "a.pth")
    assert "layer_norm_eps: 1e-12 replaced by 1e-6, facebookresearch/mae's" in notes
    assert_same(torch_file.read(tmp_path / "a.pth"), load_file(FACEBOOK))


def test_a_torch_file_is_read_by_torch(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    arrays = load_file(FACEBOOK) | {"scalar": np.float32(3).reshape(())}
    arrays["transposed"] = np.arange(12, dtype=np.float32).reshape(3, 4).T
    stored(tmp_path / "a.pth", arrays)
    content = torch.load(tmp_path / "a.pth", weights_only=True)
    assert list(content) == ["model"]
    assert_same({k: v.numpy() for k, v in content["model"].items()}, arrays)
    assert all(v.is_contiguous() for v in content["model"].values())


@pytest.mark.parity
@pytest.mark.parametrize("eps", [1e-12, 1e-6])
def test_transformers_load_what_we_write_and_agree(tmp_path, eps):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import_timm()  # Beside a torchvision that may lack its operators.
    transformers = pytest.importorskip("transformers", reason="extra parity")
    found = weights.open_pretrained(GOLDEN / "mae_hf")
    options = found.options | {"layer_norm_eps": eps}
    found = dataclasses.replace(found, options=options)
    export.export(found, "hf_mae", tmp_path / "out")
    network, info = transformers.ViTMAEForPreTraining.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert {name: value for name, value in info.items() if value} == {}
    with torch.no_grad():
        outputs = network(torch.tensor(IO["image"]), noise=torch.tensor(IO["noise"]))
    np.testing.assert_allclose(outputs.logits, logits_of(found), rtol=0, atol=1e-5)
    expected = IO[f"hf_eps{eps:.0e}/logits"]
    np.testing.assert_allclose(outputs.logits, expected, rtol=0, atol=1e-5)
    # What the library saves itself, under whichever names, is read to the bit.
    network.save_pretrained(tmp_path / "again")
    again = weights.open_pretrained(tmp_path / "again")
    assert_same(again.params, flatten_dict(found.params, sep="/"))
    assert_same(again.task_params, flatten_dict(found.task_params, sep="/"))


def made(**options):
    options = {"activation": "gelu", "num_classes": 0} | options
    return checkpoint(encoder(**options), class_names=())


def test_a_classifier_is_written_as_fine_tuning_has_it(tmp_path):
    pretrained = made(
        num_classes=3, pool="gap", class_token=True, fc_norm=True, image_size=(12, 12)
    )
    export.export(pretrained, "mae", tmp_path / "a.pth")
    names = torch_file.read(tmp_path / "a.pth").keys()
    assert {"fc_norm.weight", "head.weight", "cls_token", "pos_embed"} <= names
    again = weights.open_pretrained(tmp_path / "a.pth", num_heads=3)
    assert_same(again.params, flatten_dict(pretrained.params, sep="/"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder_pred.bias", None, "pred.bias of the decoder is missing: give the wh"),
        ("decoder_extra.bias", np.ones(3), "extra.bias of the decoder is not support"),
        ("decoder_pos_embed", None, "pos_embed' is missing"),
    ],
)
def test_a_decoder_that_is_not_maes_is_refused(tmp_path, name, value, message):
    arrays = load_file(FACEBOOK) | {name: value}
    arrays = {k: np.float32(v) for k, v in arrays.items() if v is not None}
    path = stored(tmp_path / "a.pth", arrays)
    with pytest.raises(UserError, match=message):
        weights.open_pretrained(path, num_heads=4)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ("zero", "positions are not MAE's fixed ones"),
        ("width", "does not divide into 4"),
    ],
)
def test_a_decoder_that_cannot_be_told_leaves_the_encoder(tmp_path, change, note):
    arrays = load_file(FACEBOOK)
    if change == "zero":
        arrays["decoder_pos_embed"] = np.zeros_like(arrays["decoder_pos_embed"])
    else:
        arrays["decoder_embed.weight"] = arrays["decoder_embed.weight"][:15]
    found = weights.open_pretrained(stored(tmp_path / "a.pth", arrays), num_heads=4)
    assert (found.task, found.task_params) == ({}, {})
    assert any(note in line for line in found.notes)
    assert "encoderblock_0" in found.params["Transformer"]

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from trees import assert_same, encoder, random_flat

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import Preprocess, Pretrained, export, open_pretrained
from vit_jax.weights.formats import files, native


def example(**changes):
    model = encoder(
        pool="map", activation="gelu", layer_norm_eps=1e-12, image_size=(8, 12)
    )
    flat = random_flat(model)
    # As a transposed view of another library's weights would be.
    flat["embedding/bias"] = np.arange(24, dtype=np.float32)[::2]
    fields = {
        "params": native.unflatten_dict(flat, sep="/"),
        "options": model.options,
        "format": "timm",
        "source": "hf://owner/name",
        "preprocess": Preprocess(
            (8, 12), (0.4, 0.5, 0.6), (0.1, 0.2, 0.3), "area", 0.9
        ),
        "class_names": ("cat", "größerer Hund", 'a "b", c\n'),
        "loss": "sigmoid",
    } | changes
    return flat, Pretrained(**fields)


def test_round_trip_is_exact(tmp_path):
    flat, pretrained = example()
    native.write(pretrained, tmp_path / "a.safetensors")
    found = open_pretrained(tmp_path / "a.safetensors")
    assert_same(found.params, flat)
    assert found.format == "vit_jax"
    assert found.options == pretrained.options
    assert found.preprocess == pretrained.preprocess
    assert found.class_names == pretrained.class_names
    assert found.loss == "sigmoid"
    assert models.create(**found.options).image_shape == (8, 12, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_nothing_says_stays_unsaid(tmp_path):
    _, pretrained = example(preprocess=None, class_names=())
    native.write(pretrained, tmp_path / "a.safetensors")
    found = open_pretrained(tmp_path)
    assert (found.preprocess, found.class_names) == (None, ())


OPTIONS = {"variant": "Ti/4", "num_classes": 3}
WHOLE = {"format_version": 1, "preprocess": None, "class_names": [], "loss": "softmax"}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format_version": 3}, "has format version 3, .* versions up to 2: update it"),
        ({"format_version": 1}, "has a damaged vit_jax header: KeyError"),
        ("{", "has a damaged vit_jax header: JSONDecodeError"),
        (
            {"options": {"num_classes": 3}},
            r"a\.safetensors has a config.json, a header",
        ),
        ({"options": OPTIONS | {"width": "x"}}, r"a\.safetensors: model.width='x'"),
    ],
)
def test_header_that_cannot_be_used_is_refused(tmp_path, header, message):
    if "options" in header:
        header = WHOLE | header
    text = header if isinstance(header, str) else json.dumps(header)
    save_file({"cls": np.ones(3)}, tmp_path / "a.safetensors", {"vit_jax": text})
    with pytest.raises(UserError, match=message):
        open_pretrained(tmp_path / "a.safetensors")


def test_a_line_of_transforms_is_stored_unless_a_module_has_one(tmp_path):
    line, path = "resize_small(20) | pad(24)", tmp_path / "a.safetensors"
    for transform in (line, f"{line} | mine:Half"):
        how = Preprocess((8, 12), squash=True, transform=transform)
        _, pretrained = example(preprocess=how)
        _, notes = export.export(pretrained, "safetensors", path, overwrite=True)
        expected = line if transform == line else ""
        assert open_pretrained(path).preprocess.transform == expected
        assert any("mine:Half" in note for note in notes) == (transform != line)
    native.write(pretrained, path)
    with pytest.raises(UserError, match="transform=.*mine:Half"):
        open_pretrained(path)
    _, notes = export.export(pretrained, "timm", tmp_path / "timm")
    assert any("mine:Half" in note and "whole image" in note for note in notes)


def test_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    _, pretrained = example()
    with pytest.raises(UserError, match=r"absent/a.safetensors cannot be written"):
        native.write(pretrained, tmp_path / "absent" / "a.safetensors")

    def full(*args):
        save_file(*args)
        raise OSError("No space left on device")

    (tmp_path / "a.safetensors").write_bytes(b"before")
    monkeypatch.setattr(files.safetensors.numpy, "save_file", full)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        native.write(pretrained, tmp_path / "a.safetensors")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"before"]

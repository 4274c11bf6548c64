"""Checkpoints of every format give the logits that the original code gave for them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.weights import load, open_pretrained

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "parity"


GOOGLE = ("vit_token", "vit_token_rep", "vit_gap")
GOOGLE += ("hybrid_r_stem", "hybrid_r_16", "hybrid_r_32")
_64 = {"image_size": (64, 64)}  # Nothing in these files tells the image size.
# File of the original code without its suffix, its suffix, the format, options that the
# file does not tell, and the name of the images and outputs where it is another.
CASES = [
    *((f"google_{name}", ".npz", "google", {}) for name in GOOGLE),
    ("bigvision_vit_tok", ".npz", "big_vision", {}),
    ("bigvision_vit_map", ".npz", "big_vision", {}),
    ("bigvision_vit_gap_sincos", ".npz", "big_vision", _64),
    ("bigvision_bit", ".npz", "bit", _64),
    ("bigtransfer_bit", ".npz", "bit", _64, "bigvision_bit"),
    ("timm_vit_token", ".safetensors", "timm", {}),
    ("timm_vit_gap", ".safetensors", "timm", {}),
    ("hf_vit", "", "hugging_face", {}),
]


def find(name):
    for folder in (GOLDEN, SHARED):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is neither in tests/golden nor in ../shared/parity")


FAST = ("google_vit_token", "google_hybrid_r_stem", "bigtransfer_bit", "hf_vit")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case[0] in FAST else pytest.mark.slow)
        for case in CASES
    ],
    ids=lambda case: case[0],
)
def test_logits_are_those_of_the_original_code(case):
    name, suffix, format, options, *other = case
    outputs = np.load(find(f"{[name, *other][-1]}.io.npz"))
    path = find(f"{name}{suffix}")
    found = open_pretrained(path, num_heads=4 if format == "timm" else 0)
    assert found.format == format
    model = models.create(**found.options | options)
    loaded = load(path, model)
    assert loaded.rows[0].action == "loaded"
    result = jax.jit(model.apply)(loaded.params, jnp.asarray(outputs["images"]))
    assert "logits" in outputs
    for key in outputs.keys() - {"images"}:
        np.testing.assert_allclose(result[key], outputs[key], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_logits_of_photographs_by_deit_are_timms():
    found = open_pretrained(find("deit_tiny_timm.safetensors"), num_heads=3)
    outputs = np.load(find("deit_tiny.io.npz"))
    mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
    images = jnp.asarray((outputs["images_uint8"] / np.float32(255) - mean) / std)
    model = models.create(**found.options)
    logits = jax.jit(model.apply)(found.params, images)["logits"]
    np.testing.assert_allclose(logits, outputs["logits"], atol=1e-4)

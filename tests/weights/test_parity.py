"""Checkpoints of every format give the logits that the original code gave for them."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.weights import load, open_pretrained

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "parity"


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint of the original code, and what it gave.

    Attributes:
      file: of the weights.
      outputs: .npz with "images" and what to compare.
      format: that is recognised.
      options: of the model that differ from what the file tells.
      num_heads: for files that do not tell.
    """

    file: str
    outputs: str
    format: str
    options: dict = dataclasses.field(default_factory=dict)
    num_heads: int = 0


# Nothing in these files tells the image size.
_64 = {"image_size": (64, 64)}

CASES = {
    **{
        f"google_{name}": Case(f"google_{name}.npz", f"google_{name}.io.npz", "google")
        for name in (
            "vit_token",
            "vit_token_rep",
            "vit_gap",
            "hybrid_r_stem",
            "hybrid_r_16",
            "hybrid_r_32",
        )
    },
    **{
        f"bigvision_vit_{name}": Case(
            f"bigvision_vit_{name}.npz",
            f"bigvision_vit_{name}.io.npz",
            "big_vision",
            options,
        )
        for name, options in (("tok", {}), ("map", {}), ("gap_sincos", _64))
    },
    "bigvision_bit": Case("bigvision_bit.npz", "bigvision_bit.io.npz", "bit", _64),
    "bigtransfer_bit": Case("bigtransfer_bit.npz", "bigvision_bit.io.npz", "bit", _64),
    **{
        f"timm_vit_{name}": Case(
            f"timm_vit_{name}.safetensors",
            f"timm_vit_{name}.io.npz",
            "timm",
            num_heads=4,
        )
        for name in ("token", "gap")
    },
    "hf_vit": Case("hf_vit", "hf_vit.io.npz", "hugging_face"),
}


def find(name):
    for folder in (GOLDEN, SHARED):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is neither in tests/golden nor in ../shared/parity")


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_original_code(name):
    case = CASES[name]
    path, outputs = find(case.file), np.load(find(case.outputs))
    found = open_pretrained(path, num_heads=case.num_heads)
    assert found.format == case.format

    model = models.create(**{**found.options, **case.options})
    loaded = load(path, model)
    assert loaded.rows[0].action == "loaded"
    result = jax.jit(model.apply)(loaded.params, jnp.asarray(outputs["images"]))
    assert "logits" in outputs
    for key in outputs.keys() - {"images"}:
        np.testing.assert_allclose(result[key], outputs[key], rtol=0, atol=1e-5)

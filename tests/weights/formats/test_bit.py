import re

import numpy as np
import pytest
from trees import assert_same, random_flat, save

from vit_jax import models
from vit_jax.models import variants
from vit_jax.weights import open_pretrained
from vit_jax.weights.formats import bit
from vit_jax.weights.formats.files import Tensors

NARROW = {"stage_depths": (1, 2, 1, 1), "stem_width": 32}


def tiny(num_classes=5, channels=3):
    return models.create("R50x1", num_classes=num_classes, channels=channels, **NARROW)


def to_big_vision(flat):
    return {
        f"params/{k}": v.reshape(1, 1, 1, -1)
        if re.search(r"(gn\d|norm-pre-head)/", k)
        else v
        for k, v in flat.items()
    }


def to_original(flat, count):
    """Names of the first release; some of its files count the convolutions."""
    renamed = {}
    for i, (name, value) in enumerate(flat.items()):
        conv = f"standardized_conv2d_{i}" if count and i else "standardized_conv2d"
        name = name.replace("root_block/conv_root/", f"root_block/{conv}/")
        name = name.replace("conv_proj/", f"a/proj/{conv}/")
        for number, letter in enumerate("abc", 1):
            name = name.replace(f"conv{number}/", f"{letter}/{conv}/")
            name = name.replace(f"gn{number}/", f"{letter}/group_norm/")
        name = name.replace("norm-pre-head/", "group_norm/")
        if "group_norm" in name:
            name = name.replace("/scale", "/gamma").replace("/bias", "/beta")
        name = name.replace("head/", "head/conv2d/")
        if name == "head/conv2d/kernel":
            value = value[None, None]
        renamed[f"resnet/{name}"] = value
    return renamed


@pytest.mark.parametrize(
    "rename",
    [
        to_big_vision,
        lambda flat: to_original(flat, count=False),
        lambda flat: to_original(flat, count=True),
    ],
    ids=["big_vision", "original", "original, counted"],
)
@pytest.mark.parametrize("options", [{}, {"num_classes": 0}, {"channels": 1}], ids=str)
def test_both_layouts_give_our_tree_and_options(tmp_path, rename, options):
    model = tiny(**options)
    flat = random_flat(model)
    found = open_pretrained(save(tmp_path / "a.npz", rename(flat)))
    assert found.format == "bit"
    assert_same(found.params, flat)
    assert models.create(**found.options).options == model.options
    assert "image size: not in the file, assumed 224x224" in found.notes
    assert found.preprocess.interpolation == "bilinear_plain"


@pytest.mark.parametrize("variant", [n for n in variants.NAMES if "/" not in n])
def test_published_sizes_are_named_without_differing_numbers(variant):
    known = variants.parse(variant).resnet
    flat = {
        f"block{stage}/unit{unit:02}/conv1/kernel": np.ones(1)
        for stage, units in enumerate(known.stage_depths, 1)
        for unit in range(1, units + 1)
    }
    flat["root_block/conv_root/kernel"] = np.ones((7, 7, 3, known.stem_width))
    options = bit.read(Tensors(flat, {}, {}, "x")).options
    assert options == {
        "variant": variant,
        "num_classes": 0,
        "image_size": (224, 224),
        "channels": 3,
        "zero_pool": False,
    }

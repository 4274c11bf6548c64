"""Hugging Face's names and configs, in and out; test_torch_parity.py asks the library."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from trees import assert_same, checkpoint, encoder, random_flat

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import Preprocess
from vit_jax.weights.formats import files
from vit_jax.weights.formats.registry import READERS, WRITERS

PREPROCESS = Preprocess(
    (12, 20), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", squash=True
)
NAMES = tuple("abcdefg")


def model_of(**options):
    return encoder(**{"image_size": (12, 20), "activation": "gelu"} | options)


def made(model, **kwargs):
    """A checkpoint with random parameters."""
    fields = {"preprocess": PREPROCESS, "class_names": NAMES} | kwargs
    return checkpoint(model, **fields)


def write(folder, model, **kwargs):
    """Writes a checkpoint; returns its arrays and its config."""
    WRITERS["hf"].write(made(model, **kwargs), folder)
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config


def read(arrays, config=None, preprocess=None, num_heads=0):
    sidecars = {"config.json": config, "preprocessor_config.json": preprocess}
    sidecars = {name: content for name, content in sidecars.items() if content}
    return READERS["Hugging Face"].read(
        files.Tensors(dict(arrays), {}, sidecars, "file"), num_heads
    )


def logits_of(pretrained, key="logits"):
    model = models.create(**pretrained.options)
    images = jax.random.normal(jax.random.key(3), (2, *model.image_shape))
    return np.asarray(model.apply(pretrained.params, images)[key])


def test_the_config_says_what_transformers_needs(tmp_path):
    _, config = write(tmp_path, model_of(activation="gelu_tanh", layer_norm_eps=1e-5))
    assert config["id2label"] == {str(i): name for i, name in enumerate(NAMES)}
    assert config["label2id"] == {name: i for i, name in enumerate(NAMES)}
    expected = {
        "model_type": "vit",
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-5,
        "image_size": [12, 20],
        "patch_size": 4,
        "num_channels": 3,
    }
    assert {key: config[key] for key in expected} == expected


def test_a_classifier_of_the_class_token_alone_is_read_as_a_pair(tmp_path):
    model = model_of(distillation=True)
    arrays, config = write(tmp_path, model)
    del arrays["distillation_classifier.weight"], arrays["distillation_classifier.bias"]
    for leaf in ("weight", "bias"):
        arrays[f"classifier.{leaf}"] = arrays.pop(f"cls_classifier.{leaf}")
    config["architectures"] = ["DeiTForImageClassification"]
    found = read(arrays, config)
    assert found.options["num_classes"] == 7
    assert found.notes == ("classifier: reads only the class token, written as a pair",)
    features = logits_of(found, "pre_logits")
    expected = features @ arrays["classifier.weight"].T + arrays["classifier.bias"]
    np.testing.assert_allclose(logits_of(found), expected, atol=1e-5)


@pytest.mark.parametrize(("prefix", "distillation"), [("vit", False), ("deit", True)])
def test_a_pooler_beside_a_classifier_is_dropped(tmp_path, prefix, distillation):
    model = model_of(distillation=distillation)
    arrays, config = write(tmp_path, model)
    arrays[f"{prefix}.pooler.dense.weight"] = np.ones((12, 12), np.float32)
    arrays[f"{prefix}.pooler.dense.bias"] = np.ones(12, np.float32)
    found = read(arrays, config)
    assert not found.options["representation_layer"]
    assert_same(found.params, random_flat(model))
    assert found.notes == ("pooler: dropped, because the classifier does not use it",)


def test_without_a_config_the_arrays_tell_what_they_can(tmp_path):
    arrays, _ = write(tmp_path, model_of(image_size=(16, 16)))
    found = read(arrays)
    assert found.options["image_size"] == (16, 16)
    assert (found.options["activation"], found.options["layer_norm_eps"]) == (
        "gelu",
        1e-12,
    )
    assert found.preprocess is None
    assert found.notes == (
        "heads: number unknown, assumed 1, with 64 features each",
        "config.json: missing, assumed hidden_act=gelu, layer_norm_eps=1e-12",
    )
    heads = models.create(**read(arrays, num_heads=3).options).options["num_heads"]
    assert heads == 3
    arrays, _ = write(tmp_path, model_of(image_size=(12, 28)))
    with pytest.raises(UserError, match="of 21 patches, which are not a square"):
        read(arrays, num_heads=3)


def test_missing_positions_become_zeros(tmp_path):
    model = model_of(posemb="none")
    assert WRITERS["hf"].write(made(model, preprocess=None), tmp_path) == [
        "position embeddings: missing, written as zeros",
        "preprocessing: unknown, preprocessor_config.json is not written",
    ]
    assert not (tmp_path / "preprocessor_config.json").exists()
    found = READERS["Hugging Face"].read(files.read(tmp_path), 0)
    np.testing.assert_array_equal(logits_of(found), logits_of(made(model)))

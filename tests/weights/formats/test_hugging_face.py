"""Hugging Face's names and configs, in and out; test_torch_parity.py asks the library."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from trees import assert_same, checkpoint, encoder, random_flat

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import Preprocess, Pretrained
from vit_jax.weights.formats import files
from vit_jax.weights.formats.registry import READERS, WRITERS

SHARED = pathlib.Path(__file__).resolve().parents[4] / "shared" / "parity"
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


@pytest.mark.parametrize(
    ("options", "architecture", "prefix"),
    [
        ({}, "ViTForImageClassification", "vit."),
        ({"channels": 1, "layer_norm_eps": 1e-12}, "ViTForImageClassification", "vit."),
        (
            {"activation": "gelu_tanh", "image_size": (20, 20)},
            "ViTForImageClassification",
            "vit.",
        ),
        ({"num_classes": 0}, "ViTModel", ""),
        ({"num_classes": 0, "representation_layer": True}, "ViTModel", ""),
        ({"distillation": True}, "DeiTForImageClassificationWithTeacher", "deit."),
        ({"distillation": True, "num_classes": 0}, "DeiTModel", ""),
    ],
)
def test_what_is_written_is_read_back_to_the_bit(
    tmp_path, options, architecture, prefix
):
    model = model_of(**options)
    names = NAMES[: model.options["num_classes"]]
    channels = model.options["channels"]
    preprocess = Preprocess(
        model.image_shape[:2],
        (0.1, 0.2, 0.3)[:channels],
        (0.4,) * channels,
        squash=True,
    )
    pretrained = made(
        model,
        class_names=names,
        preprocess=preprocess,
        loss="sigmoid" if channels == 1 else "softmax",
    )
    assert WRITERS["hf"].write(pretrained, tmp_path) == []
    tensors = files.read(tmp_path)
    assert tensors.sidecars["config.json"]["architectures"] == [architecture]
    assert f"{prefix}embeddings.cls_token" in tensors.flat
    assert READERS["Hugging Face"].recognises(tensors)
    found = READERS["Hugging Face"].read(tensors, 0)
    assert_same(found.params, random_flat(model))
    assert models.create(**found.options).options == model.options
    assert (found.preprocess, found.class_names) == (preprocess, names)
    assert (found.format, found.notes) == ("hugging_face", ())
    assert found.loss == pretrained.loss


def test_theirs_to_ours_and_back_changes_no_bit(tmp_path):
    (tmp_path / "b").mkdir()
    arrays, config = write(tmp_path, model_of())
    sidecar = json.loads((tmp_path / "preprocessor_config.json").read_text())
    WRITERS["hf"].write(read(arrays, config, sidecar), tmp_path / "b")
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == arrays.keys()
    for key, value in arrays.items():
        np.testing.assert_array_equal(again[key], value)
    for name in ("config.json", "preprocessor_config.json"):
        assert (tmp_path / "b" / name).read_text() == (tmp_path / name).read_text()


def test_names_in_memory_of_version_5_are_read_too(tmp_path):
    model = model_of()
    arrays, config = write(tmp_path, model)
    renamed = {}
    for name, value in arrays.items():
        for old, new in (
            ("encoder.layer.", "layers."),
            (r"attention\.attention\.(\w)\w+", r"attention.\1_proj"),
            ("attention.output.dense", "attention.o_proj"),
            ("intermediate.dense", "mlp.fc1"),
            ("output.dense", "mlp.fc2"),
        ):
            name = re.sub(old, new, name)
        renamed[name] = value
    assert "vit.layers.1.attention.q_proj.weight" in renamed
    assert "vit.layers.1.mlp.fc2.bias" in renamed
    assert_same(read(renamed, config).params, random_flat(model))


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


def test_the_published_case_has_the_logits_of_transformers():
    if not (SHARED / "hf_vit").exists():
        pytest.skip("../shared/parity/hf_vit is not here")
    found = READERS["Hugging Face"].read(files.read(SHARED / "hf_vit"), 0)
    outputs = np.load(SHARED / "hf_vit.io.npz")
    model = models.create(**found.options)
    logits = model.apply(found.params, jnp.asarray(outputs["images"]))["logits"]
    np.testing.assert_allclose(logits, outputs["logits"], atol=1e-5)
    assert found.class_names == ()  # LABEL_0 and so on are no names.


def test_a_classifier_of_the_class_token_alone_is_read_as_a_pair(tmp_path):
    model = model_of(distillation=True)
    arrays, config = write(tmp_path, model)
    del arrays["distillation_classifier.weight"], arrays["distillation_classifier.bias"]
    for leaf in ("weight", "bias"):
        arrays[f"classifier.{leaf}"] = arrays.pop(f"cls_classifier.{leaf}")
    config["architectures"] = ["DeiTForImageClassification"]
    found = read(arrays, config)
    assert found.options["num_classes"] == 7
    assert found.notes == ("classifier: of the class token alone, written as a pair",)
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
    assert found.notes == ("pooler: dropped, because the classifier does not see it",)


def test_the_config_knows_the_heads_better_than_a_guess(tmp_path):
    arrays, config = write(tmp_path, model_of())
    found = read(arrays, config, num_heads=4)
    assert models.create(**found.options).options["num_heads"] == 3


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
        "heads: nothing says how many, so 1, one for 64 features",
        "config.json: none, so hidden_act=gelu, layer_norm_eps=1e-12",
    )
    heads = models.create(**read(arrays, num_heads=3).options).options["num_heads"]
    assert heads == 3
    arrays, _ = write(tmp_path, model_of(image_size=(12, 28)))
    with pytest.raises(
        UserError, match="embeddings of 21 patches, which are no square"
    ):
        read(arrays, num_heads=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, c: c.update(hidden_act="silu"),
            "hidden_act='silu' in config.json is not one of gelu, ",
        ),
        (
            lambda a, c: c.update(num_attention_heads=5),
            r"attention.query.weight has shape \(12, 12\), which does not fit",
        ),
    ],
)
def test_configs_of_other_networks_are_refused(tmp_path, change, message):
    arrays, config = write(tmp_path, model_of())
    change(arrays, config)
    with pytest.raises(UserError, match=message):
        read(arrays, config)


@pytest.mark.parametrize(
    ("change", "name", "problem"),
    [
        (
            lambda a: a.update(
                {"vit.embeddings.mask_token": np.zeros((1, 1, 12), np.float32)}
            ),
            "embeddings.mask_token",
            "left over",
        ),
        (
            lambda a: a.pop("vit.layernorm.bias"),
            "Transformer/encoder_norm/bias",
            "missing",
        ),
    ],
)
def test_what_is_left_over_or_missing_is_refused_unless_allowed(
    tmp_path, change, name, problem
):
    model = model_of()
    arrays, _ = write(tmp_path, model)
    change(arrays)
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} is {problem}"):
        weights.load(tmp_path, model)
    loaded = weights.load(tmp_path, model, allow_mismatch=[f"^{name}$"])
    assert any(name == row.what and problem in row.action for row in loaded.rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "gap"}, "pool='gap': ViTModel .*--to=timm"),
        ({"pool": "map"}, "pool='map': ViTModel .*--to=timm"),
        ({"representation_layer": True}, "representation_layer=True: .*--to=google"),
        (
            {"variant": "R26+S/32", "image_size": (32, 64)},
            "stem_width=64: ViTModel .*--to=timm, --to=google",
        ),
        (
            {"posemb": "relative", "posemb_placement": "every"},
            "posemb=relative at posemb_placement=every exists in neither timm nor Hugging",
        ),
    ],
)
def test_what_transformers_cannot_express_is_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        WRITERS["hf"].write(made(model_of(**options)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_resnet_is_refused(tmp_path):
    model = models.create("R50x1", num_classes=2, stem_width=32)
    empty = Pretrained({}, model.options, "vit_jax", "test")
    with pytest.raises(
        UserError, match="variant='R50x1': ViTModel of transformers has no"
    ):
        WRITERS["hf"].write(empty, tmp_path)


def test_missing_positions_become_zeros(tmp_path):
    model = model_of(posemb="none")
    assert WRITERS["hf"].write(made(model, preprocess=None), tmp_path) == [
        "position embeddings: none, written as zeros",
        "preprocessing: nothing says how, so no preprocessor_config.json",
    ]
    assert not (tmp_path / "preprocessor_config.json").exists()
    found = READERS["Hugging Face"].read(files.read(tmp_path), 0)
    np.testing.assert_array_equal(logits_of(found), logits_of(made(model)))

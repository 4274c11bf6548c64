"""LoRA adapters in the files of PEFT, merged into their base."""

import json

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from trees import assert_same, checkpoint, encoder, random_flat

from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.weights import export

D, R, CLASSES = 12, 3, 5
BASE = encoder(num_classes=7, activation="gelu")
QUERY = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel"
# As transformers names the layer in memory, which is not its name in files.
LAYER = "base_model.model.vit.layers.1.attention.q_proj"
CONV = "base_model.model.vit.embeddings.patch_embeddings.projection"


@pytest.fixture
def adapter(tmp_path):
    """Writes a base and an adapter; returns a function that changes and opens it."""
    names = tuple(f"class {i}" for i in range(7))
    export.export(checkpoint(BASE, class_names=names), "hf", tmp_path / "base")
    rng = np.random.default_rng(4)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    arrays = {
        f"{LAYER}.lora_A.weight": draw(R, D),
        f"{LAYER}.lora_B.weight": draw(D, R),
        f"{CONV}.lora_A.weight": draw(2, 3, 4, 4),
        f"{CONV}.lora_B.weight": draw(D, 2, 1, 1),
        "base_model.model.classifier.weight": draw(CLASSES, D),
        "base_model.model.classifier.bias": draw(CLASSES),
    }
    config = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "use_rslora": False}
    config["base_model_name_or_path"] = str(tmp_path / "base")
    config["alpha_pattern"] = {"projection": 4}

    def open_adapter(more_arrays=(), **changes):
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        save_file(arrays | dict(more_arrays), folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        return arrays, weights.open_pretrained(folder)

    return open_adapter


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_merged_into_its_base(adapter, rslora):
    arrays, found = adapter(use_rslora=rslora)
    expected = random_flat(BASE)
    change = arrays[f"{LAYER}.lora_B.weight"] @ arrays[f"{LAYER}.lora_A.weight"]
    change *= 6 / (R**0.5 if rslora else R)
    expected[QUERY] = expected[QUERY] + change.T.reshape(expected[QUERY].shape)
    up, down = (arrays[f"{CONV}.lora_{name}.weight"] for name in "BA")
    change = np.einsum("orab,rcyx->yxco", up, down) * 4 / (2**0.5 if rslora else 2)
    expected["embedding/kernel"] = expected["embedding/kernel"] + change
    expected["head/kernel"] = arrays["base_model.model.classifier.weight"].T
    expected["head/bias"] = arrays["base_model.model.classifier.bias"]
    params = flatten_dict(found.params, sep="/")
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, atol=1e-5, err_msg=name)
    assert found.options["num_classes"] == CLASSES
    assert found.class_names == ()  # The base's are of its own classifier.


def test_an_adapter_without_a_classifier_keeps_that_of_its_base(adapter, tmp_path):
    adapter()
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(
        {f"{LAYER}.lora_A.weight": np.zeros((R, D), np.float32)}
        | {f"{LAYER}.lora_B.weight": np.ones((D, R), np.float32)},
        path,
    )
    found = weights.open_pretrained(tmp_path / "adapter")
    assert_same(found.params, random_flat(BASE))
    assert len(found.class_names) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path"),
        (
            {"more_arrays": {f"{LAYER}.lora_magnitude_vector": np.ones(D)}},
            "lora_magnitude_vector",
        ),
        (
            {"more_arrays": {"base_model.model.other.lora_A.weight": np.ones((R, D))}},
            "other has no counterpart",
        ),
    ],
)
def test_what_cannot_be_merged_is_named(adapter, changes, message):
    with pytest.raises(UserError, match=message):
        adapter(**changes)

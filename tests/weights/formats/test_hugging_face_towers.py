"""CLIP, SigLIP, DINOv3, BEiT and I-JEPA of transformers, read and written.

Needs the extra `parity`.
"""

import json

import jax
import numpy as np
import pytest
from import_timm import import_timm, torch
from safetensors.numpy import load_file, save_file

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights.formats.registry import WRITERS

pytestmark = pytest.mark.parity
import_timm()  # transformers imports torchvision, as timm does.
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: extra parity"
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWERS = {"vision_config": SIZES, "text_config": TEXT}

# Class, its config, and the format that is written.
NETWORKS = {
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", SIZES, "hf_clip"),
    "CLIP, GELU, projection": (
        *("CLIPVisionModelWithProjection", "CLIPVisionConfig"),
        *(SIZES | {"projection_dim": 16, "hidden_act": "gelu"}, "hf_clip"),
    ),
    "CLIP, both towers": ("CLIPModel", "CLIPConfig", TOWERS, "hf_clip"),
    "CLIP, classifier": (
        *("CLIPForImageClassification", "CLIPConfig"),
        *(TOWERS | {"num_labels": 3}, "hf_clip"),
    ),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", SIZES, "hf_clip"),
    "SigLIP, no head": (
        *("SiglipVisionModel", "SiglipVisionConfig"),
        *(SIZES | {"vision_use_head": False}, "hf_clip"),
    ),
    "SigLIP, both towers": ("SiglipModel", "SiglipConfig", TOWERS, "hf_clip"),
    "SigLIP, classifier": (
        *("SiglipForImageClassification", "SiglipConfig"),
        *(TOWERS | {"num_labels": 3}, "hf_clip"),
    ),
    "DINOv3": (
        *("DINOv3ViTModel", "DINOv3ViTConfig"),
        *(SIZES | {"num_register_tokens": 4}, "hf_dinov3"),
    ),
    "DINOv3, gated": (
        *("DINOv3ViTModel", "DINOv3ViTConfig"),
        SIZES | {"num_register_tokens": 0, "use_gated_mlp": True, "hidden_act": "silu"},
        "hf_dinov3",
    ),
    "DINOv3, neither registers nor biases": (
        *("DINOv3ViTModel", "DINOv3ViTConfig"),
        SIZES
        | {"num_register_tokens": 0}
        | {f"{name}_bias": False for name in ("query", "value", "proj", "mlp")},
        "hf_dinov3",
    ),
    "DINOv2, classifier": (
        *("Dinov2ForImageClassification", "Dinov2Config"),
        *(SIZES | {"mlp_ratio": 2, "num_labels": 3}, "hf_dinov2"),
    ),
    "DINOv2 with registers, classifier": (
        *("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig"),
        *(SIZES | {"mlp_ratio": 2, "num_labels": 3}, "hf_dinov2"),
    ),
    "BEiT, classifier": (
        *("BeitForImageClassification", "BeitConfig"),
        *(SIZES | {"num_labels": 3, "use_relative_position_bias": True}, "hf_beit"),
    ),
    "BEiT, shared bias": (
        *("BeitModel", "BeitConfig"),
        SIZES
        | {
            "use_shared_relative_position_bias": True,
            "use_absolute_position_embeddings": True,
            "use_mean_pooling": False,
        },
        "hf_beit",
    ),
    "I-JEPA": ("IJepaModel", "IJepaConfig", SIZES, "hf_ijepa"),
    "I-JEPA, classifier": (
        *("IJepaForImageClassification", "IJepaConfig"),
        *(SIZES | {"num_labels": 3}, "hf_ijepa"),
    ),
}


def create(name, config, values):
    network = getattr(transformers, name)(getattr(transformers, config)(**values))
    torch.manual_seed(5)
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn_like(value) * 0.2)
    return network.eval()


def outputs(network, images):
    """Returns logits, or else the features that our `pre_logits` are."""
    images = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        if not hasattr(network, "classifier") and hasattr(network, "vision_model"):
            network = network.vision_model
        found = network(images)
        if hasattr(found, "logits"):
            return found.logits.numpy()
        pooled = getattr(found, "pooler_output", None)
        if pooled is None or "IJepa" in type(network).__name__:
            pooled = found.last_hidden_state.mean(1)
        return pooled.numpy()


@pytest.mark.parametrize("case", NETWORKS)
def test_a_network_is_the_same_here_and_when_written_again(tmp_path, case):
    name, config, values, form = NETWORKS[case]
    network = create(name, config, values)
    network.save_pretrained(tmp_path / "theirs")
    found = weights.open_pretrained(tmp_path / "theirs")
    model = models.create(**found.options)
    rng = np.random.default_rng(1)
    images = rng.normal(size=(2, *model.image_shape)).astype(np.float32)
    theirs = outputs(network, images)
    ours = jax.jit(model.apply)(found.params, images)
    ours = ours["logits" if found.options["num_classes"] else "pre_logits"]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())

    (tmp_path / "ours").mkdir()
    WRITERS[form].write(found, tmp_path / "ours")
    kind = json.loads((tmp_path / "ours/config.json").read_text())["architectures"][0]
    again, info = getattr(transformers, kind).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values())
    np.testing.assert_allclose(outputs(again.eval(), images), theirs, atol=1e-5)


@pytest.mark.parametrize("kept", [True, False])
def test_dinov3_without_registers_fits_its_network(tmp_path, kept):
    network = create(*NETWORKS["DINOv3, gated"][:3])
    network.save_pretrained(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    if not kept:  # An array without numbers, which other writers leave out.
        del arrays["embeddings.register_tokens"]
        save_file(arrays, tmp_path / "model.safetensors")
    found = weights.open_pretrained(tmp_path)
    assert "register_tokens" not in found.params
    weights.load(tmp_path, models.create(**found.options))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("CLIP", {"model_type": "clipseg"}, "model_type='clipseg' in config.json is"),
        ("SigLIP", {"hidden_act": "relu"}, "hidden_act='relu' in config.json is not"),
        (
            "DINOv3, gated",
            {"hidden_act": "gelu"},
            "hidden_act='gelu' in config.json is not",
        ),
        (
            "DINOv3",
            {"model_type": "dinov4"},
            "model_type='dinov4' .* dinov3_vit",
        ),
    ],
)
def test_what_no_model_here_computes_is_refused(tmp_path, case, changes, message):
    create(*NETWORKS[case][:3]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        weights.open_pretrained(tmp_path)


def test_images_are_prepared_as_in_the_pretraining_without_a_file_of_it(tmp_path):
    create(*NETWORKS["CLIP"][:3]).save_pretrained(tmp_path)
    found = weights.open_pretrained(tmp_path)
    assert found.preprocess.mean[0] == 0.48145466
    assert "preprocessing: not in the file, so CLIP's" in found.notes

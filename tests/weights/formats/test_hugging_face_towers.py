"""Networks of transformers, read and written again, and text towers.

Needs the extra `parity`.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from import_timm import import_timm, torch
from safetensors.numpy import load_file, save_file
from trees import edit_config

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import export
from vit_jax.weights.text_tower import text_tower

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
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2]}
WINDOWS |= {"num_heads": [2, 4], "window_size": 4, "num_labels": 5}
TOWERS = {"vision_config": SIZES, "text_config": TEXT}

# Class, its config, and the format that is written.
NETWORKS = {
    **{
        f"ViT, {name}": ("ViTModel", "ViTConfig", SIZES | {"hidden_act": name}, "hf")
        for name in (
            *("gelu", "gelu_python", "quick_gelu"),
            *("gelu_new", "gelu_fast", "gelu_accurate"),
        )
    },
    "ViT, no biases": ("ViTModel", "ViTConfig", SIZES | {"qkv_bias": False}, "hf"),
    "ViTMSN": ("ViTMSNModel", "ViTMSNConfig", SIZES, "hf"),
    "ViTMAE": ("ViTMAEModel", "ViTMAEConfig", SIZES | {"mask_ratio": 0.0}, "hf"),
    "DeiT, one classifier": (
        *("DeiTForImageClassification", "DeiTConfig"),
        *(SIZES | {"num_labels": 3}, "hf"),
    ),
    "Swin": ("SwinForImageClassification", "SwinConfig", WINDOWS, "hf"),
    "Swin, another epsilon": (
        *("SwinForImageClassification", "SwinConfig"),
        *(WINDOWS | {"layer_norm_eps": 0.1}, "hf"),
    ),
    "SwinV2, another epsilon": (
        *("Swinv2Model", "Swinv2Config", WINDOWS | {"layer_norm_eps": 0.1}, "hf"),
    ),
    "Swin, features": ("SwinModel", "SwinConfig", WINDOWS, "hf"),
    "SwinV2": ("Swinv2ForImageClassification", "Swinv2Config", WINDOWS, "hf"),
    "SwinV2, features": ("Swinv2Model", "Swinv2Config", WINDOWS, "hf"),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", SIZES, "hf_clip"),
    "CLIP, GELU, projection": (
        *("CLIPVisionModelWithProjection", "CLIPVisionConfig"),
        *(SIZES | {"projection_dim": 16, "hidden_act": "gelu"}, "hf_clip"),
    ),
    "CLIP, classifier": (
        *("CLIPForImageClassification", "CLIPConfig"),
        *(TOWERS | {"num_labels": 3}, "hf_clip"),
    ),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", SIZES, "hf_clip"),
    "SigLIP, no head": (
        *("SiglipVisionModel", "SiglipVisionConfig"),
        *(SIZES | {"vision_use_head": False}, "hf_clip"),
    ),
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
    "DINOv2": ("Dinov2Model", "Dinov2Config", SIZES | {"mlp_ratio": 2}, "hf_dinov2"),
    "DINOv2, no biases": (
        *("Dinov2Model", "Dinov2Config"),
        SIZES | {"mlp_ratio": 2, "qkv_bias": False, "hidden_act": "gelu_new"},
        "hf_dinov2",
    ),
    "DINOv2, gated": (
        *("Dinov2Model", "Dinov2Config"),
        *(SIZES | {"mlp_ratio": 3, "use_swiglu_ffn": True}, "hf_dinov2"),
    ),
    "DINOv2 with registers": (
        *("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
        *(SIZES | {"mlp_ratio": 2, "num_register_tokens": 3}, "hf_dinov2"),
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
    "Data2Vec, classifier": (
        *("Data2VecVisionForImageClassification", "Data2VecVisionConfig"),
        *(SIZES | {"num_labels": 3}, "hf_beit"),
    ),
    "I-JEPA": ("IJepaModel", "IJepaConfig", SIZES, "hf_ijepa"),
    "I-JEPA, classifier": (
        *("IJepaForImageClassification", "IJepaConfig"),
        *(SIZES | {"num_labels": 3}, "hf_ijepa"),
    ),
} | {
    f"ViT, {channels} channels": (
        *("ViTForImageClassification", "ViTConfig"),
        *(SIZES | {"num_labels": 3, "num_channels": channels}, "hf"),
    )
    for channels in (1, 4, 13)
}


def create(name, config, values):
    network = getattr(transformers, name)(getattr(transformers, config)(**values))
    torch.manual_seed(5)
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn_like(value) * 0.2)
    return network.eval()


def to_torch(images):
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())


def outputs(network, images):
    """Returns logits, or else the features that our `pre_logits` are."""
    images = to_torch(images)
    with torch.no_grad():
        if not hasattr(network, "classifier") and hasattr(network, "vision_model"):
            network = network.vision_model
        found = network(images)
        if hasattr(found, "logits"):
            return found.logits.numpy()
        kind, tokens = network.config.model_type, found.last_hidden_state
        pooled = getattr(found, "pooler_output", None)
        if kind == "ijepa" or (kind == "siglip_vision_model" and pooled is None):
            pooled = tokens.mean(1)
        return (tokens[:, 0] if pooled is None else pooled).numpy()


@pytest.mark.parametrize("case", NETWORKS)
def test_a_network_is_the_same_here_and_when_written_again(tmp_path, case):
    name, config, values, form = NETWORKS[case]
    network = create(name, config, values)
    network.save_pretrained(tmp_path / "theirs")
    found = weights.open_pretrained(tmp_path / "theirs")
    assert found.class_names == ()  # LABEL_0 and so on are no names.
    model = models.create(**found.options)
    rng = np.random.default_rng(1)
    images = rng.normal(size=(2, *model.image_shape)).astype(np.float32)
    theirs = outputs(network, images)
    ours = jax.jit(model.apply)(found.params, images)
    ours = ours["logits" if found.options["num_classes"] else "pre_logits"]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())

    export.export(found, form, tmp_path / "ours")
    kind = json.loads((tmp_path / "ours/config.json").read_text())["architectures"][0]
    plain = kind == "ViTModel" and not found.options["representation_layer"]
    again, info = getattr(transformers, kind).from_pretrained(
        tmp_path / "ours",
        output_loading_info=True,
        **{"add_pooling_layer": False} if plain else {},
    )
    assert not any(info.values())
    np.testing.assert_allclose(outputs(again.eval(), images), theirs, atol=1e-5)


# Networks for masked image modelling, their class, and the encoder in them.
MASKED = {
    "ViT": ("ViT", SIZES | {"encoder_stride": 8}, "vit"),
    "DeiT": ("DeiT", SIZES | {"encoder_stride": 8}, "deit"),
    "BEiT": ("Beit", SIZES | {"use_mask_token": True, "vocab_size": 9}, "beit"),
}
MASKED["BEiT, two norms"] = (
    *("Beit", MASKED["BEiT"][1] | {"use_mean_pooling": False}, "beit"),
)


@pytest.mark.parametrize("case", MASKED)
def test_of_masked_image_modelling_the_encoder_is_read(tmp_path, case):
    kind, values, attribute = MASKED[case]
    network = create(f"{kind}ForMaskedImageModeling", f"{kind}Config", values)
    network.save_pretrained(tmp_path)
    found = weights.open_pretrained(tmp_path)
    assert any("pretraining" in note for note in found.notes)
    model = models.create(**found.options)
    images = np.random.default_rng(1).normal(size=(2, *model.image_shape))
    with torch.no_grad():
        tokens = getattr(network, attribute)(to_torch(images).float()).last_hidden_state
        if case == "BEiT":  # The norm behind the encoder is the only one.
            tokens = network.layernorm(tokens)
    apply = jax.jit(model.apply)
    ours = apply(found.params, images.astype(np.float32))["pre_logits"]
    np.testing.assert_allclose(ours, tokens[:, 0], rtol=0, atol=1e-4)


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
            "hidden_act='gelu' in config.json is",
        ),
        ("DINOv3", {"model_type": "dinov4"}, "model_type='dinov4' .* dinov3_vit"),
    ],
)
def test_what_no_model_here_computes_is_refused(tmp_path, case, changes, message):
    create(*NETWORKS[case][:3]).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        weights.open_pretrained(tmp_path)


def test_images_are_prepared_as_in_the_pretraining_without_a_file_of_it(tmp_path):
    create(*NETWORKS["CLIP"][:3]).save_pretrained(tmp_path)
    found = weights.open_pretrained(tmp_path)
    assert found.preprocess.mean[0] == 0.48145466
    assert "preprocessing: not in the file, assumed as for CLIP" in found.notes


WORDS = TEXT | {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 300,
    "max_position_embeddings": 9,
    "bos_token_id": 298,
    "eos_token_id": 299,
}
# Class, the changes of its text tower, and the other keys of the config.
TEXT_TOWERS = {
    "CLIP": ("CLIP", {}, {"projection_dim": 20}),
    "CLIP, old config": ("CLIP", {"eos_token_id": 2}, {"projection_dim": 20}),
    "CLIP, GELU": ("CLIP", {"hidden_act": "gelu"}, {"projection_dim": 20}),
    "SigLIP": ("Siglip", {"projection_size": 32}, {}),
}


@pytest.mark.parametrize("case", TEXT_TOWERS)
def test_embeddings_and_logits_of_two_towers_are_those_of_transformers(tmp_path, case):
    name, text, more = TEXT_TOWERS[case]
    towers = {"vision_config": SIZES, "text_config": WORDS | text} | more
    network = create(f"{name}Model", f"{name}Config", towers)
    torch.nn.init.constant_(network.logit_scale, 1.3)
    network.save_pretrained(tmp_path / "theirs")
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 298, (4, 9))
    tokens[:, 0], tokens[0, 5:], tokens[1:, 8] = 298, 299, 299
    images = rng.normal(size=(3, 32, 32, 3)).astype(np.float32)

    def run(network):
        with torch.no_grad():
            return network(torch.from_numpy(tokens), to_torch(images))

    theirs, found = run(network), weights.open_pretrained(tmp_path / "theirs")
    tower, model = text_tower(found), models.create(**found.options)
    features = jax.jit(model.apply)(found.params, images)["pre_logits"]
    ours = tower.embed_images(features)
    texts = tower.embed_tokens(tokens.astype(np.int32))
    np.testing.assert_allclose(ours, theirs.image_embeds.numpy(), atol=2e-6)
    np.testing.assert_allclose(texts, theirs.text_embeds.numpy(), atol=2e-6)
    wanted = theirs.logits_per_image.numpy()
    limit = 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(tower.logits(ours, texts), wanted, atol=limit)

    export.export(found, "hf_clip", tmp_path / "ours")
    again, info = type(network).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    np.testing.assert_array_equal(run(again.eval()).logits_per_image, wanted)
    stated = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert stated["architectures"] == [type(network).__name__]
    if case == "CLIP":  # As of a run with task.loss="sigmoid".
        bias = {"logit_bias": np.full(1, -3, np.float32)}
        sigmoid = dataclasses.replace(found, task_params=found.task_params | bias)
        _, notes = export.export(sigmoid, "hf_clip", tmp_path / "sigmoid")
        assert any("bias of the similarities, -3: left out" in note for note in notes)
        again = type(network).from_pretrained(tmp_path / "sigmoid")
        np.testing.assert_array_equal(run(again.eval()).logits_per_image, wanted)
    # Without a place for the text tower, the lines that load the result know.
    tower = found.task["text"] | {"pool": "first"}
    lost = dataclasses.replace(found, task=found.task | {"text": tower})
    _, notes = export.export(lost, "hf_clip", tmp_path / "image")
    assert any(note.startswith("text tower: left out") for note in notes)
    lines = export.usage("hf_clip", lost, str(tmp_path / "image"))
    name = f"{type(network).__name__.removesuffix('Model')}VisionModel"
    assert f"{name}.from_pretrained" in lines
    getattr(transformers, name).from_pretrained(tmp_path / "image")

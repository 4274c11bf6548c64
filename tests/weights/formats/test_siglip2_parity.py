"""Siglip2 of transformers, read and written again; needs the extra `parity`."""

import json

import jax
import numpy as np
import patch_sequences
import pytest
from helpers import photograph
from import_timm import import_timm, torch
from PIL import Image
from trees import edit_config

import vit_jax
from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import export
from vit_jax.weights.text_tower import text_tower

pytestmark = pytest.mark.parity
import_timm()  # transformers imports torchvision, as timm does.
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: extra parity"
)

SIDE = 4
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": SIDE,
    "num_patches": 16,
}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "projection_size": 24,
}
TOWERS = {"vision_config": VISION, "text_config": TEXT}
NETWORKS = {
    "both towers": ("Siglip2Model", "Siglip2Config", TOWERS),
    "image tower": ("Siglip2VisionModel", "Siglip2VisionConfig", VISION),
    "no head, 4 channels, quick GELU": (
        *("Siglip2VisionModel", "Siglip2VisionConfig"),
        VISION
        | {"vision_use_head": False, "num_channels": 4, "hidden_act": "quick_gelu"},
    ),
    "classifier": (
        *("Siglip2ForImageClassification", "Siglip2Config"),
        TOWERS | {"num_labels": 3},
    ),
}
TOKENS = np.random.default_rng(2).integers(3, 50, (4, 7))


def create(name, config, values):
    torch.manual_seed(5)
    network = getattr(transformers, name)(getattr(transformers, config)(**values))
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn_like(value) * 0.2)
    return network.eval()


def run(network, sequences):
    """Returns logits, or else the features that our `pre_logits` are."""
    pixels = sequences.pixels.reshape(*patch_sequences.valid().shape, -1)
    images = {
        "pixel_values": torch.from_numpy(pixels),
        "pixel_attention_mask": torch.from_numpy(patch_sequences.valid().astype(int)),
        "spatial_shapes": torch.from_numpy(sequences.grids[:, 0].astype(int)),
    }
    with torch.no_grad():
        if hasattr(network, "text_model"):
            return network(torch.from_numpy(TOKENS), **images)
        found = network(**images)
    if hasattr(found, "logits"):
        return found.logits.numpy()
    if found.pooler_output is not None:
        return found.pooler_output.numpy()
    valid = patch_sequences.valid()[..., None]
    return (found.last_hidden_state.numpy() * valid).sum(1) / valid.sum(1)


@pytest.mark.parametrize("case", NETWORKS)
def test_siglip2_is_the_same_at_five_aspect_ratios_and_when_written_again(
    tmp_path, case
):
    network = create(*NETWORKS[case])
    network.save_pretrained(tmp_path / "theirs")
    found = weights.open_pretrained(tmp_path / "theirs")
    assert found.options["posemb_resize"] == "bilinear"
    model = models.create(**found.options)
    assert model.grid == (4, 4)
    sequences = patch_sequences.draw(SIDE, found.options["channels"])
    theirs = run(network, sequences)
    ours = jax.jit(model.apply)(found.params, sequences)
    if case == "both towers":
        tower = text_tower(found)
        images = tower.embed_images(ours["pre_logits"])
        texts = tower.embed_tokens(TOKENS.astype(np.int32))
        np.testing.assert_allclose(images, theirs.image_embeds, atol=1e-5)
        np.testing.assert_allclose(texts, theirs.text_embeds, atol=1e-5)
        theirs = theirs.logits_per_image.numpy()
        ours = tower.logits(images, texts)
    else:
        ours = ours["logits" if found.options["num_classes"] else "pre_logits"]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())

    export.export(found, "hf_siglip2", tmp_path / "ours")
    stated = json.loads((tmp_path / "ours/config.json").read_text())
    assert stated["architectures"] == [NETWORKS[case][0]]
    again, info = type(network).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    same = run(again.eval(), sequences)
    same = same.logits_per_image.numpy() if case == "both towers" else same
    np.testing.assert_array_equal(same, theirs)


def test_a_classifier_of_ours_is_loaded_with_its_labels(tmp_path):
    network = create(*NETWORKS["classifier"])
    network.config.id2label = {0: "crane", 1: "tench", 2: "wren"}
    network.save_pretrained(tmp_path / "a")
    found = weights.open_pretrained(tmp_path / "a")
    assert found.class_names == ("crane", "tench", "wren")
    export.export(found, "hf_siglip2", tmp_path / "b")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "b")
    assert again.config.id2label[1] == "tench"


def test_pixels_of_their_image_processor_have_their_features(tmp_path):
    network = create(*NETWORKS["image tower"])
    network.save_pretrained(tmp_path)
    options = {"patch_size": SIDE, "max_num_patches": 30, "image_std": [0.2, 0.3, 0.4]}
    # The one without torchvision, whose compiled operators may be missing.
    from transformers.models.siglip2 import image_processing_pil_siglip2

    theirs = image_processing_pil_siglip2.Siglip2ImageProcessorPil(**options)
    theirs.save_pretrained(tmp_path)
    found = weights.open_pretrained(tmp_path)
    assert found.preprocess.max_tokens == 30
    assert found.preprocess.std == (0.2, 0.3, 0.4)
    model = vit_jax.load_model(tmp_path, tell=lambda line: None)
    for height, width in ((60, 80), (97, 31), (200, 50)):
        image = photograph(height, width)
        inputs = theirs(Image.fromarray(image), return_tensors="pt")
        with torch.no_grad():
            expected = network(**inputs).pooler_output.numpy()
        np.testing.assert_allclose(model.features(image), expected, atol=1e-4)

    export.export(found, "hf_siglip2", tmp_path / "ours")
    again = transformers.AutoImageProcessor.from_pretrained(
        tmp_path / "ours", backend="pil"
    )
    for key in ("patch_size", "max_num_patches", "image_mean", "image_std", "resample"):
        assert getattr(again, key) == getattr(theirs, key), key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "siglip3"}, "model_type='siglip3' in config.json is"),
        ({"patch_size": 5}, "patch_size=5 in config.json"),
    ],
)
def test_configs_of_other_networks_are_refused(tmp_path, changes, message):
    create(*NETWORKS["image tower"]).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        weights.open_pretrained(tmp_path)

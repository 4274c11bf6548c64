"""CLIP and SigLIP with their text towers, against transformers."""

import json

import jax
import numpy as np
import pytest
from import_timm import import_timm, torch

from vit_jax import models, weights
from vit_jax.weights.formats.registry import WRITERS
from vit_jax.weights.text_tower import text_tower

pytestmark = pytest.mark.parity
import_timm()  # transformers imports torchvision, as timm does.
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: extra parity"
)

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 300,
    "max_position_embeddings": 9,
    "bos_token_id": 298,
}
CASES = {
    "CLIP": ("CLIP", TEXT | {"eos_token_id": 299}, {"projection_dim": 20}),
    "CLIP, old config": ("CLIP", TEXT | {"eos_token_id": 2}, {"projection_dim": 20}),
    "CLIP, GELU": (
        *("CLIP", TEXT | {"eos_token_id": 299, "hidden_act": "gelu"}),
        {"projection_dim": 20},
    ),
    "SigLIP": ("Siglip", TEXT | {"projection_size": 32}, {}),
}


def create(name, text, more):
    config = getattr(transformers, f"{name}Config")(
        vision_config=VISION, text_config=text, **more
    )
    network = getattr(transformers, f"{name}Model")(config)
    torch.manual_seed(5)
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn_like(value) * 0.2)
        network.logit_scale.fill_(1.3)
    return network.eval()


@pytest.mark.parametrize("case", CASES)
def test_embeddings_and_logits_are_those_of_transformers(tmp_path, case):
    network = create(*CASES[case])
    (tmp_path / "theirs").mkdir()
    network.save_pretrained(tmp_path / "theirs")
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 298, (4, 9))
    tokens[:, 0], tokens[0, 5:], tokens[1:, 8] = 298, 299, 299
    images = rng.normal(size=(3, 32, 32, 3)).astype(np.float32)
    with torch.no_grad():
        found = network(
            input_ids=torch.from_numpy(tokens),
            pixel_values=torch.from_numpy(images.transpose(0, 3, 1, 2).copy()),
        )
    pretrained = weights.open_pretrained(tmp_path / "theirs")
    _compare(pretrained, images, tokens, found)

    (tmp_path / "ours").mkdir()
    WRITERS["hf_clip"].write(pretrained, tmp_path / "ours")
    again, info = type(network).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        same = again.eval()(
            input_ids=torch.from_numpy(tokens),
            pixel_values=torch.from_numpy(images.transpose(0, 3, 1, 2).copy()),
        )
    np.testing.assert_array_equal(same.logits_per_image, found.logits_per_image)
    stated = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert stated["architectures"] == [type(network).__name__]


def _compare(pretrained, images, tokens, found):
    tower = text_tower(pretrained)
    model = models.create(**pretrained.options)
    features = model.apply(pretrained.params, jax.numpy.asarray(images))["pre_logits"]
    ours = tower.embed_images(features)
    texts = tower.embed_tokens(tokens.astype(np.int32))
    for mine, theirs in ((ours, found.image_embeds), (texts, found.text_embeds)):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=2e-6)
    wanted = found.logits_per_image.numpy()
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(tower.logits(ours, texts), wanted, atol=1e-5 * scale)

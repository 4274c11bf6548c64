"""Few-shot evaluation on timm's features of the same images: the same predictions.

Needs the extra `parity`.
"""

import numpy as np
import pytest
from import_timm import import_timm, torch
from safetensors.numpy import save_file

from vit_jax.config import loading
from vit_jax.data.config import DataConfig
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.open import open_unchecked
from vit_jax.evaluators import checkpoint, fewshot
from vit_jax.training import config as configuration
from vit_jax.weights import open_pretrained

pytestmark = pytest.mark.parity
SHOTS, SEEDS, L2 = (1, 5, 10, 25), 20, 1024.0


def their_features(model, images):
    x = (images.astype(np.float32) / 255 - 0.5) / 0.5
    with torch.no_grad():
        features = model.forward_features(torch.from_numpy(x.transpose(0, 3, 1, 2)))
        return model.forward_head(features, pre_logits=True).numpy()


def test_a_small_vit_on_digits_agrees_to_the_last_image(tmp_path):
    timm = import_timm()
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=24, depth=2,
        num_heads=3, mlp_ratio=2, global_pool="avg",
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "timm.safetensors")

    spec = {"kind": "fewshot", "shots": SHOTS, "seeds": SEEDS, "l2": (L2,)}
    spec |= {"train": "train", "test": "test"}
    raw = {"batch_size": 64, "data": {"name": "digits"}, "evals": {"few": spec}}
    config = loading.complete(configuration.EvaluationConfig, raw)
    preprocess = Preprocess((8, 8), (0.5,), (0.5,), squash=True)
    pretrained = open_pretrained(tmp_path / "timm.safetensors", num_heads=3)
    found = checkpoint.evaluate(pretrained, preprocess, config).scores["few"]["weights"]

    data = DataConfig(name="digits", num_classes=10, channels=1)
    sources = [open_unchecked(data, split) for split in ("train", "test")]
    train, test = (their_features(model, source.images) for source in sources)
    known, wanted = (source.labels for source in sources)
    for shots in SHOTS:
        tops = []
        for seed in range(SEEDS):
            rows = fewshot.draw(known, shots, seed, 10)
            support = train[rows], known[rows]
            (top,) = fewshot.accuracies(support, (test, wanted), 10, [L2])
            tops.append(top)
        # To the last image: the mean of twenty fractions of so many images.
        images = len(wanted) * SEEDS
        assert round(found[f"{shots}shot"] * images) == round(np.mean(tops) * images)
        assert found[f"{shots}shot_std"] == pytest.approx(np.std(tops, ddof=1))
    assert len(set(tops)) > 1

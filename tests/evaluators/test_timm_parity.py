"""Few-shot evaluation on timm's features of the same images: the same predictions.

Needs the extra `parity`.
"""

import dataclasses

import numpy as np
import pytest
from import_timm import import_timm, torch
from safetensors.numpy import save_file

from vit_jax.config import loading
from vit_jax.data.config import DataConfig
from vit_jax.evaluators import fewshot, splits, suite
from vit_jax.training import config as configuration
from vit_jax.weights import open_pretrained
from vit_jax.weights.pretrained import Preprocess, per_channel

pytestmark = pytest.mark.parity
SHOTS, SEEDS, L2 = (1, 5, 10, 25), 20, 1024.0


@pytest.fixture(scope="module")
def timm():
    return import_timm()


def ours_and_theirs(place, their_model, preprocess, data, batch_size):
    """Takes both networks over the same pixels of the train and the test split.

    Returns:
      Two pairs of (train, test) features, and the labels of both splits.
    """
    found = open_pretrained(place, num_heads=3)
    spec = {"kind": "fewshot", "shots": SHOTS, "seeds": SEEDS, "l2": (L2,)}
    spec |= {"train": data.pop("train"), "test": data.pop("test")}
    config = loading.complete(
        configuration.EvaluationConfig,
        {"batch_size": batch_size, "data": data, "evals": {"few": spec}},
    )
    scores = suite.evaluate(found, preprocess, config)[0]

    channels = found.options["channels"]
    kept = DataConfig(
        **dataclasses.asdict(config.data),
        image_size=preprocess.image_size,
        channels=channels,
        num_classes=1,
    )
    opened = splits.EvalSplits(kept, preprocess)
    mean, std = (
        np.array(per_channel(v, channels), np.float32)
        for v in (preprocess.mean, preprocess.std)
    )
    theirs, labels = [], []
    for split in (spec["train"], spec["test"]):
        reading = opened.open("few", config.evals["few"], split, model_classes=False)
        with reading.batches(None, batch_size, 0, 1) as batches:
            rows = [
                (their_features(their_model, (b["image"] / 255 - mean) / std), b)
                for b in batches
            ]
        theirs.append(np.concatenate([x[b["mask"]] for x, b in rows]))
        labels.append(np.concatenate([b["label"][b["mask"]] for _, b in rows]))
    return scores["few"]["weights"], theirs, labels


def their_features(model, images):
    images = torch.from_numpy(images.astype(np.float32).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        features = model.forward_features(images)
        return model.forward_head(features, pre_logits=True).numpy()


def assert_same_accuracies(found, features, labels, num_classes):
    (train, test), (known, wanted) = features, labels
    for shots in SHOTS:
        tops = []
        for seed in range(SEEDS):
            rows = fewshot.draw(known, shots, seed, num_classes)
            support = train[rows], known[rows]
            (top,) = fewshot.accuracies(support, (test, wanted), num_classes, [L2])
            tops.append(top)
        # To the last image: the mean of twenty fractions of so many images.
        assert round(found[f"{shots}shot"] * len(wanted) * SEEDS) == round(
            np.sum(tops) * len(wanted)
        )
        assert found[f"{shots}shot_std"] == pytest.approx(np.std(tops, ddof=1))
    assert len(set(tops)) > 1


def test_a_small_vit_on_digits_agrees_to_the_last_image(timm, tmp_path):
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
    data = {"name": "digits", "train": "train", "test": "test"}
    preprocess = Preprocess((8, 8), (0.5,), (0.5,), squash=True)
    place = tmp_path / "timm.safetensors"
    found = ours_and_theirs(place, model, preprocess, data, 64)
    assert_same_accuracies(*found, num_classes=10)

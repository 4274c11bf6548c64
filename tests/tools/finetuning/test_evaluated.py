"""Scores of all images of several runs together."""

import numpy as np
import pytest
from sklearn import metrics

from vit_jax.evaluators.forward_passes import Outputs
from vit_jax.models.targets import Targets
from vit_jax.tools.finetuning.evaluated import SplitOutputs
from vit_jax.tools.finetuning.labelled import Labels
from vit_jax.tools.finetuning.numbers import Numbers

SIZES = (11, 7, 13)


def seen(logits, targets=None, **values):
    outputs = Outputs(np.arange(len(logits)), logits=logits, **values)
    return SplitOutputs(outputs, None, targets)


def test_recalls_of_folds_are_those_of_all_images():
    rng = np.random.default_rng(0)
    runs, pairs = [], []
    for count in SIZES:
        logits = rng.normal(size=(count, 3)).astype(np.float32)
        labels = rng.integers(0, 3, count)
        runs.append(seen(logits, labels=labels))
        pairs.append((labels, logits.argmax(1)))
    found = Labels(multi_label=False).score_all(runs)
    true, predicted = map(np.concatenate, zip(*pairs, strict=True))
    recalls = metrics.recall_score(true, predicted, average=None)
    assert found["worst_class_recall"] == pytest.approx(recalls.min())
    assert found["balanced_accuracy"] == pytest.approx(recalls.mean())
    assert found["examples"] == sum(SIZES)
    assert Labels(multi_label=True).score_all(runs) == {}


def test_numbers_of_folds_have_an_interval_of_all_images():
    rng = np.random.default_rng(0)
    runs, pairs = [], []
    for fold, count in enumerate(SIZES):
        true = rng.normal(40, 9, (count, 1))
        logits = rng.normal(size=(count, 1))
        mean, std = 30.0 + fold, 5.0 + fold  # Those of the fold's training images.
        targets = Targets(("age",), ("",), "mse", (mean,), (std,))
        runs.append(seen(logits, targets, fields={"targets": true}))
        pairs.append((true, mean + std * logits))
    found = Numbers(("age",)).score_all(runs)
    true, predicted = map(np.concatenate, zip(*pairs, strict=True))
    assert found["rmse"] == pytest.approx(
        metrics.root_mean_squared_error(true, predicted)
    )
    assert found["mae_low"] < found["mae"] < found["mae_high"]
    assert found["examples"] == sum(SIZES)

"""Balanced classes: how often each is drawn, and that a position fixes the record."""

import dataclasses

import numpy as np
import pytest
from helpers import kill_after, tiny_config, train

import vit_jax
from vit_jax.data import pipeline
from vit_jax.data.order import Balance, class_weights
from vit_jax.data.sources.open import open_source, open_unchecked
from vit_jax.errors import UserError

COUNTS = np.array([400, 100, 0, 25, 4])
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), COUNTS))


def drawn(how, epochs, seed=7):
    positions = np.arange(epochs * len(LABELS))
    return Balance.of(how, LABELS).records_at(positions, seed)


def shares(how):
    counts = COUNTS[COUNTS > 0].astype(float)
    if how == "inverse":
        weights = np.ones(4)
    elif how == "sqrt":
        weights = np.sqrt(counts)
    else:
        beta = 1 - 1 / counts.sum()
        weights = counts * (1 - beta) / (1 - beta**counts)
    return weights / weights.sum()


@pytest.mark.parametrize("how", ["inverse", "sqrt", "effective"])
def test_each_epoch_has_its_part_of_every_class(how):
    epochs = drawn(how, 4).reshape(4, -1)
    for epoch in epochs:
        found = np.bincount(LABELS[epoch], minlength=5)
        assert found[2] == 0
        expected = shares(how) * len(LABELS)
        np.testing.assert_allclose(found[COUNTS > 0], expected, atol=1)
    assert (epochs[0] != epochs[1]).mean() > 0.9


@pytest.mark.parametrize("how", ["inverse", "sqrt", "effective"])
def test_weights_do_what_drawing_does(how):
    weights = np.array(class_weights(how, LABELS, 6))
    there = COUNTS > 0
    expected = shares(how) * len(LABELS) / COUNTS[there]
    np.testing.assert_allclose(weights[:5][there], expected)
    assert weights[[2, 5]].tolist() == [1.0, 1.0]  # Without images.
    assert weights[LABELS].mean() == pytest.approx(1)


@pytest.mark.parametrize("task", ["classification", "linear_probe", "lora"])
def test_weights_by_the_numbers_of_images_are_those_that_are_stated(task):
    data = {"name": "digits", "num_classes": 10, "num_examples": 0, "channels": 1}
    config = tiny_config(data=data, task={"name": task, "class_weights": "inverse"})
    source = open_source(config.data, "train[:100]")
    weights = class_weights("inverse", source.labels, 10)
    stated = dataclasses.replace(config.task, class_weights=weights)
    assert config.task.of_records(config.data, source) == stated


def test_within_a_class_all_are_drawn_as_often():
    records = drawn("inverse", 6)
    for number in np.flatnonzero(COUNTS):
        found = np.bincount(records[LABELS[records] == number], minlength=len(LABELS))
        found = found[LABELS == number]
        assert found.max() - found.min() <= 1
        assert found.min() > 0


def test_a_position_fixes_the_record_and_the_seed_counts():
    whole = drawn("sqrt", 3)
    some = np.array([1, 600, 1400, 30])
    balance = Balance.of("sqrt", LABELS)
    np.testing.assert_array_equal(balance.records_at(some, 7), whole[some])
    assert (drawn("sqrt", 1, seed=8) != whole[: len(LABELS)]).mean() > 0.5
    twice = balance.records_at(np.arange(100), 7, repeats=2)
    np.testing.assert_array_equal(twice[::2], twice[1::2])


@pytest.mark.slow
def test_batches_are_balanced_and_a_run_resumes_exactly(tmp_path):
    config = tiny_config(
        data={"name": "digits", "num_classes": 10, "class_balance": "inverse"}
        | {"split": "train[:300]", "num_examples": 0, "channels": 1}
        | {"image_size": (8, 8), "train_transform": "", "eval_transform": ""},
        task={"class_weights": "sqrt"},
        evals={},
    )
    source = open_source(config.data, config.data.split)
    with pipeline.train_batches(
        source, config.data, batch_size=100, seed=0, start=0, stop=3
    ) as batches:
        labels = np.concatenate([batch["label"] for batch in batches])
    assert np.bincount(labels).tolist() == [30] * 10
    report = train(config, tmp_path)
    kill_after(3, tmp_path)
    again = train(config, tmp_path)
    assert again["params_sha256"] == report["params_sha256"]


def test_labels_are_needed():
    balance = {"class_balance": "sqrt"}
    for sections, match in (
        (
            {"data": balance | {"num_classes": 0}},
            "class_balance='sqrt' needs one class",
        ),
        (
            {"data": balance | {"multi_label": True}},
            "class_balance='sqrt' needs one cl",
        ),
        ({"task": {"class_weights": "root"}}, "class_weights='root' is not one of inv"),
    ):
        with pytest.raises(UserError, match=match):
            tiny_config(**sections)
    task = {"class_weights": "sqrt"}
    with pytest.raises(UserError, match="class_weights='sqrt' .*numbers of images"):
        vit_jax.train_setup(tiny_config(task=task), 20)
    digits = {"name": "digits", "num_classes": 4, "channels": 1, "num_examples": 0}
    for config, match in (
        (
            tiny_config(data={"multi_label": True}, task=task | {"loss": "sigmoid"}),
            "class_weights='sqrt' .* data.multi_label=True",
        ),
        (tiny_config(data=digits, task=task), "has label 9, but data.num_classes=4"),
    ):
        source = open_unchecked(config.data, "train")
        with pytest.raises(UserError, match=match):
            config.task.of_records(config.data, source)

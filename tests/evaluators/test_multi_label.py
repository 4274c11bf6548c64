"""Several labels an image: scores, a run, its predictions and what is exported."""

import json

import jax
import numpy as np
import pytest
from helpers import run_command
from PIL import Image
from sklearn import metrics

import vit_jax
from vit_jax.config import lengths
from vit_jax.errors import UserError
from vit_jax.evaluators import multi_label
from vit_jax.tasks import classification
from vit_jax.training import config as configuration
from vit_jax.training import loop

RUN = lengths.RunLength(1, 1.0)


@pytest.mark.parametrize("decimals", [1, 8])  # Of one decimal many are equal.
def test_scores_are_those_of_scikit_learn(decimals):
    rng = np.random.default_rng(decimals)
    labels = (rng.random((200, 6)) < [0.5, 0.3, 0.1, 0.02, 0.9, 0.0]).astype(np.int32)
    logits = (rng.normal(size=(200, 6)) + labels).round(decimals).astype(np.float32)
    found = multi_label.score(logits, labels, (0.5, 0.7), tuple("abcdef"))
    occurs = labels.any(0)
    assert occurs.tolist() == [True] * 5 + [False]
    one_by_one = [
        metrics.average_precision_score(labels[:, k], logits[:, k]) for k in range(5)
    ]
    np.testing.assert_allclose(
        [found[f"ap/{c}"] for c in "abcde"], one_by_one, rtol=1e-6
    )
    assert "ap/f" not in found
    assert found["map"] == pytest.approx(np.mean(one_by_one), rel=1e-6)
    for threshold in (0.5, 0.7):
        there = 1 / (1 + np.exp(-logits.astype(float))) >= threshold
        for kind in ("macro", "micro"):
            columns = occurs if kind == "macro" else slice(None)
            expected = metrics.f1_score(
                labels[:, columns], there[:, columns], average=kind, zero_division=0
            )
            assert found[f"{kind}_f1@{threshold:g}"] == pytest.approx(expected)
    bce = [metrics.log_loss(labels[:, k], _sigmoid(logits[:, k])) for k in range(5)]
    bce.append(-np.log(1 - _sigmoid(logits[:, 5])).mean())
    assert found["loss"] == pytest.approx(sum(bce), rel=1e-5)
    assert found["examples"] == 200


def _sigmoid(logits):
    return 1 / (1 + np.exp(-logits.astype(float)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on images whose halves are red, green or neither; with its report."""
    root = tmp_path_factory.mktemp("pairs")
    rng, rows = np.random.default_rng(0), []
    for i in range(80):
        pixels = rng.integers(0, 60, (16, 16, 3), np.uint8)
        red, green = rng.random(2) < 0.5
        pixels[:, :8, 0] += 190 * np.uint8(red)
        pixels[:, 8:, 1] += 190 * np.uint8(green)
        Image.fromarray(pixels).save(root / f"{i}.png")
        labels = [name for name, there in (("red", red), ("green", green)) if there]
        split = "train" if i < 60 else "val"
        rows.append({"image": f"{i}.png", "label": labels, "split": split})
    table = root / "photos.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "name": "pairs",
        "total_steps": 40,
        "batch_size": 16,
        "data": {
            "name": "table",
            "data_dir": str(table),
            "num_classes": 2,
            "multi_label": True,
            "image_size": (16, 16),
        },
        "model": {"variant": "Ti/8", "width": 24, "depth": 1, "num_heads": 2},
        "checkpoint_every_steps": 1_000,
        "task": {"loss": "sigmoid"},
        "optim": {"learning_rate": 0.006},
        "ema": {"decay": 0.0},
        "evals": {"val": {"kind": "multi_label", "thresholds": (0.5, 0.9)}},
        "checkpoint": {"best_metric": "val/map"},
        "eval_every_steps": 20,
    }
    report = loop.train(configuration.complete(raw), root / "run")
    return root, rows, report


@pytest.mark.slow
def test_a_run_learns_both_labels(run):
    _, _, report = run
    scores = report["final"]["val"]["params"]
    assert scores["map"] > 0.95
    assert {"ap/red", "ap/green", "macro_f1@0.9", "micro_f1@0.5"} <= scores.keys()
    assert report["best"]["score"] == scores["map"]


@pytest.mark.slow
def test_predictions_are_all_labels_above_the_threshold(run, tmp_path, capsys):
    root, rows, _ = run
    exported = tmp_path / "pairs.safetensors"
    arguments = ["--model", str(root / "run"), "--out", str(exported)]
    run_command("convert", [*arguments, "--to", "safetensors"])
    images = [str(root / row["image"]) for row in rows[60:]]
    truth = [set(row["label"]) for row in rows[60:]]
    assert {len(labels) for labels in truth} == {0, 1, 2}
    for place in (root / "run", exported):
        model = vit_jax.load_model(str(place), tell=lambda line: None)
        found = [{one.name for one in image} for image in model.predict(images)]
        right = np.mean([one == other for one, other in zip(found, truth, strict=True)])
        assert right > 0.8
        assert all(len(image) == 2 for image in model.predict(images, threshold=0.0))
    capsys.readouterr()
    none = images[next(i for i, labels in enumerate(found) if not labels)]
    assert run_command("predict", ["--model", str(exported), none]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [none, "none"]
    run_command("predict", ["--model", str(exported), "--threshold=0", "--json", none])
    assert len(json.loads(capsys.readouterr().out)["predictions"]) == 2


@pytest.mark.slow
def test_a_part_of_the_classes_is_scored_alone(run, capsys):
    root, rows, report = run
    table = root / "green.jsonl"
    known = [r | {"label": [n for n in r["label"] if n == "green"]} for r in rows]
    table.write_text("".join(json.dumps(row) + "\n" for row in known))
    config = {
        "data": {"name": "table", "data_dir": str(table), "multi_label": True},
        "evals": {"val": {"kind": "multi_label", "split": "val"}},
        "batch_size": 16,
    }
    found = vit_jax.evaluate(str(root / "run"), config)["val"]["weights"]
    expected = report["final"]["val"]["params"]["ap/green"]
    assert found["ap/green"] == found["map"] == pytest.approx(expected)
    assert found["macro_f1@0.5"] == found["micro_f1@0.5"]
    assert "ap/red" not in found
    assert "1 of the model's 2 classes, matched by names" in capsys.readouterr().out


def built(task, **data):
    """Returns the task of a config."""
    raw = {"total_steps": 1, "batch_size": 4, "model": {"variant": "Ti/8"}}
    raw |= {"optim": {"learning_rate": 0.1}, "task": task}
    raw["data"] = {"name": "synthetic", "num_classes": 3, "image_size": (16, 16)} | data
    config = configuration.complete(raw)
    return config.task.build(config.build_model(), config.data, RUN)


@pytest.mark.parametrize(
    "task", ["classification", "distillation", "linear_probe", "lora"]
)
def test_what_does_not_fit_is_refused(task):
    with pytest.raises(UserError, match=r"multi_label=True: set task\.loss='sigmoid'"):
        built({"name": task}, multi_label=True)
    with pytest.raises(UserError, match="class_weights has 2 numbers"):
        built({"name": task, "class_weights": (1.0, 2.0)})


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_class_weights_weigh_images_or_terms(loss):
    logits = jax.random.normal(jax.random.key(0), (4, 3))
    labels = jax.nn.one_hot(np.array([0, 1, 2, 1]), 3)

    def of(*weights):
        task = built({"loss": loss, "class_weights": weights})
        batch = {"label": labels}
        if loss == "softmax" and len(weights) > 1:
            batch["weight"] = task.image_weights(labels)
        return float(task.base_loss(logits, batch))

    assert of(1.0, 1.0, 1.0) == pytest.approx(of(1.0), rel=1e-6)
    each = np.asarray(classification.softmax(logits, labels))
    if loss == "softmax":  # As torch's cross-entropy with weights.
        expected = (each * [1, 3, 2, 3]).sum() / 9
    else:
        terms = np.logaddexp(0, np.where(labels > 0, -logits, logits))
        expected = (terms * [1, 3, 2]).sum(1).mean()
    assert of(1.0, 3.0, 2.0) == pytest.approx(float(expected), rel=1e-5)

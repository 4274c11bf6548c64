"""Regression: losses against references, missing numbers, mixing, microbatches, devices."""

import dataclasses
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    TINY,
    assert_same_training,
    begin,
    draw_params,
    kill_after,
    tiny_config,
    train,
    trained_on,
)
from scipy import stats

import vit_jax
from vit_jax import models, weights
from vit_jax.config import loading
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.arrays import IN_MEMORY, open_arrays
from vit_jax.data.sources.open import open_source, opened_by
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint
from vit_jax.models.targets import LOSSES, Targets
from vit_jax.tasks.regression import RegressionConfig, cumulative_link
from vit_jax.training.config import EvaluationConfig
from vit_jax.weights import export

N, SIZE = 20, (8, 12)
AGES = np.linspace(10, 67, N)


def made():
    """Returns images that are brighter the older, and ages and grades, some missing."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 9, (N, *SIZE, 3))
    images = (3.5 * AGES[:, None, None, None] + noise).clip(0, 255).astype(np.uint8)
    targets = np.stack([AGES, np.arange(N) % 3 + 1.0], 1)
    targets[::3, 1] = targets[4, 0] = targets[5] = np.nan
    return images, targets


@pytest.fixture(autouse=True, scope="module")
def _arrays():
    images, targets = made()

    def open_source(data, split, _):
        columns = targets[:, : len(data.targets)]
        pair = images, columns
        parts = {"train": pair, "val": pair}
        return open_arrays(parts, split, "people", num_targets=len(data.targets))

    with opened_by(open_source):
        yield


def config(target_key="age", **sections):
    data = {"name": IN_MEMORY, "target_key": target_key, "num_classes": 0}
    data |= {"num_examples": N, "image_size": SIZE} | sections.pop("data", {})
    task = {"name": "regression"} | sections.pop("task", {})
    evals = {"val": {"kind": "regression", "split": "val", "resamples": 50}}
    return tiny_config(data=data, task=task, **{"evals": evals} | sections)


def build(loss="mse", names="age,grade", levels=(), transform="", **task):
    data = DataConfig(target_key=names, image_size=SIZE, train_transform=transform)
    keys = {"loss": loss, "mean": (30.0, 2.0), "std": (10.0, 0.5)} | task
    made = RegressionConfig(**keys, levels=levels)
    model = models.create(
        "Ti/4", num_classes=made.num_logits(data), image_size=SIZE, **TINY
    )
    return made.build(model, data, RunLength(4, 1.0))


def long(**task):
    return config(
        total_steps=60,
        log_every_steps=20,
        checkpoint_every_steps=30,
        model={"variant": "Ti/4"},
        ema={"decay": 0.9},
        optim={"name": "adam", "learning_rate": 0.01},
        task=task,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the workdir and the result of a short run on one device."""
    workdir = tmp_path_factory.mktemp("regression") / "run"
    return workdir, train(long(loss="gaussian", unit="years"), workdir)


def test_a_run_that_was_killed_ends_with_the_same_bits(trained, tmp_path):
    workdir, whole = trained
    killed = shutil.copytree(workdir, tmp_path / "killed")
    kill_after(30, killed)
    again = train(long(loss="gaussian", unit="years"), killed)
    assert again["params_sha256"] == whole["params_sha256"]
    assert again["final"] == whole["final"]


def test_it_learns_and_gives_numbers_in_their_units(trained):
    workdir, done = trained
    scores = done["final"]["val"]["ema"]
    assert scores["r2"] > 0.9 and scores["examples"] == N - 2
    assert scores["mae_low"] < scores["mae"] < scores["mae_high"]
    model = vit_jax.load_model(workdir, tell=lambda line: None)
    images, targets = made()
    numbers = [one for (one,) in model.predict(images)]
    values = np.array([one.value for one in numbers])
    known = ~np.isnan(targets[:, 0])
    error = np.abs(values - targets[:, 0])[known].mean()
    assert error == pytest.approx(scores["mae"], rel=1e-3)
    np.testing.assert_allclose(model(images)[:, 0], values, rtol=1e-5)
    assert {(one.target, one.unit) for one in numbers} == {("age", "years")}
    assert all(one.low < one.value < one.high and one.sd > 0 for one in numbers)


def test_evaluating_weights_gives_the_scores_of_the_run(trained):
    workdir, done = trained
    pretrained = weights.open_pretrained(str(workdir), with_task=True)
    how = weights.preprocessing_of(pretrained)
    evals = {"val": {"kind": "regression", "split": "val", "resamples": 50}}
    raw = {"batch_size": 8, "data": {"name": IN_MEMORY}, "evals": evals}
    evaluation = loading.complete(EvaluationConfig, raw)
    scored = checkpoint.evaluate(pretrained, how, evaluation).scores
    expected = done["final"]["val"]["ema"]
    assert scored["val"]["weights"] == pytest.approx(expected, rel=1e-3)


def test_a_kept_classifier_predicts_the_same_with_other_statistics(trained, tmp_path):
    workdir, _ = trained
    pretrained = weights.open_pretrained(str(workdir), with_task=True)
    file = tmp_path / "model.safetensors"
    export.export(pretrained, "safetensors", file)
    images, _ = made()
    model = vit_jax.load_model(workdir, tell=lambda line: None)
    np.testing.assert_allclose(
        vit_jax.load_model(file, tell=lambda line: None)(images),
        model(images),
        rtol=1e-4,
    )
    for source in (workdir, file):
        init = {"checkpoint": str(source), "head": "keep"}
        task = {"loss": "gaussian", "mean": (3.0,), "std": (7.0,)}
        setup, state, notes = begin(config(init=init, task=task), tmp_path / "new")
        network = setup.task.backbone(state.params, state.extra)
        outputs = setup.model.apply(network, model.preprocess(images))["logits"]
        found = setup.task.targets.decode(np.asarray(outputs)).values
        np.testing.assert_allclose(found, model(images), rtol=1e-3)
        assert any(line.startswith("targets of the task: loaded") for line in notes)


def losses_of(task, values, logits):
    """Returns the loss of a batch, and the mean of the losses of its halves."""
    encoded, present = task.encode(jnp.asarray(values, jnp.float32))
    weight = jnp.full(len(values), len(values) / present.sum())

    def loss(rows):
        terms = jnp.where(present, task.terms(jnp.asarray(logits), encoded), 0)
        return float((terms.sum(1) * weight)[rows].mean())

    half = len(values) // 2
    return loss(slice(None)), (loss(slice(half)) + loss(slice(half, None))) / 2


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "gaussian"])
def test_losses_are_the_means_of_their_formulas_over_the_present_numbers(loss):
    rng = np.random.default_rng(1)
    values = np.array([[31.0, np.nan], [12.0, 3.0], [np.nan, np.nan], [90.0, 1.5]])
    logits = rng.normal(size=(4, 4 if loss == "gaussian" else 2)).astype(np.float32)
    terms = []
    for row, outputs in zip(values, logits, strict=True):
        for t, (mean, std) in enumerate(((30.0, 10.0), (2.0, 0.5))):
            if np.isnan(row[t]):
                continue
            true = (row[t] - mean) / std
            error = abs(outputs[t] - true)
            if loss == "gaussian":
                scale = math.exp(outputs[2 + t] / 2)
                terms.append(-stats.norm.logpdf(true, outputs[t], scale))
            elif loss == "huber":
                terms.append(error**2 / 2 if error < 0.7 else 0.7 * (error - 0.35))
            else:
                terms.append(error**2 if loss == "mse" else error)
    task = build(loss, **({"delta": 0.7} if loss == "huber" else {}))
    whole, halves = losses_of(task, values, logits)
    assert whole == pytest.approx(np.mean(terms), rel=1e-5)
    assert halves == pytest.approx(whole, rel=1e-6)
    assert losses_of(task, np.full((2, 2), np.nan), logits[:2])[0] != whole


def test_the_ordinal_loss_is_the_likelihood_of_a_cumulative_link_model():
    logits = np.array([[[2.0, 0.5, -1.0]]])
    above = np.append(1, 1 / (1 + np.exp(-logits[0, 0])))
    expected = -np.log(above - np.append(above[1:], 0))
    for level in range(4):
        one = np.eye(4)[level][None, None]
        found = float(cumulative_link(jnp.asarray(logits), jnp.asarray(one))[0, 0])
        assert found == pytest.approx(expected[level], rel=1e-5)
    crossed = jnp.asarray([[[-2.0, 3.0, 3.0]]])
    slope = jax.grad(lambda x: cumulative_link(x, jnp.eye(4)[None, None, 1]).sum())
    assert np.isfinite(slope(crossed)).all()
    assert slope(crossed)[0, 0, 0] < 0 < slope(crossed)[0, 0, 1]  # Which opens the gap.


def test_levels_share_a_kernel_and_begin_equally_likely():
    task = build(
        "ordinal", names="grade", levels=(1.0, 2.0, 5.0), mean=(0.0,), std=(1.0,)
    )
    params = draw_params(task.model)
    drawn = np.random.default_rng(0).normal(size=params["head"]["kernel"].shape)
    network = params | {"head": {"kernel": drawn, "bias": np.zeros(2)}}
    begun, _ = task.with_backbone(params, None, network)
    kernel, bias = begun["head"]["kernel"], begun["head"]["bias"]
    np.testing.assert_allclose(kernel[:, 0], kernel[:, 1])
    np.testing.assert_allclose(kernel[:, 0], drawn.mean(1), rtol=1e-5)
    decoded = task.targets.decode(np.asarray(bias, np.float64)[None])
    np.testing.assert_allclose(decoded.probabilities[0, 0], [1 / 3] * 3, rtol=1e-5)
    assert (decoded.values, decoded.low, decoded.high) == (2, 1, 5)
    trained = params | {"head": {"kernel": drawn, "bias": np.array([3.0, 1.0])}}
    kept, _ = task.with_backbone(params, None, trained)
    np.testing.assert_allclose(kept["head"]["bias"], [3.0, 1.0])


@pytest.mark.parametrize("loss", ["mse", "ordinal"])
def test_mixed_images_have_mixed_numbers_unless_one_is_missing(loss):
    levels = (10.0, 20.0) if loss == "ordinal" else ()
    how = {"mean": (0.0,), "std": (1.0,), "levels": levels}
    task = build(loss, names="age", transform="mixup(alpha=1.0)", **how)
    values = np.array([[10.0], [20.0], [np.nan], [10.0]], np.float32)
    images = np.broadcast_to(
        np.float32([0, 200, 40, 100])[:, None, None, None], (4, *SIZE, 3)
    )
    batch = {"image": images, "targets": values, "index": np.arange(4, dtype=np.uint32)}
    prepared = jax.jit(task.prepare)(batch, jax.random.key(3))
    # Each image is mixed with the one before it.
    np.testing.assert_array_equal(prepared["present"][:, 0], [True, True, False, False])
    share = 1 - (prepared["image"][0, 0, 0, 0] + 1) / 2 / (100 / 255)
    mixed = share * 10 + (1 - share) * 10, share * 20 + (1 - share) * 10
    encoded = np.asarray(prepared["targets"])
    found = encoded @ np.array(levels) if levels else encoded[:, 0]
    np.testing.assert_allclose(found[:2], mixed, rtol=1e-4)
    assert prepared["weight"].tolist() == [2.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gaussian", "ordinal"])
def test_microbatches_and_eight_devices_train_as_one(loss):
    keys = {"total_steps": 3, "target_key": "age,grade", "task": {"loss": loss}}
    whole = resolved(config(**keys, optim={"name": "adam", "learning_rate": 0.01}))
    one = trained_on(whole, 1)
    parts = {"name": "adam", "learning_rate": 0.01, "grad_accum_steps": 4}
    assert_same_training(trained_on(resolved(config(**keys, optim=parts)), 1), one)
    assert_same_training(trained_on(whole, 8), one)


def resolved(complete):
    """Returns a config with the statistics of the training images."""
    data = complete.data
    task = complete.task.of_records(data, open_source(data, "train"))
    return dataclasses.replace(complete, task=task)


def test_statistics_are_those_of_the_present_training_numbers_and_are_stored(trained):
    workdir, _ = trained
    _, targets = made()
    ages = targets[:, 0][~np.isnan(targets[:, 0])]
    found = weights.open_pretrained(str(workdir)).targets
    assert found.mean == pytest.approx((ages.mean(),), rel=1e-6)
    assert found.std == pytest.approx((ages.std(),), rel=1e-6)
    levels = resolved(config("age,grade", task={"loss": "ordinal"})).task.levels
    assert set(levels) == {*ages.tolist(), 2.0, 3.0}


@pytest.mark.parametrize("loss", LOSSES)
def test_outputs_in_units_are_decoded_to_the_same_numbers(loss):
    levels = (1.0, 2.0, 4.0) if loss == "ordinal" else ()
    targets = Targets(("a", "b"), ("kg", ""), loss, (30.0, -2.0), (10.0, 0.5), levels)
    rng = np.random.default_rng(2)
    head = {
        "kernel": rng.normal(size=(5, targets.num_outputs)),
        "bias": rng.normal(size=targets.num_outputs),
    }
    features = rng.normal(size=(7, 5))
    params, plain = targets.in_units({"head": head})
    assert (plain.mean, plain.std) == ((0.0, 0.0), (1.0, 1.0))
    pairs = [
        one.decode(features @ p["kernel"] + p["bias"])
        for one, p in ((targets, head), (plain, params["head"]))
    ]
    for name, first, second in zip(pairs[0]._fields, *pairs, strict=True):
        if first is not None:
            np.testing.assert_allclose(first, second, err_msg=name)
    in_jax = plain.decode(
        jnp.asarray(features @ params["head"]["kernel"] + params["head"]["bias"]), jnp
    )
    np.testing.assert_allclose(in_jax.values, pairs[1].values, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_key": ""}, "data.target_key=''"),
        ({"task": {"unit": "years,kg"}}, "task.unit has 2 values"),
        ({"task": {"mean": (1.0, 2.0)}}, "task.mean has 2 values"),
        ({"task": {"loss": "ordinal", "levels": (1.0, 2.0)}}, "task.levels lacks 10"),
        ({"task": {"loss": "ordinal", "levels": (2.0, 1.0)}}, "task.levels=.2.0, 1.0."),
        ({"target_key": "age,age"}, "data.target_key='age,age'"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        complete = config(**keys)
        complete.task.check(complete.data)
        resolved(complete)


def test_the_task_is_scored_on_images_that_it_is_not_trained_on(tmp_path):
    evals = {"val": {"kind": "task", "split": "val"}}
    evals["errors"] = {"kind": "regression", "split": "val", "resamples": 0}
    done = train(config(total_steps=2, evals=evals), tmp_path / "run")
    scores = {name: one["params"] for name, one in done["final"].items()}
    std = resolved(config()).task.std[0]
    # Images without a number have a loss of 0, and do not count in the errors.
    known = scores["errors"]["examples"] / N
    expected = (scores["errors"]["rmse"] / std) ** 2 * known
    assert scores["val"]["loss"] == pytest.approx(expected, rel=1e-3)

"""The best checkpoint by a metric, and early stopping: whole runs of a tiny model."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import sys

import numpy as np
import pytest
from helpers import kill_after, tiny_config, train

import vit_jax
from vit_jax.config.lengths import RunLength
from vit_jax.errors import Preempted, UserError
from vit_jax.evaluators.metric_names import lower_is_better
from vit_jax.training import loop, optim, sweep
from vit_jax.training.actions import BestCheckpoint, Evaluating
from vit_jax.training.checkpoint import Checkpointer
from vit_jax.training.metric_logger import MetricLogger
from vit_jax.weights import checkpoint_folders
from vit_jax.weights import workdir as workdirs

METRIC = "val/loss"


def make_config(**stated):
    """Six steps at a rate that makes the made data's loss fall, then rise."""
    stated = {
        "eval_every_steps": 1,
        "checkpoint": {"best_metric": METRIC, "max_to_keep": 1},
        "optim": {"learning_rate": 0.3, "warmup_steps": 0},
        "ema": {"decay": 0.0},
    } | stated
    return tiny_config(**stated)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("best") / "run"
    return workdir, train(make_config(), workdir)


def losses(workdir):
    """Step to what the evaluation of it gave."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    name = "val/params/loss"
    return {line["step"]: line[name] for line in lines if name in line}


def test_the_best_checkpoint_is_kept_reported_and_opened(base):
    workdir, report = base
    found = losses(workdir)
    best = min(found, key=found.get)
    assert best not in (0, 6), "the test needs a best step before the last"
    record = {"step": best, "metric": METRIC, "score": found[best]}
    assert report["best"] == checkpoint_folders.best(workdir) == record
    assert checkpoint_folders.steps(workdir) == [best, 6]  # The best, and the newest.
    assert report["final"]["val"]["params"]["loss"] == found[best]
    opened = workdirs.load(workdir)
    assert (opened.step, opened.best) == (best, record)
    note = workdirs.load_pretrained(workdir).notes[0]
    assert note == f"parameters of step {best}, best by val/loss ({found[best]:.4f})"


SLOW = (3, True), (5, False)


class KilledError(Exception):
    """What ends a run here, at once."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed_at", "local"),
    [(2, False), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)],
)
def test_a_resumed_run_has_the_same_best(base, tmp_path, killed_at, local, monkeypatch):
    run = BestCheckpoint.update

    def update(self, step, scores):
        if step == killed_at:
            raise KilledError
        return run(self, step, scores)

    config = make_config(checkpoint_every_steps=1)
    if local:  # Then the step before is on the disk of the host alone.
        disk = {"dir": str(tmp_path / "disk"), "every_steps": 1}
        config = make_config(checkpoint_every_steps=100, local_checkpoint=disk)
    workdir = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(BestCheckpoint, "update", update)
        train(config, workdir)
    report = train(config, workdir)
    assert report["best"] == base[1]["best"]
    assert report["params_sha256"] == base[1]["params_sha256"]
    assert checkpoint_folders.steps(workdir) == checkpoint_folders.steps(base[0])
    assert losses(workdir) == losses(base[0])


@pytest.fixture(scope="module")
def falling(tmp_path_factory):
    """A run whose last step is its best."""
    config = make_config(optim={"learning_rate": 0.01}, checkpoint_every_steps=1)
    workdir = tmp_path_factory.mktemp("falling") / "run"
    report = train(config, workdir)
    assert report["best"]["step"] == 6
    return config, workdir, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "by_signal"),
    [
        (Evaluating.after_step, True),
        (MetricLogger.log_scores, False),
        (Checkpointer.demand, True),
        (Checkpointer.demand, False),
    ],
    ids=lambda x: getattr(x, "__qualname__", str(x)),
)
def test_a_run_that_is_ended_near_its_end_hands_on_the_same(
    falling, tmp_path, monkeypatch, call, by_signal
):
    config, undisturbed, wanted = falling

    def ended(self, step, *args, **more):
        if step == 6:
            if not by_signal:
                raise KilledError
            os.kill(os.getpid(), signal.SIGTERM)
        return call(self, step, *args, **more)

    owner = getattr(sys.modules[call.__module__], call.__qualname__.split(".")[0])
    with monkeypatch.context() as patch:
        patch.setattr(owner, call.__name__, ended)
        with contextlib.suppress(KilledError, Preempted):  # Or it was done.
            train(config, tmp_path)
    report = train(config, tmp_path)
    for name in "best", "final", "params_sha256":
        assert report[name] == wanted[name]
    assert losses(tmp_path) == losses(undisturbed)
    assert checkpoint_folders.steps(tmp_path) == checkpoint_folders.steps(undisturbed)


def test_a_run_ends_early_and_stays_ended(base, tmp_path):
    found = losses(base[0])
    best = min(found, key=found.get)
    config = make_config(early_stopping_evals=1)
    report = train(config, tmp_path)
    worse = next(step for step in range(2, 7) if found[step] >= found[step - 1])
    assert report["steps"] == worse < 6
    assert report["best"]["step"] == worse - 1
    assert report["compute"]["images_seen"] == 8 * worse
    again = train(config, tmp_path)  # Evaluates the best again.
    for name in ("final", "params_sha256"):
        assert again[name] == report[name]
    assert max(losses(tmp_path)) == worse
    # With more patience it goes on from there, as if it had never stopped.
    longer = train(make_config(early_stopping_evals=6), tmp_path)
    assert longer["steps"] == 6
    if best <= worse:
        assert longer["params_sha256"] == base[1]["params_sha256"]


def test_a_run_that_no_longer_asks_hands_on_its_newest(base, tmp_path):
    copy = shutil.copytree(base[0], tmp_path / "copy")
    report = train(make_config(checkpoint={"max_to_keep": 1}), copy)
    assert report["best"] == checkpoint_folders.best(copy) == {}
    assert workdirs.load(copy).step == 6
    assert report["final"]["val"]["params"]["loss"] == losses(copy)[6]


def test_scores_decide_by_their_direction():
    def best(metric, *scores, **stated):
        config = make_config(checkpoint={"best_metric": f"val/{metric}"}, **stated)
        found = BestCheckpoint(config, (), ())
        taken = [
            found.update(step, {"val": {"params": {metric: score}}})
            for step, score in enumerate(scores, 1)
        ]
        return found.step, taken, found.is_exhausted

    assert best("top1", 0.5, 0.7, 0.7, 0.6) == (2, [True, True, False, False], False)
    assert best("loss", 0.5, 0.7, 0.4) == (3, [True, False, True], False)
    assert best("top1", math.nan, 0.1, math.nan)[:2] == (2, [False, True, False])
    assert best("top1", 0.5, 0.4, 0.3, early_stopping_evals=2)[2]
    assert not best("top1", 0.5, 0.4, 0.6, 0.3, early_stopping_evals=2)[2]
    assert lower_is_better("ece") and not lower_is_better("macro_f1")
    config = make_config(ema={"decay": 0.5})  # The average decides.
    found = BestCheckpoint(config, (), ())
    assert found.update(1, {"val": {"params": {"loss": 0.1}, "ema": {"loss": 0.7}}})
    assert found.score == 0.7


def test_a_step_counts_once_and_a_lost_checkpoint_is_not_chosen():
    config = dataclasses.replace(make_config(), early_stopping_evals=2)
    history = [
        {"step": step, "val/params/loss": loss}
        for step, loss in ((1, 0.1), (2, 0.4), (3, 0.5))
    ]
    found = BestCheckpoint(config, history, [2, 3])
    assert (found.step, found.score) == (2, 0.4)
    assert not found.update(3, {"val": {"params": {"loss": 0.0}}})
    assert not found.is_exhausted
    assert not found.update(4, {"other": {"params": {"loss": 0.0}}})
    np.testing.assert_equal(found.record["step"], 2)


@pytest.fixture(scope="module")
def from_start(tmp_path_factory):
    """A run that is evaluated before its first step, and its calls of `evaluate`."""
    workdir, calls = tmp_path_factory.mktemp("start") / "run", []

    class Scores(vit_jax.Callback):
        def evaluate(self, step, scores):
            calls.append((step, scores["val/params/loss"]))

    report = train(make_config(eval_at_start=True), workdir, callbacks=[Scores()])
    return workdir, report, calls


def test_the_starting_weights_are_evaluated_and_nothing_else_changes(base, from_start):
    workdir, report, calls = from_start
    found = losses(workdir)
    assert sorted(found) == list(range(7))
    assert calls[:7] == list(found.items())  # Then once more the best.
    assert {k: v for k, v in found.items() if k} == losses(base[0])
    for name in ("best", "final", "params_sha256", "steps"):
        assert report[name] == base[1][name]
    assert checkpoint_folders.steps(workdir) == checkpoint_folders.steps(base[0])
    assert "evaluation" in report["startup"]
    assert "evaluation" not in base[1]["startup"]


def test_scores_at_the_start_are_those_of_the_first_state(from_start):
    setup = sweep.SweepSetups().build(make_config(), from_start[0].parent / "other")
    suite = loop.open_suite(make_config(), setup)
    state = setup.initial_state()
    (scores,) = suite.run({"params": (state.params, state.extra)}).values()
    found = losses(from_start[0])[0]
    assert scores["params"]["loss"] == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("by_signal", [False, True])
def test_an_evaluation_at_the_start_that_is_ended_is_made_again(
    from_start, tmp_path, monkeypatch, by_signal
):
    call = MetricLogger.log_scores if not by_signal else Evaluating._evaluate

    def ended(self, *args, **more):
        if not by_signal:
            raise KilledError
        os.kill(os.getpid(), signal.SIGTERM)
        return call(self, *args, **more)

    owner = MetricLogger if not by_signal else Evaluating
    config = make_config(eval_at_start=True)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call.__name__, ended)
        with pytest.raises((KilledError, Preempted), match="nothing to save|^$"):
            train(config, tmp_path)
    report = train(config, tmp_path)
    for name in "best", "final", "params_sha256":
        assert report[name] == from_start[1][name]
    assert losses(tmp_path) == losses(from_start[0])


def test_a_resumed_run_does_not_evaluate_its_start_again(from_start, tmp_path):
    copy, steps = shutil.copytree(from_start[0], tmp_path / "copy"), []

    class Scores(vit_jax.Callback):
        def evaluate(self, step, scores):
            steps.append(step)

    kill_after(from_start[1]["best"]["step"], copy)
    report = train(make_config(eval_at_start=True), copy, callbacks=[Scores()])
    assert 0 not in steps
    assert report["params_sha256"] == from_start[1]["params_sha256"]
    assert losses(copy) == losses(from_start[0])


def test_step_0_is_neither_the_best_nor_counted():
    config = make_config(early_stopping_evals=1)
    found = BestCheckpoint(config, [{"step": 0, "val/params/loss": 0.0}], [0])
    assert not found.update(0, {"val": {"params": {"loss": 0.0}}})
    assert found.record == {}
    assert not found.is_exhausted
    assert found.update(1, {"val": {"params": {"loss": 1.0}}})
    assert not found.is_exhausted


def test_what_cannot_decide_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'test/top1' is not .* are val/\.\.\."):
        make_config(checkpoint={"best_metric": "test/top1"})
    with pytest.raises(UserError, match="early_stopping_evals=3 needs"):
        make_config(checkpoint={}, early_stopping_evals=3)
    config = make_config(checkpoint={"best_metric": "val/top9"})
    with pytest.raises(UserError, match="best_metric.*'top9'.* top1"):
        train(config, tmp_path)


@pytest.mark.slow
def test_a_finished_run_is_extended_by_a_key_alone(falling, tmp_path):
    copy = shutil.copytree(falling[1], tmp_path / "copy")
    stated = {"optim": {"learning_rate": 0.01}, "checkpoint_every_steps": 1}
    with pytest.raises(UserError, match="total_steps: 6 -> 9.*extend_schedule=stretc"):
        train(make_config(**stated, total_steps=9), copy)
    longer = make_config(**stated, total_steps=9, extend_schedule="stretch")
    report = train(longer, copy)
    assert report["steps"] == 9
    assert sorted(losses(copy)) == list(range(1, 10))
    lines = map(json.loads, (copy / "metrics.jsonl").read_text().splitlines())
    rates = {x["step"]: x["train/learning_rate"] for x in lines if len(x) > 9}
    whole = make_config(**stated, total_steps=9)
    run = RunLength(9, 20 / 8)
    rate = optim.learning_rate(whole.optim, 0.01, run)
    assert rates[8] == pytest.approx(float(rate(7)))  # As of a run of that length.
    # From then on that is its length.
    assert train(whole, copy)["params_sha256"] == report["params_sha256"]
    shorter = make_config(**stated, total_steps=5, extend_schedule="stretch")
    with pytest.raises(UserError, match="already at step 9.*raise total_steps"):
        train(shorter, copy)

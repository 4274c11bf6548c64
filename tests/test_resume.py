"""Runs as processes that are killed and started again."""

import json
import pathlib
import re
import signal
import time

import hosts
import jax
import numpy as np
import pytest

from vit_jax.weights import workdir as workdirs

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parent.parent

# Saving takes a while beside such steps, and so does an evaluation of 2,000 images.
LABELS = (
    "c.total_steps, c.batch_size, c.data.num_examples = 40, 8, 2000",
    'c.data.train_transform = "random_crop | flip | mixup(0.3)"',
    'c.model.dropout, c.evals = 0.1, dict(val="val")',
    # A task with state beside the parameters.
    'c.task = dict(name="center_loss:CenterLossConfig", weight=0.1)',
    "c.optim = dict(learning_rate=0.01, warmup_steps=5)",
    "c.eval_every_steps, c.checkpoint_every_steps = 20, 7",
)
# Student, teacher, centre, and crops of two sizes; labels are for the evaluation alone.
DINO = (
    *LABELS,
    "c.data.num_classes, c.model.drop_path_rate = 0, 0.2",
    'c.data.train_transform = "multi_crop(small_size=(4, 8), num_small=2)"',
    'c.task = dict(name="dino", num_outputs=24, hidden_dim=16, bottleneck_dim=8)',
    'c.task.large_transforms = ("flip | gaussian_blur(1.0)", "solarize(0.2)")',
    'c.evals = dict(val=dict(kind="knn", test="val"))',
)
CONFIGS = {"labels": LABELS, "dino": DINO}


@pytest.fixture(scope="module", params=CONFIGS)
def recipe(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / f"{request.param}.py"
    return hosts.write_recipe(path, *CONFIGS[request.param])


# What is learnt without labels is killed, and ends at SIGTERM as all else does.
labels = pytest.mark.parametrize("recipe", ["labels"], indirect=True)


def start(recipe, workdir, *words):
    flags = f"--config={recipe}", f"--workdir={workdir}"
    examples = str(ROOT / "docs" / "examples")
    return hosts.alone("train", *flags, *words, PYTHONPATH=examples)


def report(workdir):
    return json.loads((workdir / "report.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    hosts.finish(start(recipe, workdir))
    return workdir


def kill_in_a_step(process, workdir):
    hosts.wait_for(process, "step 11/40")
    process.kill()


def kill_in_a_save(process, workdir):
    """Kills while a checkpoint is written: a temporary folder is there."""
    folder = workdir / "checkpoints"
    while not any("tmp" in p.name for p in folder.glob("*")):
        assert process.poll() is None, process.stdout.read()
    process.kill()
    process.wait()
    assert any("tmp" in p.name for p in folder.glob("*"))


def kill_in_an_evaluation(process, workdir):
    """Kills between the line of a step and the line of its evaluation."""
    hosts.wait_for(process, "step 20/40  loss")
    time.sleep(0.05)
    process.kill()
    assert "top-1" not in process.stdout.read()


def test_killed_runs_end_as_the_undisturbed_one(recipe, undisturbed, tmp_path):
    workdir = tmp_path / "killed"
    # When it is killed does not depend on the task.
    moments = (kill_in_a_step, kill_in_a_save, kill_in_an_evaluation)
    for kill in moments if recipe.stem == "labels" else moments[-1:]:
        process = start(recipe, workdir)
        kill(process, workdir)
        assert process.wait() == -signal.SIGKILL
    out = hosts.finish(start(recipe, workdir))
    # The save of step 14 may have been cut off again.
    assert re.search("resume: step (7|14) of", out)

    a, b = report(undisturbed), report(workdir)
    assert a["params_sha256"] == b["params_sha256"]
    assert a["final"] == b["final"]

    # Each step and evaluation stands once in the metrics, with the same numbers.
    def metrics(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        speed = re.compile("second|input_wait|checkpoint_stall|slow_|start_|memory")
        return [
            {k: v for k, v in json.loads(line).items() if not speed.search(k)}
            for line in lines
        ]

    assert metrics(undisturbed) == metrics(workdir)
    for average in (True, False):
        one, two = (workdirs.load(w, use_ema=average) for w in (undisturbed, workdir))
        jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def ask_to_end(process, codes=(75,)):
    """Sends SIGTERM; returns what was printed, and the seconds that it took."""
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert process.returncode in codes, out
    return out, time.monotonic() - asked


@labels
def test_sigterm_saves_exits_with_75_and_resumes(recipe, undisturbed, tmp_path):
    workdir = tmp_path / "asked"

    def asked(line, wait=0.0):
        process = start(recipe, workdir)
        hosts.wait_for(process, line)
        time.sleep(wait)
        out, seconds = ask_to_end(process)
        assert seconds < 10
        assert "is saved in" in out
        return max(int(p.name) for p in (workdir / "checkpoints").iterdir()), out

    saved, _ = asked("step 11/40")
    assert 11 <= saved < 20
    # In an evaluation, which is made up for.
    later, out = asked("step 20/40  loss", 0.05)
    assert later == 20
    assert "top-1" not in out
    again = hosts.finish(start(recipe, workdir))
    assert "resume: step 20 of" in again and "step 20/40  top-1" in again
    assert report(workdir)["params_sha256"] == report(undisturbed)["params_sha256"]


def test_sigterm_ends_a_run_soon_before_its_first_step(tmp_path):
    recipe = hosts.write_recipe(tmp_path / "config.py", *LABELS)
    process = start(recipe, tmp_path / "run")
    hosts.wait_for(process, "while the train step compiles")
    _, seconds = ask_to_end(process, (75, -signal.SIGTERM))
    assert seconds < 20  # Ten on an idle machine; other tests run beside this one.


def test_sigterm_after_the_report_ends_a_run_with_0_or_75(tmp_path):
    recipe = hosts.write_recipe(tmp_path / "config.py", *LABELS)
    words = "--config.total_steps=7", "--config.evals={}"
    for delay in (0.0, 0.2):
        workdir = tmp_path / f"run{delay}"
        process = start(recipe, workdir, *words)
        while not (workdir / "report.json").exists() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(delay)
        ask_to_end(process, (0, 75))

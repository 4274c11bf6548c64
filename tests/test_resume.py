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

ROOT = pathlib.Path(__file__).parent.parent

# Saving takes a while beside such steps, and so does an evaluation of 2,000 images.
CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 40, 8
    c.data = dict(name="synthetic", num_classes=5, num_examples=2000, image_size=(8, 12))
    c.data.train_transform = "random_crop | flip | mixup(0.3)"
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.model.dropout = 0.1
    # A task with state beside the parameters.
    c.task = dict(name="center_loss:CenterLossConfig", weight=0.1)
    c.optim = dict(learning_rate=0.01, warmup_steps=5)
    c.evals = dict(val="val")
    c.log_every_steps = 1; c.eval_every_steps = 20; c.checkpoint_every_steps = 7
    return c
"""

# Student, teacher, centre, and crops of two sizes; labels are for the evaluation alone.
WITHOUT_LABELS = (
    CONFIG.replace("get_config", "labelled")
    + """
def get_config(arg=None):
    c = labelled()
    c.data.num_classes = 0
    c.data.train_transform = "multi_crop(small_size=(4, 8), num_small=2)"
    c.model.drop_path_rate = 0.2
    c.task = dict(name="dino", num_outputs=24, hidden_dim=16, bottleneck_dim=8)
    c.task.large_transforms = ("flip | gaussian_blur(1.0)", "solarize(0.2)")
    c.evals = dict(val=dict(kind="knn", test="val"))
    return c
"""
)
CONFIGS = {"labels": CONFIG, "dino": WITHOUT_LABELS}


@pytest.fixture(scope="module", params=CONFIGS)
def config(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "resumed.py"
    path.write_text(CONFIGS[request.param])
    return path


# What is learnt without labels is killed, and ends at SIGTERM as all else does.
labels = pytest.mark.parametrize("config", ["labels"], indirect=True)


def start(config, workdir, *words, **environment):
    environment["PYTHONPATH"] = str(ROOT / "docs" / "examples")
    flags = f"--config={config}", f"--workdir={workdir}"
    return hosts.alone("train", *flags, *words, **environment)


def wait_for_line(process, part):
    for line in process.stdout:
        if part in line:
            return line
    raise AssertionError(f"the run ended without printing {part!r}")


def report(workdir):
    return json.loads((workdir / "report.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    hosts.finish(start(config, workdir))
    return workdir


def kill_in_a_step(process, workdir):
    wait_for_line(process, "step 11/40")
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
    wait_for_line(process, "step 20/40  loss")
    time.sleep(0.05)
    process.kill()
    assert "top-1" not in process.stdout.read()


@pytest.mark.slow
def test_killed_runs_end_as_the_undisturbed_one(config, undisturbed, tmp_path):
    workdir = tmp_path / "killed"
    for kill in (kill_in_a_step, kill_in_a_save, kill_in_an_evaluation):
        process = start(config, workdir)
        with process.stdout:
            kill(process, workdir)
        assert process.wait() == -signal.SIGKILL
    out = hosts.finish(start(config, workdir))
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


@pytest.mark.slow
@labels
def test_sigterm_saves_exits_with_75_and_resumes(config, undisturbed, tmp_path):
    workdir = tmp_path / "asked"
    process = start(config, workdir)
    wait_for_line(process, "step 11/40")
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert time.monotonic() - asked < 10
    assert "is saved in" in out
    (saved,) = (
        int(p.name) for p in (workdir / "checkpoints").iterdir() if int(p.name) > 7
    )
    assert saved >= 11

    assert f"resume: step {saved} of" in hosts.finish(start(config, workdir))
    assert report(workdir)["params_sha256"] == report(undisturbed)["params_sha256"]


@pytest.mark.slow
@labels
def test_sigterm_in_an_evaluation_is_heeded_and_the_evaluation_made_up_for(
    config, undisturbed, tmp_path
):
    workdir = tmp_path / "evaluating"
    process = start(config, workdir)
    wait_for_line(process, "step 20/40  loss")
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert "top-1" not in out
    out = hosts.finish(start(config, workdir))
    assert "step 20/40  top-1" in out
    assert report(workdir)["params_sha256"] == report(undisturbed)["params_sha256"]


@pytest.mark.slow
def test_sigterm_ends_the_digits_run_soon_before_its_first_step(tmp_path):
    process = start("configs/digits.py", tmp_path / "run", fork=False)
    time.sleep(4)  # Data or compilation.
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    out, _ = process.communicate(timeout=60)
    # Ten on an idle machine; other tests run beside this one.
    assert time.monotonic() - asked < 20
    assert process.returncode in (75, -signal.SIGTERM), out


@pytest.mark.slow
def test_sigterm_after_the_report_ends_a_run_with_0_or_75(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    words = "--config.total_steps=7", "--config.evals={}"
    for delay in (0.0, 0.2):
        workdir = tmp_path / f"run{delay}"
        process = start(path, workdir, *words, fork=False)
        while not (workdir / "report.json").exists() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert process.returncode in (0, 75), (delay, out)

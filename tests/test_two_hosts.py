"""Processes that train together, as hosts do: as one would, preempted, killed, resumed."""

import json
import re
import shutil
import signal
import socket
import subprocess
import time

import hosts
import jax
import numpy as np
import pytest

from vit_jax.weights import workdir as workdirs

pytestmark = pytest.mark.slow
LIMIT = 6  # Seconds of silence; 40 where users do not say.
PAIR = (
    'c.data.train_transform = "random_crop | flip | mixup(0.3)"',
    'c.evals = dict(val="val")',
)
SHORT = (*PAIR, "c.optim.grad_accum_steps, c.model.mlp_dim = 2, 21")
SHORT += ("c.eval_every_steps = c.checkpoint_every_steps = 4",)
SHORT += ("c.sharding = dict(min_size=10)",)
OWN_DISKS = (
    "c.total_steps, c.checkpoint_every_steps, c.model.dropout = 24, 12, 0.1",
    "c.optim, c.sharding = dict(learning_rate=0.01), dict(min_size=1)",
    "c.data.num_classes, c.model.width, c.model.mlp_dim = 8, 24, 40",
    'c.local_checkpoint = dict(dir="$OWN_DISK/checkpoints", every_steps=3)',
)


@pytest.fixture
def start(tmp_path):
    """Starts hosts on a recipe of some lines; a run is named by its workdir."""

    def start(lines, run, count, *words, devices=1, fork=True, **variables):
        recipe = hosts.write_recipe(tmp_path / "pair.py", *lines)
        words = f"--config={recipe}", f"--workdir={tmp_path / run}", *words
        known = hosts.variables(count, XLA_FLAGS=hosts.xla_flags(devices), **variables)

        def environment(host):
            (tmp_path / f"disk{host}").mkdir(exist_ok=True)
            return known(host) | {"OWN_DISK": str(tmp_path / f"disk{host}")}

        options = {"fork": fork, "stderr": subprocess.STDOUT}
        return hosts.start(words, count, environment, **options)

    return start


def finish(processes, *codes):
    outs = [process.communicate(timeout=200)[0] for process in processes]
    assert [p.returncode for p in processes] == [*(codes or [0] * len(outs))], outs
    return outs


def assert_same(one, two):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        *(workdirs.load(run, use_ema=False).params for run in (one, two)),
    )
    reports = (json.loads((run / "report.json").read_text()) for run in (one, two))
    a, b = (report["final"]["val"]["params"] for report in reports)
    assert a["examples"] == b["examples"] == 37
    assert abs(a["loss"] - b["loss"]) < 1e-5


def metrics_of(run):
    """Returns the steps of a run's lines of metrics, and the losses there."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    losses = [[v for k, v in row.items() if k.endswith("loss")] for row in rows]
    return [row["step"] for row in rows], losses


def test_two_hosts_train_to_the_parameters_of_one(start, tmp_path):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    finish(start(SHORT, "one", 1))
    # Six devices divide the images. Ended after the evaluation of step 4.
    part = start(SHORT, "two", 2, devices=3)
    hosts.wait_for(part[0], "step 5/8")
    hosts.kill(part)
    # New interpreters, whose sets of strings have different orders. They go on from the
    # checkpoint there with every parameter on both hosts in part, and every layer on
    # three devices of each.
    split = ("--config.mesh.data=1", "--config.mesh.model=3")
    words = (*split, "--config.mesh.fsdp=2")
    first, second = finish(start(SHORT, "two", 2, *words, devices=3, fork=False))
    assert "resume: step 4 of" in first
    report = json.loads((two / "report.json").read_text())
    assert report["devices"] == 6
    assert_same(one, two)
    # Only the first process prints and writes.
    assert "step 8/8" in first
    assert "step" not in second
    steps, losses = metrics_of(two)
    assert steps == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    for found, expected in zip(losses, metrics_of(one)[1], strict=True):
        assert found and found == pytest.approx(expected, abs=1e-5)
    # Every layer is on three hosts in part, which load the same images.
    finish(start(SHORT, "three", 3, *split))
    assert_same(one, three)


def test_two_hosts_count_each_pixel_of_images_of_any_size_once(start, tmp_path):
    made = 'name="synthetic", num_examples=37, num_classes=5, mask_key="mask"'
    lines = (
        f"c.data, c.total_steps = dict({made}, image_size=(16, 24)), 2",
        'c.task, c.sharding = dict(name="segmentation"), dict(min_size=10)',
        'c.evals = dict(val=dict(kind="segmentation"))',
    )
    finish(start(lines, "one", 1))
    # Parameters are split over both hosts, each of which counts a part of the images.
    split = ("--config.mesh.fsdp=2", "--config.mesh.data=1")
    finish(start(lines, "two", 2, *split))
    reports = (
        json.loads((tmp_path / run / "report.json").read_text())
        for run in ("one", "two")
    )
    one, two = (report["final"]["val"]["params"] for report in reports)
    assert one["examples"] == two["examples"] == 37
    for metric, value in one.items():
        assert two[metric] == pytest.approx(value, abs=2e-3), metric


def ask_to_end(processes):
    for process in processes:
        process.send_signal(signal.SIGTERM)


def last_lines(processes):
    """Returns the same last line of both, and what the first printed."""
    outs = finish(processes, 75, 75)
    # A thread of JAX's may write of the signal after the run has ended.
    ours = {re.findall("^SIGTERM: .*", out, re.MULTILINE)[-1] for out in outs}
    (line,) = ours
    return line, outs[0]


LONG = (
    "c.total_steps, c.log_every_steps, c.data.num_examples = 4000, 20, 8_000",
    'c.eval_every_steps, c.checkpoint_every_steps, c.evals = 100, 4000, dict(val="val")',
)


def test_all_hosts_end_together_in_a_step_or_an_evaluation_and_resume(start, tmp_path):
    processes = start(LONG, "run", 2)
    hosts.wait_for(processes[0], "step 20/4000")
    processes[1].send_signal(signal.SIGTERM)  # One of them is enough.
    line, _ = last_lines(processes)
    step = int(re.match(r"SIGTERM: step (\d+) of 4000 is saved in", line)[1])
    assert 20 <= step < 100
    processes = start(LONG, "run", 2)
    hosts.wait_for(processes[0], f"resume: step {step} of")
    hosts.wait_for(processes[0], "step 100/4000  loss")
    ask_to_end(processes)
    time.sleep(0.3)
    ask_to_end(processes)  # Impatient schedulers do.
    line, out = last_lines(processes)
    assert line.startswith(f"SIGTERM: step 100 of 4000 is saved in {tmp_path}")
    assert "top-1" not in out
    again = start(LONG, "run", 2)
    hosts.wait_for(again[0], "resume: step 100 of")
    hosts.wait_for(again[0], "step 100/4000  top-1")  # It is made up for.


def test_all_hosts_end_where_sigterm_comes_before_the_first_step(start):
    processes = start(LONG, "run", 2)
    hosts.wait_for(processes[0], "4,000 steps of 12 on")
    ask_to_end(processes)
    line, out = last_lines(processes)
    # Compilation is not interrupted; no more than the steps on their way follow.
    saved = r"(nothing to save yet|step \d+ of 4000 is saved)"
    assert re.match(f"SIGTERM: {saved} in", line)
    assert "step 100/" not in out


def name(number, processes):
    pid = processes[number].pid
    return f"process {number} of {len(processes)} ({socket.gethostname()}, pid {pid})"


def killed(processes, number, codes):
    """Kills one of several; returns what they printed."""
    processes[number].kill()
    began = time.monotonic()
    outs = finish(processes, *codes)
    assert time.monotonic() - began < LIMIT + 10
    return outs


def test_killed_hosts_are_named_and_the_job_resumes_with_those_that_are_left(
    start, tmp_path
):
    lines = (
        "c.total_steps, c.log_every_steps, c.checkpoint_every_steps = 2000, 10, 25",
    )
    run, seconds = tmp_path / "run", {"VIT_JAX_LOST_SECONDS": str(LIMIT)}
    remedy = f"start the job again, it resumes from the checkpoint in {run}"
    processes = start(lines, "run", 3, **seconds)
    hosts.wait_for(processes[0], "step 60/")
    zero, one, two = killed(processes, 2, (75, 75, -signal.SIGKILL))
    lost = f"died or was lost: no sign of life for {LIMIT} s"
    assert zero.splitlines()[-1] == f"error: {name(2, processes)} {lost}; {remedy}"
    also = re.escape(f"error: {name(2, processes)} died or was lost")
    assert re.search(rf"^{also}", one, re.MULTILINE)
    assert [text.count("error: process") for text in (zero, one)] == [1, 1]
    # The log of the one that was killed says so too.
    assert f"error: {name(2, processes)} was killed" in two

    # The first, which runs the coordination service.
    processes = start(lines, "run", 2, **seconds)
    hosts.wait_for(processes[0], r"resume: step (25|50) of")
    hosts.wait_for(processes[0], "step 80/")
    # Though JAX aborts the other.
    _, one = killed(processes, 0, (-signal.SIGKILL, 75))
    last = one.splitlines()[-1]
    assert last.startswith(f"error: {name(0, processes)} died or was lost: its coord")
    assert last.endswith(remedy)
    assert "was killed" not in one


@pytest.mark.parametrize("split", [False, True])
def test_a_host_that_lost_its_disk_gets_its_parts_of_the_other_or_of_the_workdir(
    start, tmp_path, split
):
    # Each disk has the whole state, or half of it.
    mesh = ("fsdp=-1", "data=1") if split else ("fsdp=1",)
    words = [f"--config.mesh.{sizes}" for sizes in mesh]
    finish(start(OWN_DISKS, "undisturbed", 2, *words, devices=2))
    assert not list(tmp_path.glob("disk*/checkpoints/*/*/*"))  # Done: all is removed.

    pair = start(OWN_DISKS, "run", 2, *words, devices=2)
    hosts.wait_for(pair[0], f"step {20 if split else 10}/24")
    hosts.kill(pair)
    saved = tmp_path / "run" / "checkpoints" / "12"
    assert saved.exists() == split
    shutil.rmtree(tmp_path / f"disk{int(split)}")
    first, _ = finish(start(OWN_DISKS, "run", 2, *words, devices=2))
    # The step of the kill, or the one before: the other's write may have been cut off.
    if split:
        why = r"step (15|18) is on local disks, but without the parts of process 1"
        assert re.search(why, first)
        assert "resume: step 12 of" in first
    else:
        assert re.search("resume: step [69] from local disks", first)
        why = "process 0 had no checkpoint on its disk: received its parts from the others"
        assert why in first
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    assert hosts.sha256_of(run) == hosts.sha256_of(undisturbed)

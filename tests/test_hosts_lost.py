"""A host that is killed is named by the others, and the job resumes when restarted."""

import json
import re
import signal
import socket
import time

import hosts
import pytest

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 150, 12
    c.data = dict(name="synthetic", num_classes=5, num_examples=37, image_size=(8, 12))
    c.data.train_transform = "random_crop | flip | mixup(0.3)"
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.1)
    c.evals = dict(val="val")
    c.log_every_steps = 10; c.eval_every_steps = 0; c.checkpoint_every_steps = 25
    return c
"""
LIMIT = 6  # Seconds of silence; 40 where users do not say.

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "lost.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def job(config):
    started = []

    def start(workdir, count=2):
        words = (f"--config={config}", f"--workdir={workdir}")
        environment = hosts.variables(count, VIT_JAX_LOST_SECONDS=str(LIMIT))
        started.extend(hosts.start(words, count, environment))
        return started[-count:]

    yield start
    hosts.kill(started)


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    words = (f"--config={config}", f"--workdir={workdir}")
    codes, errors = hosts.ends(hosts.start(words, 2, hosts.variables(2)))
    assert codes == [0, 0], errors
    return report(workdir)


def report(workdir):
    return json.loads((workdir / "report.json").read_text())


def name(number, processes):
    pid = processes[number].pid
    return f"process {number} of {len(processes)} ({socket.gethostname()}, pid {pid})"


def test_killed_hosts_are_named_and_the_restarted_job_ends_as_one_left_alone(
    job, undisturbed, tmp_path
):
    remedy = (
        f"start the job again, it resumes from the checkpoint in {tmp_path / 'run'}"
    )
    processes = job(tmp_path / "run")
    hosts.wait_for(processes[0], "step 60/150")
    processes[1].kill()
    began = time.monotonic()
    codes, (zero, one) = hosts.ends(processes)
    assert time.monotonic() - began < LIMIT + 10
    assert codes == [75, -signal.SIGKILL]
    lost = f"died or was lost: no sign of life for {LIMIT} s"
    assert zero.splitlines()[-1] == f"error: {name(1, processes)} {lost}; {remedy}"
    # The log of the one that was killed says so too.
    assert f"error: {name(1, processes)} was killed" in one

    # The first, which runs the coordination service.
    processes = job(tmp_path / "run")
    hosts.wait_for(processes[0], r"resume: step (25|50) of")
    hosts.wait_for(processes[0], "step 110/150")
    processes[0].kill()
    began = time.monotonic()
    codes, (_, one) = hosts.ends(processes)
    assert time.monotonic() - began < LIMIT + 10
    assert codes == [-signal.SIGKILL, 75]  # Though JAX aborts the other.
    last = one.splitlines()[-1]
    assert last.startswith(f"error: {name(0, processes)} died or was lost: its coord")
    assert last.endswith(remedy)
    assert "was killed" not in one

    processes = job(tmp_path / "run")
    hosts.wait_for(processes[0], r"resume: step (75|100) of")
    codes, errors = hosts.ends(processes)
    assert codes == [0, 0], errors
    assert report(tmp_path / "run")["params_sha256"] == undisturbed["params_sha256"]


def test_the_one_of_three_that_was_killed_is_named_by_both_others(job, tmp_path):
    processes = job(tmp_path / "run", count=3)
    hosts.wait_for(processes[0], "step 20/150")
    processes[2].kill()
    codes, errors = hosts.ends(processes)
    assert codes == [75, 75, -signal.SIGKILL]
    lost = re.escape(f"error: {name(2, processes)} died or was lost")
    assert all(re.search(rf"^{lost}", text, re.MULTILINE) for text in errors[:2])
    assert all(text.count("error: process") == 1 for text in errors), errors

"""A checkpoint that cannot be saved does not end a run; each case is real processes."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import hosts
import pytest

from vit_jax.weights import workdir as workdirs

# 27,005 parameters: a checkpoint takes half a megabyte.
CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 400, 8
    c.data = dict(name="synthetic", num_classes=5, num_examples=64, image_size=(8, 12))
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=1_000)
    c.optim = dict(name="sgd", learning_rate=0.1)
    c.evals = dict(val="val")
    c.log_every_steps = 10; c.checkpoint_every_steps = 20
    return c
"""
BIG = 100_000  # Bytes: room for what is small beside a checkpoint.

# Limits the size of files of this process, then becomes the program.
LIMITED = (
    "import os, resource, sys\n"
    "hard = resource.RLIM_INFINITY\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), hard))\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


class Job:
    """Processes that train together, and what they have said so far."""

    def __init__(self, config, workdir, count, limited=None, words=()):
        self.processes, self.said, self._threads = [], [], []
        known = hosts.variables(count)
        command = [f"--config={config}", *words, f"--workdir={workdir}"]
        for host in range(count):
            if host == limited:
                program = [sys.executable, "-c", LIMITED, str(BIG), "-m"]
                env = os.environ | {"PYTHONUNBUFFERED": "1"} | known(host)
                process = subprocess.Popen(
                    [*program, "vit_jax.train", *command],
                    cwd=hosts.ROOT,
                    env=env | {"XLA_FLAGS": hosts.xla_flags()},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            else:
                (process,) = hosts.start(
                    command, 1, lambda _, i=host: known(i), stderr=subprocess.STDOUT
                )
            self.processes.append(process)
            self.said.append([])
            thread = threading.Thread(target=self._listen, args=(host,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _listen(self, host):
        with contextlib.suppress(ValueError):  # It is closed at the end.
            for line in self.processes[host].stdout:
                self.said[host].append(line)

    def wait_for(self, part, host=0, count=1):
        """Waits until a host has said something so many times."""
        until = time.monotonic() + 120
        while sum(part in line for line in list(self.said[host])) < count:
            alive = (
                self.processes[host].poll() is None or self._threads[host].is_alive()
            )
            assert alive and time.monotonic() < until, (part, self.said)
            time.sleep(0.02)

    def end(self, code):
        """Waits for all to end with a code; returns what each has said."""
        for process in self.processes:
            process.wait(timeout=180)
        for thread in self._threads:
            thread.join()
        said = ["".join(lines) for lines in self.said]
        assert [p.returncode for p in self.processes] == [code] * len(said), said
        return said

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "failing.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def start(config, tmp_path):
    jobs = []

    def start(count=1, workdir=tmp_path / "run", **more):
        jobs.append(Job(config, workdir, count, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory):
    """Runs of one and of two hosts that nothing happened to: count -> their sha256."""
    known = {}

    def of(count, words=()):
        if count not in known:
            workdir = tmp_path_factory.mktemp("runs") / str(count)
            job = Job(config, workdir, count, words=words)
            try:
                job.end(0)
            finally:
                job.kill()
            known[count] = sha256_of(workdir)
        return known[count]

    return of


def sha256_of(run):
    return json.loads((run / "report.json").read_text())["params_sha256"]


def steps_of(run):
    return sorted(path.name for path in run.glob("checkpoints/*"))


@pytest.mark.slow
def test_one_host_of_two_that_cannot_write_is_loud_and_the_next_save_succeeds(
    start, undisturbed, tmp_path
):
    words = ["--config.total_steps=200"]  # Two hosts take their time.
    job = start(2, limited=1, words=words)
    job.wait_for("could not be saved", count=2)
    assert workdirs.steps(tmp_path / "run") == []
    unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    resource.prlimit(job.processes[1].pid, resource.RLIMIT_FSIZE, unlimited)
    said = job.end(0)
    lines = [line for line in said[0].splitlines() if "could not be saved" in line]
    assert all("File too large" in line for line in lines)
    assert all("training continues" in line for line in lines)
    assert all("process 1 of 2" in line for line in lines)
    assert len({line.split("step ")[1].split()[0] for line in lines}) == len(lines)
    assert steps_of(tmp_path / "run") == ["180", "200"]
    assert sha256_of(tmp_path / "run") == undisturbed(2, words)


@pytest.mark.slow
def test_sigterm_says_that_it_could_not_save_and_is_no_75(start, tmp_path):
    job = start(2, limited=1, words=["--config.total_steps=100_000"])
    job.wait_for("could not be saved")
    job.processes[0].send_signal(signal.SIGTERM)
    for text in job.end(2):
        assert "SIGTERM, but step " in text
        assert "could not be saved (" in text
        assert "there is no checkpoint in" in text
        assert "Traceback" not in text
    assert steps_of(tmp_path / "run") == []


@pytest.fixture
def disk(tmp_path):
    """Mounts a small file system, and again with other options; skips if it may not."""
    where = tmp_path / "disk"
    mounted = []

    def mount(options):
        where.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", where]
        if mounted:
            command[4] = f"remount,{options}"
            until = time.monotonic() + 60  # It is busy while a save writes to it.
            while subprocess.run(command, check=False).returncode:
                assert time.monotonic() < until
                time.sleep(0.01)
        elif sys.platform != "linux" or subprocess.run(command, check=False).returncode:
            pytest.skip("this user may not mount a file system")
        mounted.append(options)
        return where

    yield mount
    if mounted:
        subprocess.run(["umount", where], check=True)


def fill(folder):
    """Fills a disk to the last byte, as somebody else's files do."""
    path = folder / "other"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "says",
    # A save that failed gives room back, so that the next may begin on a full disk too.
    ["(not enough disk: it takes|No space left on device)", "Read-only file system"],
    ids=["full", "sealed"],
)
def test_a_disk_that_goes_bad_under_a_run_and_recovers_costs_nothing(
    disk, start, undisturbed, tmp_path, says
):
    run = disk("size=9m") / "run"
    sealed = says.startswith("Read-only")
    if sealed:
        # A disk cannot be sealed while a file on it is open, as that of metrics is.
        run = tmp_path / "run"
        run.mkdir()
        (run / "checkpoints").symlink_to(tmp_path / "disk")
    job = start(workdir=run)
    job.wait_for("step 50/400")
    if sealed:
        disk("ro,size=9m")
    else:
        other = fill(tmp_path / "disk")
    job.wait_for("could not be saved", count=2)
    if sealed:
        disk("rw,size=9m")
    else:
        other.unlink()
    (text,) = job.end(0)
    # The first may have been under way when the disk went bad.
    (*_, line) = [x for x in text.splitlines() if "could not be saved" in x]
    assert re.search(says, line)
    assert "is safe in" in line
    assert "Traceback" not in text
    assert steps_of(run) == ["380", "400"]
    assert sha256_of(run) == undisturbed(1)
    # Metrics that could not be written at the time were written later, in order.
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "train/loss" in line]
    assert steps == list(range(10, 401, 10))

"""A checkpoint that cannot be saved does not end a run; each case is real processes."""

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import hosts
import numpy as np
import pytest
import warm
from helpers import write_weights
from PIL import Image

from vit_jax.weights import checkpoint_folders

pytestmark = pytest.mark.slow
# 27,005 parameters: a checkpoint takes half a megabyte.
LINES = (
    "c.total_steps, c.batch_size, c.data.num_examples = 300, 8, 64",
    'c.model.mlp_dim, c.evals = 1_000, dict(val="val")',
    "c.log_every_steps, c.checkpoint_every_steps = 10, 20",
)
BIG = 100_000  # Bytes: room for what is small beside a checkpoint.
UNSAVED = "--config.checkpoint_every_steps=1000"  # But at the end.


class Job:
    """Processes that train together, and what they have said so far."""

    def __init__(self, recipe, workdir, count=1, words=()):
        command = [f"--config={recipe}", *words, f"--workdir={workdir}"]
        self.processes = hosts.start(command, count, stderr=subprocess.STDOUT)
        self.said = [[] for _ in self.processes]
        self._threads = [
            threading.Thread(target=self._listen, args=(host,), daemon=True)
            for host in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, host):
        with contextlib.suppress(ValueError):  # It is closed at the end.
            for line in self.processes[host].stdout:
                self.said[host].append(line)

    def wait_for(self, part, count=1):
        """Waits until the first host has said something so many times."""
        until = time.monotonic() + 120
        while sum(part in line for line in list(self.said[0])) < count:
            alive = self.processes[0].poll() is None or self._threads[0].is_alive()
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

    def limit(self, host, size):
        """Limits the size of files of a host, but for what it has opened already."""
        limits = size, resource.RLIM_INFINITY
        resource.prlimit(self.processes[host].pid, resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "failing.py"
    return hosts.write_recipe(path, *LINES)


def steps_of(run):
    return sorted(path.name for path in run.glob("checkpoints/*"))


def test_one_host_of_two_that_cannot_write_is_loud_and_the_next_save_succeeds(
    recipe, tmp_path
):
    words = ["--config.total_steps=120"]  # Two hosts take their time.
    undisturbed = Job(recipe, tmp_path / "undisturbed", 2, [*words, UNSAVED])
    undisturbed.end(0)
    job = Job(recipe, tmp_path / "run", 2, words)
    job.limit(1, BIG)
    job.wait_for("could not be saved", count=2)
    assert checkpoint_folders.steps(tmp_path / "run") == []
    job.limit(1, resource.RLIM_INFINITY)
    said = job.end(0)
    lines = [line for line in said[0].splitlines() if "could not be saved" in line]
    for part in ("File too large", "training continues", "process 1 of 2"):
        assert all(part in line for line in lines), lines
    assert len({line.split("step ")[1].split()[0] for line in lines}) == len(lines)
    assert steps_of(tmp_path / "run") == ["100", "120"]
    runs = tmp_path / "run", tmp_path / "undisturbed"
    assert len({hosts.sha256_of(run) for run in runs}) == 1


def test_sigterm_says_that_it_could_not_save_and_is_no_75(recipe, tmp_path):
    job = Job(recipe, tmp_path / "run", 2, ["--config.total_steps=100_000"])
    job.limit(1, BIG)
    job.wait_for("could not be saved")
    job.processes[0].send_signal(signal.SIGTERM)
    for text in job.end(2):
        assert "SIGTERM, but step " in text
        assert "could not be saved (" in text
        assert "has no checkpoint" in text
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


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    Job(recipe, workdir, words=[UNSAVED]).end(0)
    return hosts.sha256_of(workdir)


@pytest.mark.parametrize(
    "says",
    # A save that failed gives room back, so that the next may begin on a full disk too.
    ["(not enough disk space|No space left on device)", "Read-only file system"],
    ids=["full", "sealed"],
)
def test_a_disk_that_goes_bad_under_a_run_and_recovers_costs_nothing(
    disk, recipe, undisturbed, tmp_path, says
):
    run = disk("size=9m") / "run"
    sealed = says.startswith("Read-only")
    if sealed:
        # A disk cannot be sealed while a file on it is open, as that of metrics is.
        run = tmp_path / "run"
        run.mkdir()
        (run / "checkpoints").symlink_to(tmp_path / "disk")
    job = Job(recipe, run)
    job.wait_for("step 50/300")
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
    assert steps_of(run) == ["280", "300"]
    assert hosts.sha256_of(run) == undisturbed
    # Metrics that could not be written at the time were written later, in order.
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "train/loss" in line]
    assert steps == list(range(10, 301, 10))


def test_a_full_disk_leaves_no_cut_result(disk, tmp_path):
    hosts.write_recipe(tmp_path / "tiny.py")
    options = {"variant": "Ti/4", "num_classes": 5, "image_size": (8, 12)}
    write_weights(tmp_path / "five.safetensors", "12345", **options)
    noise = np.random.default_rng(0).integers(0, 256, (60, 70, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    out = disk("size=16k")
    fill(out)
    of_weights = "--model=five.safetensors"
    with warm.Process(tmp_path, JAX_PLATFORMS="cpu", PYTHONPATH=hosts.ROOT) as process:
        for verb, *words in (
            ("show_batch", "--config=tiny.py", f"--out={out}/a.png"),
            ("features", "a.png", of_weights, f"--out={out}/a.parquet"),
            ("convert", of_weights, "--to=timm", f"--out={out}/timm"),
            ("visualize", "--images=a.png", of_weights, f"--out={out}/figures"),
            ("explore", "--image=a.png", of_weights, f"--html={out}/a.html"),
        ):
            end = process.run(verb, words)
            (*_, line) = end.err.splitlines()
            assert end.code == 2, (verb, end)
            assert line.startswith("error: ") and "No space left" in line, verb
            assert [p.name for p in out.rglob("*") if p.is_file()] == ["other"], verb

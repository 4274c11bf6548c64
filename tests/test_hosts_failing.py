"""Hosts whose reader fails or hangs, of one or several: all end, with the reason on each."""

import os
import re
import shutil
import signal
import time

import hosts
import numpy as np
import pytest
from PIL import Image

from vit_jax.data import order
from vit_jax.data.sources.folder import open_folder
from vit_jax.training import guards

BATCH, SEED, IMAGES = 6, 3, 22
FROM_RECORD = 40  # So many reads go well; one step takes 6.
FOLDER = (
    f"c.seed, c.total_steps, c.batch_size = {SEED}, 10_000, {BATCH}",
    'c.data = dict(name="folder", data_dir="pictures", num_classes=2, image_size=(8, 12))',
    'c.data.train_transform, c.data.eval_transform = "random_resized_crop", "resize"',
    'c.data.prefetch, c.evals, c.checkpoint_every_steps = 2, dict(val="val"), 2',
)
STALLS = (
    f"c.total_steps, c.batch_size, c.stall_timeout = 10_000, {BATCH}, 8.0",
    'c.data = dict(name="hanging:open_source", num_classes=5, image_size=(8, 12))',
    'c.data.train_transform, c.data.prefetch, c.data.num_threads = "central_crop", 1, 1',
    "c.checkpoint_every_steps = 2",
)

# A data set whose reader fails, or hangs in C code that gives up the lock.
SOURCE = f"""
import ctypes, os, threading, time
import numpy as np
from vit_jax.data.sources.arrays import ArraySource

class Hanging(ArraySource):
    reads = 0

    def __getitem__(self, i):
        Hanging.reads += 1
        if Hanging.reads > {FROM_RECORD} and os.environ.get("HANGS") == "1":
            self.wait_for_a_server_that_never_answers()
        if Hanging.reads > {FROM_RECORD} and os.environ.get("HANGS") == "raises":
            raise ZeroDivisionError("the reader is broken")
        return {{"image": self.images[i], "label": int(self.labels[i])}}

    def wait_for_a_server_that_never_answers(self):
        ctypes.CDLL(None).sleep(1_000)

def open_source(data, split):
    images = np.full((60, 8, 12, 3), 128, np.uint8)
    return Hanging(split, images, np.arange(60, dtype=np.int32) % 5)
"""


@pytest.fixture
def job(tmp_path):
    """Starts the hosts, each in its folder of images."""
    recipe = hosts.write_recipe(tmp_path / "pair.py", *FOLDER)
    rng = np.random.default_rng(0)
    for i in range(IMAGES):
        split = "val" if i < 2 else "train"
        pixels = rng.integers(0, 256, (9, 13, 3), dtype=np.uint8)
        for host in range(2):
            path = tmp_path / f"host{host}" / "pictures" / split / f"c{i % 2}"
            path.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path / f"{i}.png")

    def start(count=2):
        words = f"--config={recipe}", f"--workdir={tmp_path / 'run'}"
        return hosts.start(words, count, cwd=lambda host: tmp_path / f"host{host}")

    return start


@pytest.mark.slow
def test_a_damaged_image_on_one_host_ends_all_with_the_reason(job, tmp_path):
    # The first image of the second host that the steps 4 to 6 take.
    seen = order.records_at(np.arange(6 * BATCH), IMAGES - 2, SEED).reshape(6, 2, -1)
    record = next(r for r in seen[3:, 1].flat if r not in seen[:3, 1])
    train = open_folder(str(tmp_path / "host1" / "pictures"), "train", "train")
    with open(train.describe(int(record)), "r+b") as file:
        # As long as before: hosts with files of other sizes do not begin.
        size = file.seek(0, os.SEEK_END)
        file.seek(50)
        file.write(bytes(size - 50))
    processes = job()
    zero, one = hosts.ends(processes, 2)
    wanted = f"{train.paths[record]} (record {record}) cannot be decoded"
    (line,) = zero.splitlines()
    named = rf"error: process 1 of 2 \(.+, pid {processes[1].pid}\) failed: pictures/"
    assert re.match(named + re.escape(train.paths[record]), line)
    for text in (zero, one):
        assert wanted in text
        assert "data.on_error=skip" in text
        assert "Traceback" not in text
    assert not list((tmp_path / "run").glob("report.json"))


@pytest.mark.slow
def test_images_that_vanish_on_one_host_end_all(job, tmp_path):
    processes = job()
    hosts.wait_for(processes[0], "step 5/")
    shutil.rmtree(tmp_path / "host1" / "pictures")
    errors = hosts.ends(processes, 2, seconds=60)
    assert all("cannot be read" in text for text in errors)
    assert [text.startswith("error: process 1 of 2") for text in errors] == [1, 0]


@pytest.mark.slow
def test_a_split_that_is_missing_on_one_host_ends_all(job, tmp_path):
    shutil.rmtree(tmp_path / "host0" / "pictures" / "val")
    assert all("'val'" in text for text in hosts.ends(job(), 2))


@pytest.fixture
def stalling(tmp_path):
    """Starts one host or several; the reader of one, by default the last, hangs or raises."""
    (tmp_path / "hanging.py").write_text(SOURCE)
    recipe = hosts.write_recipe(tmp_path / "stalls.py", *STALLS)

    def start(count, *words, hangs="1", broken=-1):
        path = f"{hosts.ROOT}{os.pathsep}{tmp_path}"
        known = hosts.variables(count, PYTHONPATH=path)

        def environment(host):
            return known(host) | {"HANGS": hangs if host == broken % count else "0"}

        files = f"--config={recipe}", f"--workdir={tmp_path / 'run'}"
        return hosts.start([*files, *words], count, environment, cwd=tmp_path)

    return start


@pytest.mark.slow
def test_any_exception_of_a_reader_ends_all(stalling):
    # Of the first, which runs the coordination service.
    zero, one = hosts.ends(stalling(2, hangs="raises", broken=0), 1, seconds=60)
    reason = "ZeroDivisionError: the reader is broken while reading"
    assert f"error: {reason}" in zero
    assert "Traceback" in zero  # Of the process whose code is at fault.
    assert re.match(rf"error: process 0 of 2 \(.+\) failed: {reason}", one)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_reader_that_hangs_ends_the_run_and_its_function_is_in_the_stacks(
    stalling, workers
):
    words = f"--config.data.num_workers={workers}"
    (error,) = hosts.ends(stalling(1, words), guards.EXIT_STALLED, seconds=90)
    assert "in wait_for_a_server_that_never_answers" in error
    if not workers:
        assert "in _take_steps" in error  # The main thread, in the batch it waits for.
        assert error.count("Thread 0x") > 2
        last = re.search(r"stall_timeout\); the last was \D+ (\d+)", error)
        assert FROM_RECORD // 6 - 3 <= int(last[1]) <= FROM_RECORD // 6 + 1
        assert error.splitlines()[-1].startswith("error: watchdog: no step")


@pytest.mark.slow
def test_a_reader_that_hangs_on_one_host_ends_both(stalling):
    processes = stalling(2, "--config.stall_timeout=12")
    zero, one = hosts.ends(processes, guards.EXIT_STALLED)
    assert "in wait_for_a_server_that_never_answers" in one
    assert "in wait_for_a_server_that_never_answers" not in zero
    for text in (zero, one):
        assert "watchdog: no step, evaluation batch or save was finished" in text


@pytest.mark.slow
def test_a_process_that_was_stopped_for_longer_continues(stalling):
    (process,) = stalling(1, "--config.stall_timeout=6", hangs="0")
    hosts.wait_for(process, "^step 20/")
    process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    process.send_signal(signal.SIGCONT)
    hosts.wait_for(process, "^step 60/")
    time.sleep(1)
    assert process.poll() is None


def test_without_a_stall_a_run_is_left_alone(monkeypatch):
    ended = []
    monkeypatch.setattr(guards.ending, "end_job", lambda *what: ended.append(what))
    with guards.Watchdog(0.5) as watch_dog:
        for step in range(8):
            time.sleep(0.1)
            watch_dog.reset(f"step {step}", step=True)
    with guards.Watchdog(0.0):
        time.sleep(0.3)
    assert ended == []

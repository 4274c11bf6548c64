"""A run that hangs is ended by the watchdog, with the stacks that show where."""

import os
import re
import signal
import time

import hosts
import pytest

EXIT_STALLED = 70
FROM_RECORD = 40  # So many reads go well; one step takes 6.

# A data set whose reader hangs: in Python, or in C code that gives up the lock.
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
        return {{"image": self.images[i], "label": int(self.labels[i])}}

    def wait_for_a_server_that_never_answers(self):
        ctypes.CDLL(None).sleep(1_000)

def open_source(data, split):
    images = np.zeros((60, 8, 12, 3), np.uint8)
    return Hanging(split, images, np.arange(60, dtype=np.int32) % 5)
"""

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size, c.stall_timeout = 3, 10_000, 6, 8.0
    c.data = dict(name="hanging:open_source", num_classes=5, image_size=(8, 12))
    c.data.train_transform, c.data.prefetch, c.data.num_threads = "central_crop", 1, 1
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.1)
    c.log_every_steps = 1; c.checkpoint_every_steps = 2
    return c
"""


@pytest.fixture
def job(tmp_path):
    """Starts one host or several; the last one's reader hangs."""
    (tmp_path / "hanging.py").write_text(SOURCE)
    (tmp_path / "stalls.py").write_text(CONFIG)
    processes = []

    def start(count, *words, hangs="1"):
        path = f"{hosts.ROOT}{os.pathsep}{tmp_path}"
        known = hosts.variables(count, PYTHONPATH=path)

        def environment(host):
            return known(host) | {"HANGS": hangs if host == count - 1 else "0"}

        files = f"--config={tmp_path / 'stalls.py'}", f"--workdir={tmp_path / 'run'}"
        processes.extend(
            hosts.start([*files, *words], count, environment, cwd=tmp_path)
        )
        return processes

    yield start
    hosts.kill(processes)


def ends(processes):
    """Waits for the hosts to end by themselves; returns what each said on stderr."""
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [p.returncode for p in processes] == [EXIT_STALLED] * len(errors), errors
    return errors


@pytest.mark.slow
def test_a_reader_that_hangs_ends_the_run_and_its_function_is_in_the_stacks(job):
    began = time.monotonic()
    (error,) = ends(job(1))
    assert time.monotonic() - began < 90
    assert "in wait_for_a_server_that_never_answers" in error
    assert "in _train" in error  # The main thread, in the batch it waits for.
    assert error.count("Thread 0x") > 2
    last = re.search(r"stall_timeout\); the last was \D+ (\d+)", error)
    assert FROM_RECORD // 6 - 3 <= int(last[1]) <= FROM_RECORD // 6 + 1
    assert error.splitlines()[-1].startswith("error: watchdog: no step")


@pytest.mark.slow
def test_a_reader_that_hangs_in_a_loader_process_shows_its_stack_too(job):
    (error,) = ends(job(1, "--config.data.num_workers=1"))
    assert "in wait_for_a_server_that_never_answers" in error


@pytest.mark.slow
def test_a_reader_that_hangs_on_one_host_ends_both(job):
    zero, one = ends(job(2, "--config.stall_timeout=12"))
    assert "in wait_for_a_server_that_never_answers" in one
    assert "in wait_for_a_server_that_never_answers" not in zero
    for text in (zero, one):
        assert "watchdog: no step, evaluation batch or save was finished" in text


@pytest.mark.slow
def test_a_process_that_was_stopped_for_longer_continues(job):
    (process,) = job(1, "--config.stall_timeout=6", hangs="0")
    hosts.wait_for(process, "^step 20/")
    process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    process.send_signal(signal.SIGCONT)
    hosts.wait_for(process, "^step 60/")
    time.sleep(1)
    assert process.poll() is None


def test_without_a_stall_a_run_is_left_alone(monkeypatch):
    from vit_jax.training import guards

    ended = []
    monkeypatch.setattr(guards.multihost, "end_job", lambda *what: ended.append(what))
    with guards.Watchdog(0.5) as watch_dog:
        for step in range(8):
            time.sleep(0.1)
            watch_dog.reset(f"step {step}", step=True)
    with guards.Watchdog(0.0):
        time.sleep(0.3)
    assert ended == []

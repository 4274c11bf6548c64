"""A host whose reader fails ends the job on all hosts, with the reason on each."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import hosts
import numpy as np
import pytest
from PIL import Image

from vit_jax.data import order

ROOT = pathlib.Path(__file__).parent.parent
PIPE = subprocess.PIPE
STEPS, BATCH, SEED, IMAGES = 10_000, 6, 3, 22

CONFIG = f"""
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = {SEED}, {STEPS}, {BATCH}
    c.data = dict(name="folder", data_dir="pictures", num_classes=2, image_size=(8, 12))
    c.data.train_transform, c.data.eval_transform, c.data.prefetch = "inception_crop", "resize", 2
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.1)
    c.evals = dict(val="val")
    c.log_every_steps = 1; c.checkpoint_every_steps = 2
    return c
"""

# Runs the verb with a folder reader that fails at some moment, on process 0 only.
BROKEN = """
import os, runpy, sys
from vit_jax.data.sources import folder

read, calls = folder.FolderSource.__getitem__, []

def broken(self, i):
    calls.append(i)
    if len(calls) > 40:
        raise ZeroDivisionError("the reader is broken")
    return read(self, i)

if os.environ["JAX_PROCESS_ID"] == "0":
    folder.FolderSource.__getitem__ = broken
runpy.run_module("vit_jax.train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def job(tmp_path):
    """Starts the hosts, each in its folder of images; kills what is left."""
    (tmp_path / "pair.py").write_text(CONFIG)
    rng = np.random.default_rng(0)
    for i in range(IMAGES):
        split = "val" if i < 2 else "train"
        pixels = rng.integers(0, 256, (9, 13, 3), dtype=np.uint8)
        for host in range(3):
            path = tmp_path / f"host{host}" / "pictures" / split / f"c{i % 2}"
            path.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path / f"{i}.png")
    processes = []

    def start(*words, count=2, program=None):
        known = hosts.variables(count, PYTHONPATH=str(ROOT))
        words = [f"--config={tmp_path / 'pair.py'}", *words]
        words.append(f"--workdir={tmp_path / 'run'}")
        for host in range(count):
            cwd = tmp_path / f"host{host}"
            if program:
                command = [sys.executable, "-c", program, *words]
                env = os.environ | {"PYTHONUNBUFFERED": "1"} | known(host)
                env["XLA_FLAGS"] = hosts.xla_flags()
                options = {"cwd": cwd, "env": env, "text": True}
                options |= {"stdout": PIPE, "stderr": PIPE, "start_new_session": True}
                processes.append(subprocess.Popen(command, **options))
            else:
                one = hosts.start(words, 1, lambda _, i=host: known(i), cwd=cwd)
                processes.extend(one)
        return processes

    yield start
    hosts.kill(processes)


def ends(processes, code):
    """Waits for the hosts to end by themselves; returns what each said on stderr."""
    began = time.monotonic()
    outs = [None] * len(processes)

    def collect(i):
        outs[i] = processes[i].communicate(timeout=150)

    threads = [threading.Thread(target=collect, args=(i,)) for i in range(len(outs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in outs, "a host hangs"
    assert [p.returncode for p in processes] == [code] * len(processes), outs
    return time.monotonic() - began, [err for _, err in outs]


@pytest.mark.slow
def test_a_damaged_image_on_one_host_ends_all_with_the_reason(job, tmp_path):
    # The first image of the second host that the steps 4 to 6 take.
    seen = order.records_at(np.arange(6 * BATCH), IMAGES - 2, SEED).reshape(6, 2, -1)
    record = next(r for r in seen[3:, 1].flat if r not in seen[:3, 1])
    from vit_jax.data.sources.folder import open_folder

    train = open_folder(str(tmp_path / "host1" / "pictures"), "train", "train")
    with open(train.describe(int(record)), "r+b") as file:
        # As long as before: hosts with files of other sizes do not begin.
        size = file.seek(0, os.SEEK_END)
        file.seek(50)
        file.write(bytes(size - 50))
    processes = job()
    _, (zero, one) = ends(processes, code=2)
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
    processes = job(count=3)
    hosts.wait_for(processes[0], "step 5/")
    shutil.rmtree(tmp_path / "host2" / "pictures")
    seconds, errors = ends(processes, code=2)
    assert seconds < 60
    assert all("cannot be read" in text for text in errors)
    assert [text.startswith("error: process 2 of 3") for text in errors] == [1, 1, 0]


@pytest.mark.slow
def test_a_split_that_is_missing_on_one_host_ends_all(job, tmp_path):
    shutil.rmtree(tmp_path / "host0" / "pictures" / "val")
    _, errors = ends(job(), code=2)
    assert all("'val'" in text for text in errors)


@pytest.mark.slow
def test_any_exception_of_a_reader_ends_all(job):
    processes = job(program=BROKEN)
    hosts.wait_for(processes[0], "step 3/")
    seconds, (zero, one) = ends(processes, code=1)
    assert seconds < 60
    reason = "ZeroDivisionError: the reader is broken while reading pictures/train/"
    assert f"error: {reason}" in zero
    assert "Traceback" in zero  # Of the process whose code is at fault.
    assert re.match(rf"error: process 0 of 2 \(.+\) failed: {reason}", one)


def children(process):
    listings = pathlib.Path(f"/proc/{process.pid}/task").glob("*/children")
    pids = [int(word) for path in listings for word in path.read_text().split()]
    names = {p: pathlib.Path(f"/proc/{p}/cmdline").read_text() for p in pids}
    return [p for p, name in names.items() if "spawn_main" in name]


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="looks at /proc")
def test_a_loader_process_that_is_killed_saves_and_ends_all_and_leaves_no_other(job):
    processes = job("--config.data.num_workers=2")
    hosts.wait_for(processes[0], "step 5/")
    workers = [children(process) for process in processes]
    assert [len(pids) for pids in workers] == [2, 2]
    os.kill(workers[1][0], signal.SIGKILL)
    seconds, errors = ends(processes, code=75)
    assert seconds < 60
    for text in errors:
        assert re.search(
            r"a loader process was killed.*: step \d+ of \d+ is saved", text
        )
    until = time.monotonic() + 3
    alive = [pid for pids in workers for pid in pids]
    while alive and time.monotonic() < until:
        time.sleep(0.02)
        alive = [pid for pid in alive if pathlib.Path(f"/proc/{pid}").exists()]
    assert alive == []

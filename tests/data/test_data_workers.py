import multiprocessing
import os
import pathlib
import struct
import subprocess
import sys
import zlib
from multiprocessing import shared_memory

import pytest
from PIL import Image

from vit_jax.data import workers

LOADING = """
import multiprocessing, os, signal, sys
import numpy as np
from vit_jax.training import config
from vit_jax.data import pipeline
from vit_jax.data.sources.open import open_source

def load(workers, kill_at):
    raw = {"batch_size": 4, "optim": {"learning_rate": 0.1}}
    raw["data"] = dict(name="synthetic", num_classes=3, image_size=(5, 7), num_workers=workers)
    raw["data"]["train_transform"] = "inception_crop"
    data = config.complete(raw).data
    source = open_source(data, "train")
    object.__setattr__(source, "payload", bytes(1 << 20))  # More than a pipe holds.
    loaded = []
    options = dict(batch_size=4, seed=0, start=0, stop=40)
    with pipeline.train_batches(source, data, **options) as batches:
        for batch in batches:
            loaded.append(batch)
            if len(loaded) == kill_at:
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    return loaded

if __name__ == "__mp_main__" and "at_start" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    at_start = "at_start" in sys.argv
    got, wanted = load(2, kill_at=0 if at_start else 3), load(0, kill_at=0)
    assert len(got) == len(wanted) > 4
    for one, other in zip(got, wanted):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
    print(multiprocessing.active_children())
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at_start", "later"])
def test_batches_of_a_killed_loader_process_are_loaded_by_its_parent(tmp_path, moment):
    script = tmp_path / "loading.py"
    script.write_text(LOADING)
    run = subprocess.run(
        [sys.executable, "-W", "error", script, moment],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".", "PATH": ""},
        timeout=120,
    )
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr
    assert run.stderr == (
        "a loader process was killed by SIGKILL, as when the machine runs out of memory: "
        "this process loads the rest itself; lower data.num_workers (now 2) or "
        "data.prefetch\n"
    )


# The files are images whose loading warns. The first argument is their folder.
READING = """
import pathlib, sys, time
from vit_jax.training import config
from vit_jax.data import pipeline, workers
from vit_jax.data.sources.open import open_source

def names():
    files = [path.name for path in pathlib.Path("/dev/shm").glob("*")]
    prefix = workers._prefix()
    return {part for part in ("", "sem.") for x in files if x.startswith(part + prefix)}

if __name__ == "__main__":
    raw = {"batch_size": 2, "optim": {"learning_rate": 0.1}}
    raw["data"] = dict(name="folder", data_dir=sys.argv[1], num_classes=1, num_workers=1)
    raw["data"] |= dict(image_size=(64, 64), train_transform="resize")
    data = config.complete(raw).data
    source = open_source(data, "train")
    options = dict(batch_size=2, seed=0, start=0, stop=100)
    with pipeline.train_batches(source, data, **options) as batches:
        batch = next(batches)
        limit = time.monotonic() + 10
        while len(found := names()) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
    print(batch["image"].shape, sorted(found))
"""


@pytest.fixture
def warned_of(tmp_path):
    """A folder of one class with images that Pillow loads with a warning."""
    folder = tmp_path / "images" / "train" / "ant"
    folder.mkdir(parents=True)
    # An animation of no frames.
    control = b"acTL" + struct.pack(">II", 0, 0)
    chunk = struct.pack(">I", 8) + control + struct.pack(">I", zlib.crc32(control))
    for i in range(4):
        Image.new("RGB", (8, 8), (9 * i, 0, 0)).save(path := folder / f"{i}.png")
        data = path.read_bytes()
        path.write_bytes(data[:33] + chunk + data[33:])  # Behind the header.
        with pytest.warns(UserWarning, match="Invalid APNG"):
            Image.open(path).close()
    return folder.parents[1]


def with_warnings_as_errors(*words):
    """Runs Python with -W error; returns its standard output."""
    run = subprocess.run(
        [sys.executable, "-W", "error", *words],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".", "PATH": "", "JAX_PLATFORMS": "cpu"},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "Invalid APNG" in run.stderr
    return run.stdout


def test_a_loader_process_survives_warnings_and_names_shared_memory(
    warned_of, tmp_path
):
    script = tmp_path / "reading.py"
    script.write_text(READING)
    shape, found = with_warnings_as_errors(script, warned_of).split(" [")
    assert shape == "(2, 64, 64, 3)"
    if sys.platform == "linux":
        # A segment and a semaphore: a later start finds both by these names.
        assert found == "'', 'sem.']\n"


@pytest.mark.slow
def test_processes_that_prepare_survive_warnings(warned_of, tmp_path):
    words = "-m", "vit_jax.prepare", "--dataset=folder", f"--from={warned_of}"
    more = f"--data_dir={tmp_path}/out", "--name=ants", "--processes=2"
    assert "wrote" in with_warnings_as_errors(*words, *more)


def test_names_are_left_alone_where_dev_shm_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "_FOLDER", tmp_path / "absent")
    monkeypatch.setattr(workers, "end_with_parent", lambda: None)
    config = dict(multiprocessing.current_process()._config)
    monkeypatch.setattr(multiprocessing.current_process(), "_config", config)
    for name in ("_SHM_NAME_PREFIX", "_SHM_SAFE_NAME_LENGTH"):
        monkeypatch.setattr(shared_memory, name, getattr(shared_memory, name))
    workers.initializer()(0, 1)
    segment = shared_memory.SharedMemory(create=True, size=1)
    segment.close()
    segment.unlink()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    for name in (segment.name, semaphore._semlock.name):
        assert "vit_jax" not in name
        assert len(name) < 31  # The most that macOS allows, with the slash.


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /dev/shm")
def test_only_what_dead_processes_of_ours_left_is_removed():
    folder = pathlib.Path("/dev/shm")
    script = (
        "from vit_jax.data import workers; import pathlib; name = workers._prefix();"
        "[pathlib.Path('/dev/shm', kind + name + 'x').touch() for kind in ('', 'sem.')];"
        "print(name, end='')"
    )
    end = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    dead = end.stdout
    ours = workers._prefix()
    namespace, pid, began = dead.removeprefix("vit_jax-").rstrip("-").split("-")
    kept = {
        f"{ours}x",  # Of a process that runs: this one.
        f"sem.{ours}x",
        "psm_deadbeef",  # Of another program.
        f"vit_jax-1{namespace}-{pid}-{began}-x",  # Of a container that is not seen.
    }
    # Of a dead process whose number this one has taken.
    taken = f"vit_jax-{namespace}-{os.getpid()}-1-x"
    try:
        for name in (*kept, taken):
            (folder / name).touch()
        assert {f"{dead}x", f"sem.{dead}x"} <= set(os.listdir(folder))
        workers.remove_leftovers.__wrapped__()
        there = set(os.listdir(folder))
        assert kept <= there
        assert not {f"{dead}x", f"sem.{dead}x", taken} & there
    finally:
        for name in kept:
            (folder / name).unlink(missing_ok=True)


def test_a_child_ends_with_its_parent_however_it_dies():
    script = (
        "import multiprocessing, os, signal, time\n"
        "from vit_jax.data import workers\n"
        "def child(pipe):\n"
        "    workers.end_with_parent()\n"
        "    pipe.send(os.getpid())\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    here, there = context.Pipe()\n"
        "    context.Process(target=child, args=(there,)).start()\n"
        "    print(here.recv(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The child holds stdout too, so the output ends when both have.
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert run.stdout.strip().isdecimal()

"""Loader processes: killed, closed, warned, and what they leave behind."""

import os
import pathlib
import struct
import subprocess
import sys
import zlib

import pytest
from PIL import Image

from vit_jax.data import workers

SCRIPT = """
import multiprocessing, os, pathlib, signal, sys, time
import numpy as np
from vit_jax.training import config
from vit_jax.data import pipeline, workers
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import ending

def batches(stop, **keys):
    raw = {"batch_size": 4, "optim": {"learning_rate": 0.1}}
    raw["data"] = dict(name="synthetic", num_classes=3, image_size=(5, 7))
    raw["data"] |= dict(train_transform="random_resized_crop") | keys
    data = config.complete(raw).data
    source = open_source(data, "train")
    object.__setattr__(source, "payload", bytes(1 << 20))  # More than a pipe holds.
    return pipeline.train_batches(source, data, batch_size=4, seed=0, start=0, stop=stop)
"""

KILLED = """
def load(workers, kill_at):
    loaded = []
    with batches(40, num_workers=workers) as made:
        for batch in made:
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

CLOSED = """
if __name__ == "__main__":
    with batches(10**6, num_workers=1) as made:
        kept = [next(made) for _ in range(5)]
    made.close()
    # As a loader process leaves one that is killed in the wrong moment.
    if pathlib.Path("/dev/shm").exists():
        pathlib.Path(f"/dev/shm/{workers._prefix()}left").touch()
    assert list(made) == []
    print(len(kept), multiprocessing.active_children(), workers._prefix())
    if sys.argv[1] == "exit_process":
        ending.exit_process(0)
"""

# The files are images whose loading warns. The first argument is their folder.
WARNED = """
def names():
    files = [path.name for path in pathlib.Path("/dev/shm").glob("*")]
    prefix = workers._prefix()
    return {part for part in ("", "sem.") for x in files if x.startswith(part + prefix)}

if __name__ == "__main__":
    keys = dict(name="folder", data_dir=sys.argv[1], num_classes=1, num_workers=1)
    with batches(100, **keys, image_size=(64, 64), train_transform="resize") as made:
        batch = next(made)
        limit = time.monotonic() + 10
        while len(found := names()) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
    print(batch["image"].shape, sorted(found))
"""


def strictly(*words):
    """Runs Python with -W error; returns its standard output and standard error."""
    run = subprocess.run(
        [sys.executable, "-W", "error", *words],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".", "PATH": "", "JAX_PLATFORMS": "cpu"},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


@pytest.fixture
def run_script(tmp_path):
    def run(end, word):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT + end)
        return strictly(script, word)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at_start", "later"])
def test_batches_of_a_killed_loader_process_are_loaded_by_its_parent(
    run_script, moment
):
    told = (
        "a loader process was killed by SIGKILL, probably out of memory: "
        "this process loads the remaining batches; lower data.num_workers (now 2) or "
        "data.prefetch\n"
    )
    assert run_script(KILLED, moment) == ("[]\n", told)


@pytest.mark.parametrize(
    "end", ["return", pytest.param("exit_process", marks=pytest.mark.slow)]
)
def test_closing_leaves_no_process_no_shared_memory_and_no_noise(run_script, end):
    out, errors = run_script(CLOSED, end)
    said, _, prefix = out.rpartition(" ")
    assert (said, errors) == ("5 []", "")
    assert prefix.startswith("vit_jax-")
    assert list(pathlib.Path("/dev/shm").glob(f"{prefix.strip()}*")) == []


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


@pytest.mark.slow
def test_a_loader_process_survives_warnings_and_names_shared_memory(
    warned_of, run_script
):
    out, errors = run_script(WARNED, warned_of)
    assert "Invalid APNG" in errors
    shape, found = out.split(" [")
    assert shape == "(4, 64, 64, 3)"
    if sys.platform == "linux":
        # A segment and a semaphore: a later start finds both by these names.
        assert found == "'', 'sem.']\n"


@pytest.mark.slow
def test_processes_that_prepare_survive_warnings(warned_of, tmp_path):
    words = "-m", "vit_jax.prepare", "--dataset=folder", f"--from={warned_of}"
    more = f"--data_dir={tmp_path}/out", "--name=ants", "--processes=2"
    out, errors = strictly(*words, *more)
    assert "wrote" in out and "Invalid APNG" in errors


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

import os
import pathlib
import subprocess
import sys

import pytest

from vit_jax.data import workers

LOADING = """
import multiprocessing, os, signal
import numpy as np
from vit_jax import config
from vit_jax.data import pipeline, sources

def load(workers, kill_at):
    raw = {"batch_size": 4, "optim": {"rate": 0.1}}
    raw["data"] = dict(name="made", classes=3, image_size=(5, 7), workers=workers)
    raw["data"]["ops"] = "inception_crop"
    data = config.complete(raw).data
    source = sources.open_source(data, "train")
    loaded = []
    options = dict(batch_size=4, seed=0, start=0, stop=40)
    with pipeline.train_batches(source, data, **options) as batches:
        for batch in batches:
            loaded.append(batch)
            if len(loaded) == kill_at:
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    return loaded

if __name__ == "__main__":
    got, wanted = load(2, kill_at=3), load(0, kill_at=0)
    assert len(got) == len(wanted) > 4
    for one, other in zip(got, wanted):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
    print(multiprocessing.active_children())
"""


@pytest.mark.slow
def test_batches_of_a_killed_loader_process_are_loaded_by_its_parent(tmp_path):
    script = tmp_path / "loading.py"
    script.write_text(LOADING)
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".", "PATH": ""},
        timeout=120,
    )
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr
    assert run.stderr == (
        "a loader process was killed by SIGKILL, as when the machine runs out of memory: "
        "this process loads the rest by itself; lower data.workers (now 2) or "
        "data.prefetch\n"
    )


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

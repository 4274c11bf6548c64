"""How commands end: killed, interrupted, hung up, or with nobody who reads them.

Each case is a process, and what is counted are the processes and the shared memory that
are there when it has ended.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import hosts
import pytest

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 1_000_000, 12
    c.data = dict(name="synthetic", num_classes=5, num_examples=3000, image_size=(8, 12), num_workers=1)
    c.data.train_transform = "random_crop | flip"
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.1)
    c.log_every_steps = 10
    if arg == "stuck":
        c.data.update(name="stuck:Stuck", num_workers=0)
    if arg == "large":
        c.data.update(name="stuck:Large")
    return c
"""
STUCK = """
import time
import numpy as np

class Stuck:
    images = labels = None
    class_names = ("one", "two", "three", "four", "five")
    reads = 0
    def __init__(self, data, split):
        pass
    def describe(self, i):
        return self.record_id(i)
    def record_id(self, i):
        return str(i)
    def __len__(self):
        return 3000
    def __getitem__(self, index):
        self.reads += 1  # The first is the trial before the first step.
        if self.reads > 1:
            time.sleep(600)
        return {"image": np.zeros((9, 13, 3), np.uint8), "label": 0}

class Large(Stuck):
    def __init__(self, data, split):
        self.payload = bytes(1 << 20)  # More than a pipe holds.
    def __getitem__(self, index):
        return {"image": np.zeros((9, 13, 3), np.uint8), "label": 0}
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")


@pytest.fixture(autouse=True)
def not_ignored():
    """Lets commands hear signals, where these tests run under nohup or in a script."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "loaded.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def started():
    processes = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def train(config, tmp_path, started):
    """Starts the training of the config, in as many processes as are asked for."""

    def start(count=1, argument="", fork=True, **more):
        words = (f"--config={config}{argument}", f"--workdir={tmp_path / 'run'}")
        environment = hosts.variables(count) if count > 1 else lambda _: more
        started.extend(hosts.start(words, count, environment, fork=fork))
        return started[-count:] if count > 1 else started[-1]

    return start


def family(process):
    """Returns the ids of a process, its loader processes and what else it started."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(session) == process.pid and state not in "ZX":
            found.append(int(path.parent.name))
    return sorted(found)


def loaders(process):
    """Returns the ids of its loader processes."""
    found = []
    for pid in family(process):
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has ended since
            continue
        if b"multiprocessing-fork" in command:
            found.append(pid)
    return found


def segments(process):
    """Returns what it has in shared memory, by the names that it gives."""
    return [n for n in os.listdir("/dev/shm") if re.search(rf"-{process.pid}-\d+-", n)]


def eventually(what, seconds=30):
    """Waits until something is so; returns whether it came to be."""
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def end(process, seconds=100):
    """Waits for a process; returns its exit code and what it said on stderr."""
    code = process.wait(seconds)
    return code, process.stderr.read()


def caught(process, *numbers):
    """Tells whether a process catches signals."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    mask = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return all(mask >> (number - 1) & 1 for number in numbers)


def maps(process):
    return pathlib.Path(f"/proc/{process.pid}/maps").read_text()


@LINUX
@pytest.mark.slow
def test_killed_runs_leave_no_process_and_no_shared_memory(train, tmp_path):
    # While its loader processes start, then in a step.
    for moment in (loaders, lambda run: hosts.wait_for(run, "step 10/")):
        run = train()
        assert eventually(lambda run=run, moment=moment: moment(run), 100)
        run.kill()
        assert eventually(lambda run=run: not family(run)), family(run)
        assert segments(run) == []
    # With all its processes at once: nobody is left who could remove anything.
    run = train()
    hosts.wait_for(run, "step 10/")
    os.killpg(run.pid, signal.SIGKILL)
    assert eventually(lambda: not family(run))
    left = segments(run)
    assert left

    # The next start does; and its loader processes are killed, as for want of memory.
    killed, run = run, train()
    hosts.wait_for(run, "step 10/")
    assert segments(killed) == []
    assert segments(run)
    os.kill(loaders(run)[0], signal.SIGKILL)
    code, said = end(run)
    assert (code, len(said.splitlines())) == (75, 1), said
    assert re.match(
        r"a loader process was killed by SIGKILL, as when the machine runs out of "
        rf"memory: step \d+ of 1000000 is saved in {tmp_path}/run; lower data.num_workers "
        r"\(now 1\) or data.prefetch \(now 8\); the same command resumes from there\n",
        said,
    )
    assert eventually(lambda run=run: not family(run)), family(run)
    assert segments(run) == []

    # It continues, also when nobody reads its output; Ctrl-C reaches the whole group.
    saved = int(re.search(r"step (\d+) of", said)[1])
    run = train()
    hosts.wait_for(run, f"resume: step {saved} of")
    run.stdout.close()
    metrics = tmp_path / "run" / "metrics.jsonl"
    known = len(metrics.read_text().splitlines())
    assert eventually(
        lambda: len(metrics.read_text().splitlines()) > known + 3, seconds=100
    )
    os.killpg(run.pid, signal.SIGINT)
    code, said = end(run)
    assert (code, len(said.splitlines())) == (130, 1), said
    step = int(re.match(r"Ctrl-C: step (\d+) of 1000000 is saved in", said)[1])
    assert step > saved
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
    assert eventually(lambda run=run: not family(run)), family(run)
    assert segments(run) == []


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once(train, tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    run = train(argument=":stuck", PYTHONPATH=path)
    hosts.wait_for(run, "1,000,000 steps of 12 on")
    time.sleep(1)  # Into the wait for the first batch.
    run.send_signal(signal.SIGINT)
    time.sleep(2)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    code, said = end(run, 5)
    assert (code, said) == (130, "Ctrl-C again: ended at once\n")


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_loader_processes_that_end_while_they_start_end_a_run(train, tmp_path, number):
    (tmp_path / "stuck.py").write_text(STUCK)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    run = train(argument=":large", PYTHONPATH=path)
    assert eventually(lambda: loaders(run), 100)
    if number == signal.SIGTERM:
        os.killpg(run.pid, number)
    else:
        os.kill(loaders(run)[0], number)
    code, said = end(run, 60)
    assert code == 75, said
    assert number.name in said.splitlines()[-1]


@LINUX
@pytest.mark.slow
def test_all_hosts_save_and_end_when_one_loses_a_loader_or_all_get_ctrl_c(train):
    one, two = runs = train(2)
    hosts.wait_for(one, "step 10/")
    os.kill(loaders(two)[0], signal.SIGKILL)
    for run in runs:
        code, said = end(run)
        assert code == 75, said
        last = said.splitlines()[-1]
        assert re.match(
            r"a loader process was killed by SIGKILL, .* memory: step \d+ of 1000000 is "
            r"saved in .*; lower data.num_workers \(now 1\)",
            last,
        )
        assert eventually(lambda run=run: not family(run)), family(run)
        assert segments(run) == []
    one, two = runs = train(2)
    hosts.wait_for(one, "step .* loss")
    for run in runs:
        os.killpg(run.pid, signal.SIGINT)
    for run in runs:
        code, said = end(run)
        assert code == 130, said
        assert re.match(
            r"Ctrl-C: step \d+ of 1000000 is saved in", said.splitlines()[-1]
        )
        assert "Traceback" not in said


@LINUX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_training_is_ended_by_signals_from_its_first_moment(train, number):
    run = train(fork=False)
    assert eventually(lambda: caught(run, signal.SIGTERM, signal.SIGHUP), 60)
    assert "jaxlib" not in maps(run)  # Before any of the imports that take seconds.
    run.send_signal(number)
    code, said = end(run)
    if number == signal.SIGINT:
        assert (code, said) == (130, "interrupted\n")
    else:
        assert code == 75
        assert re.fullmatch(rf"{number.name}: ended, no training .* resumes\n", said)


@LINUX
def test_nohup_is_respected(config, tmp_path, started):
    run = subprocess.Popen(
        ["nohup", sys.executable, "-m", "vit_jax.train", f"--config={config}"],
        cwd=hosts.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(run)
    assert eventually(lambda: caught(run, signal.SIGTERM), 60)
    assert not caught(run, signal.SIGHUP)


def command(verb, *words):
    """Starts a verb whose output is buffered, as it is for users."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-m", f"vit_jax.{verb}", *words],
        cwd=hosts.ROOT,
        env=clean | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@LINUX
@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--model=absent", "absent.png"),
        ("evaluate", "--model=absent", "--config=configs/eval/probe.py:data=absent"),
    ],
    ids=lambda words: words[0],
)
def test_ctrl_c_ends_a_command_in_its_imports_with_one_line(words, started):
    run = command(*words)
    started.append(run)
    assert eventually(lambda: "numpy" in maps(run) or run.poll() is not None, 60)
    run.send_signal(signal.SIGINT)
    assert end(run) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--help"),
        ("summary", "--variant=Ti/16"),
        pytest.param(("datasets",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_output_that_nobody_reads_ends_a_command_without_a_word(words, started):
    run = command(*words)
    started.append(run)
    run.stdout.close()
    assert end(run) == (141, "")

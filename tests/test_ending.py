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

LOADED = (
    "c.total_steps, c.log_every_steps = 1_000_000, 10",
    "c.data.num_examples, c.data.num_workers = 3000, 1",
    'c.data.train_transform = "random_crop | flip"',
)
SOURCES = """
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
        self.reads += 1  # Some are looked at, and one is tried, before the first step.
        if self.reads > 9:
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
def train(tmp_path):
    """Starts training, in as many processes as are asked for, on a source of this file."""
    recipe = hosts.write_recipe(tmp_path / "loaded.py", *LOADED)
    (tmp_path / "sources.py").write_text(SOURCES)

    def start(count=1, *more, source="", **options):
        words = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}", *more]
        if source:
            words.append(f"--config.data.name=sources:{source}")
        path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        known = hosts.variables(count, PYTHONPATH=path)
        return hosts.start(words, count, known, **options)

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


def assert_gone(process):
    assert eventually(lambda: not family(process)), family(process)
    assert segments(process) == []


def last_line(process, code, seconds=100):
    """Waits for a process, which must end with a code; returns its last line on stderr.

    Threads of XLA, whose lines begin as "W1129 ", may log after it.
    """
    found = process.wait(seconds)
    said = process.stderr.read()
    assert found == code and "Traceback" not in said, (found, said)
    return [x for x in said.splitlines() if not re.match(r"[IWEF]\d{4} ", x)][-1]


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
        (run,) = train()
        assert eventually(lambda run=run, moment=moment: moment(run), 100)
        run.kill()
        assert_gone(run)
    # With all its processes at once: nobody is left who could remove anything.
    (killed,) = train()
    hosts.wait_for(killed, "step 10/")
    os.killpg(killed.pid, signal.SIGKILL)
    assert eventually(lambda: not family(killed))
    assert segments(killed)

    # The next start does; and its loader processes are killed, as for want of memory.
    (run,) = train()
    hosts.wait_for(run, "step 10/")
    assert segments(killed) == []
    assert segments(run)
    os.kill(loaders(run)[0], signal.SIGKILL)
    line = last_line(run, 75)
    assert re.fullmatch(
        r"a loader process was killed by SIGKILL, probably out of "
        rf"memory: step \d+ of 1000000 is saved in {tmp_path}/run; lower data.num_workers "
        r"\(now 1\) or data.prefetch \(now 8\); the same command resumes from there",
        line,
    )
    assert_gone(run)

    # It continues, also when nobody reads its output; Ctrl-C reaches the whole group.
    saved = int(re.search(r"step (\d+) of", line)[1])
    (run,) = train()
    hosts.wait_for(run, f"resume: step {saved} of")
    run.stdout.close()
    metrics = tmp_path / "run" / "metrics.jsonl"
    count = lambda: len(metrics.read_text().splitlines())
    known = count()
    assert eventually(lambda: count() > known + 3, seconds=100)
    os.killpg(run.pid, signal.SIGINT)
    line = last_line(run, 130)
    step = int(re.match(r"Ctrl-C: step (\d+) of 1000000 is saved in", line)[1])
    assert step > saved
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
    assert_gone(run)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once(train):
    (run,) = train(1, "--config.data.num_workers=0", source="Stuck")
    hosts.wait_for(run, "1,000,000 steps of 12 on")
    time.sleep(1)  # Into the wait for the first batch.
    run.send_signal(signal.SIGINT)
    time.sleep(2)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    assert last_line(run, 130, 5) == "Ctrl-C again: ended at once"


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_loader_processes_that_end_while_they_start_end_a_run(train, number):
    (run,) = train(source="Large")
    assert eventually(lambda: loaders(run), 100)
    if number == signal.SIGTERM:
        os.killpg(run.pid, number)
    else:
        os.kill(loaders(run)[0], number)
    assert number.name in last_line(run, 75, 60)


@LINUX
@pytest.mark.slow
def test_all_hosts_save_and_end_when_one_loses_a_loader_or_all_get_ctrl_c(train):
    one, two = runs = train(2)
    hosts.wait_for(one, "step 10/")
    os.kill(loaders(two)[0], signal.SIGKILL)
    for run in runs:
        assert re.match(
            r"a loader process was killed by SIGKILL, .* memory: step \d+ of 1000000 is "
            r"saved in .*; lower data.num_workers \(now 1\)",
            last_line(run, 75),
        )
        assert_gone(run)
    one, two = runs = train(2, "--config.data.num_workers=0")
    hosts.wait_for(one, "step .* loss")
    for run in runs:
        os.killpg(run.pid, signal.SIGINT)
    for run in runs:
        line = last_line(run, 130)
        assert re.match(r"Ctrl-C: step \d+ of 1000000 is saved in", line)


@LINUX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_training_is_ended_by_signals_from_its_first_moment(train, number):
    (run,) = train(fork=False)
    assert eventually(lambda: caught(run, signal.SIGTERM, signal.SIGHUP), 60)
    assert "jaxlib" not in maps(run)  # Before any of the imports that take seconds.
    run.send_signal(number)
    if number == signal.SIGINT:
        assert last_line(run, 130) == "interrupted"
    else:
        line = last_line(run, 75)
        assert re.fullmatch(rf"{number.name}: ended, no training .* resumes", line)


@LINUX
def test_nohup_is_respected(tmp_path):
    recipe = hosts.write_recipe(tmp_path / "loaded.py", *LOADED)
    words = ["nohup", sys.executable, "-m", "vit_jax.train", f"--config={recipe}"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen(words, cwd=hosts.ROOT, **pipes) as run:
        assert eventually(lambda: caught(run, signal.SIGTERM), 60)
        assert not caught(run, signal.SIGHUP)
        run.kill()


def command(verb, *words):
    """Starts a verb whose output is buffered, as it is for users."""
    (run,) = hosts.start(
        words, 1, lambda _: {"PYTHONUNBUFFERED": ""}, verb=verb, fork=False
    )
    return run


@LINUX
@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--model=absent", "absent.png"),
        ("evaluate", "--model=absent", "--config=configs/eval/probe.py:data=absent"),
    ],
    ids=lambda words: words[0],
)
def test_ctrl_c_ends_a_command_in_its_imports_with_one_line(words):
    run = command(*words)
    assert eventually(lambda: "numpy" in maps(run) or run.poll() is not None, 60)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert run.stderr.read() == "interrupted\n"


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--help"),
        pytest.param(("summary", "--variant=Ti/16"), marks=pytest.mark.slow),
        pytest.param(("datasets",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_output_that_nobody_reads_ends_a_command_without_a_word(words):
    run = command(*words)
    run.stdout.close()
    assert run.wait(60) == 141
    assert run.stderr.read() == ""

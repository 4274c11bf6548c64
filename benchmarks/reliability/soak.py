"""Kills a small run again and again, and compares its end with one left alone.

Run: python -m benchmarks.reliability.soak [--kills=200] [--hosts=1,2] [--seed=0] [--steps=160]
[--workers=1] [--one_host] [--aimed=SIGKILL,SIGTERM]

Each run is started, killed with SIGKILL at a random moment, uniform over the time that
an undisturbed run takes from its start to its report, and started again, until it is
done. Runs are begun until there were enough kills; half of them of one process and half
of two that train together as two hosts do, of which one or both are killed, with
--one_host always one. Every run must end with the parameters of the undisturbed one of
as many hosts, bit for bit, and with its metrics, each step once. A host that loses the
other must end by itself, with 75 and the name of the one that was lost. Images are files
that loader processes read ahead. Starts share a cache of compiled programs; one in
twenty finds it empty.

Runs choose their best checkpoint by the scores of their evaluations. With --aimed each
window near the end of a run gets each of these signals, in runs of one process of their
own; after SIGTERM it has to end with 0 or 75.

Prints what was being done at each kill, seen from outside: by the last line printed, and
for a save by the unfinished folder on the disk; the exit codes of the hosts that lost the
other; and what starts left behind: processes that are still there after 10 s, files in
/dev/shm, and temporary files. Exits with 1 if any run differs, an exit code is another,
or anything was left behind.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from PIL import Image

from benchmarks import smoke

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.name, c.seed, c.total_steps, c.batch_size = "soak", 3, STEPS, 24
    c.data = dict(name="folder", data_dir="IMAGES", num_classes=5, image_size=(16, 24))
    c.data.train_transform, c.data.eval_transform = "random_resized_crop | flip | mixup(0.3)", "resize"
    c.data.num_workers, c.data.num_threads, c.data.prefetch = WORKERS, 1, 2
    c.model = dict(variant="Ti/4", width=48, depth=2, num_heads=3, mlp_dim=96)
    c.model.dropout = 0.1
    c.optim = dict(learning_rate=0.01, warmup_steps=5)
    c.checkpoint = dict(best_metric="val/loss")
    c.evals = dict(val="val")
    c.log_every_steps = 1; c.eval_every_steps = EVALUATE; c.checkpoint_every_steps = 7
    return c
"""
LOST_SECONDS = 8  # Of silence after which a host counts as lost.
START_SECONDS = 30  # For which a host waits for one that was killed before it came.
HANG_SECONDS = 240.0
GRACE_SECONDS = 10.0  # In which what a killed start has started must end.
SHARED_MEMORY = pathlib.Path("/dev/shm")
MARK = "VIT_JAX_SOAK_START"  # In the environment of all processes of a start.
KILLS_A_RUN = 20  # Then it is left to finish.
NUMBERS = itertools.count()  # Of starts.
COLD = 0.05  # Of the starts find no compiled program.


class Job:
    """One start of a run, of one process or several."""

    def __init__(self, config, workdir, hosts, evaluate):
        self.mark = f"{os.getpid()}-{next(NUMBERS)}"
        self.temporary = config.parent / f"tmp-{self.mark}"
        self.temporary.mkdir()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        self.workdir, self.evaluate = workdir, evaluate
        self.began = time.monotonic()
        self.processes, self.lines, self.errors, self._threads = [], [], [], []
        for host in range(hosts):
            env = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "PYTHONUNBUFFERED": "1",
                "PYTHONFAULTHANDLER": "1",
                "TMPDIR": str(self.temporary),
                MARK: self.mark,
                "VIT_JAX_LOST_SECONDS": str(LOST_SECONDS),
                "VIT_JAX_START_SECONDS": str(START_SECONDS),
                "JAX_COMPILATION_CACHE_DIR": str(compiled(config)),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
            if hosts > 1:
                env |= {
                    "JAX_COORDINATOR_ADDRESS": address,
                    "JAX_NUM_PROCESSES": str(hosts),
                    "JAX_PROCESS_ID": str(host),
                }
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vit_jax.train"),
                    *(f"--config={config}", f"--workdir={workdir}"),
                ],
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            lines = []
            read = lines.extend
            thread = threading.Thread(target=read, args=(process.stdout,), daemon=True)
            thread.start()
            self.processes.append(process)
            self.lines.append(lines)
            self._threads.append(thread)

    def running(self):
        """Tells whether any process of it runs."""
        return any(process.poll() is None for process in self.processes)

    def printed(self, begin):
        """Tells whether a line begins so."""
        return any(line.startswith(begin) for line in list(self.lines[0]))

    def saved(self, name):
        """Tells whether a file is there, of a checkpoint or beside it."""
        return (self.workdir / "checkpoints" / name).exists()

    def doing(self):
        """Says what the run is at, seen from outside."""
        lines = list(self.lines[0])
        if not any(line.startswith("soak:") for line in lines):
            return "start-up"
        folder = self.workdir / "checkpoints"
        folders = list(folder.iterdir()) if folder.is_dir() else []
        if any("tmp" in p.name for p in folders) or any(
            p.name.isdecimal() and not (p / "checksums.json").exists() for p in folders
        ):
            return "save"
        if not any("first step after" in line for line in lines):
            return "restore and compile"
        if any(line.startswith("config ") for line in lines):
            return "report"
        last = [line for line in lines if line.startswith("step ")][-1:]
        step = int(re.match(r"step (\d+)", last[0])[1]) if last else 0
        top = [line for line in lines if "top-1" in line]
        evaluated = int(re.match(r"step (\d+)", top[-1])[1]) if top else 0
        if step and step % self.evaluate == 0 and evaluated < step:
            return "evaluation"
        return "step"

    def kill(self, hosts):
        """Kills some of the processes; the others must end by themselves."""
        for host in hosts:
            self.processes[host].kill()
        self.wait()

    def leftovers(self):
        """Returns what the start has left, when it should be gone; ends processes."""
        until = time.monotonic() + GRACE_SECONDS
        while (pids := marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.1)
        left = [f"process {command(pid)}" for pid in pids]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Named after the process that trains, see vit_jax/data/workers.py.
        names = [rf"vit_jax-\d+-{process.pid}-" for process in self.processes]
        shared = re.compile("|".join(names))
        left += [
            f"shared memory {path.name.partition('vit_jax')[0]}"
            for path in SHARED_MEMORY.glob("*vit_jax-*")
            if shared.search(path.name)
        ]
        left += [f"temporary {path.name}" for path in self.temporary.iterdir()]
        return left

    def wait(self):
        """Waits for the end of all; returns their exit codes."""
        until, hung = time.monotonic() + HANG_SECONDS, []
        for host, process in enumerate(self.processes):
            try:
                process.wait(timeout=max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # It prints its stacks.
                hung.append(host)
        for process in self.processes:
            process.wait()
        for thread in self._threads:
            # What a killed host has started may hold the pipe open.
            thread.join(GRACE_SECONDS)
        if hung:
            raise SystemExit(f"hung for {HANG_SECONDS:g} s: {hung}\n{self.said()}")
        return [process.returncode for process in self.processes]

    def said(self):
        """Returns all that was printed, for an error."""
        return "".join(f"--- host {i}\n{''.join(x)}" for i, x in enumerate(self.lines))


def marked(mark):
    """Returns the processes of a start that are there."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def command(pid):
    """Returns the command of a process, without its interpreter."""
    with contextlib.suppress(OSError):
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return " ".join(words[1:])[:60]
    return "gone"


def names_the_lost(text, host):
    """Tells whether an error line says that a host was lost, and which."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    words = rf"process {host} of 2.*lost|reach process {host} |with process {host} of"
    return any(re.search(words, line) for line in lines)


def make_images(folder):
    """Writes the data set: a folder for each split and class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 900), ("val", 120)):
        for i in range(count):
            path = folder / split / f"class{i % 5}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (19, 27, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)


def outcome(workdir):
    """Returns what must be the same whatever happened on the way."""
    report = json.loads((workdir / "report.json").read_text())
    speed = re.compile("second|wait|stall|memory|phase|time|startup|mfu|utili")
    lines = [
        {k: v for k, v in json.loads(line).items() if re.match("step$|val/", k)}
        | {k: v for k, v in json.loads(line).items() if k.endswith(("/loss", "/rate"))}
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
        if not all(speed.search(k) for k in json.loads(line) if k != "step")
    ]
    return {
        "sha256": report["params_sha256"],
        "final": report["final"],
        "metrics": lines,
        "checkpoints": sorted(p.name for p in (workdir / "checkpoints").iterdir()),
        "files": sorted(p.name for p in workdir.iterdir()),
    }


def compiled(config):
    """Returns the folder of compiled programs."""
    return config.parent / "compiled"


def undisturbed(config, workdir, hosts, evaluate):
    """Runs twice; returns the outcome and the seconds of the one that compiles less."""
    outcomes = []
    for name in ("cold", "warm"):
        job = Job(config, workdir / name, hosts, evaluate)
        codes = job.wait()
        seconds = time.monotonic() - job.began
        if any(codes):
            raise SystemExit(f"the undisturbed run ended with {codes}\n{job.said()}")
        outcomes.append(outcome(workdir / name))
    if outcomes[0] != outcomes[1]:
        raise SystemExit(f"two undisturbed runs differ: {outcomes}")
    return outcomes[0], seconds


def punish(config, workdir, hosts, evaluate, seconds, rng, budget, seen, *, one_host):
    """Starts a run until it is done, killing it up to `budget` times.

    Args:
      seen: gets the exit codes of hosts that lost the other, and what starts left.
      one_host: whether both hosts are never killed at once.

    Returns:
      What it was at when it was killed, and the steps from which it was resumed.
    """
    kills, resumed, starts = [], [], 0
    both = [] if one_host else [[0, 1]] * 2
    while True:
        if rng.random() < COLD:
            shutil.rmtree(compiled(config), ignore_errors=True)
        job, moment = Job(config, workdir, hosts, evaluate), rng.uniform(0, seconds)
        starts, hit = starts + 1, ""
        victims = rng.choice([[0], [1], *both]) if hosts > 1 else [0]
        spare = len(kills) >= budget
        while job.running():
            time.sleep(0.005)
            if not spare and time.monotonic() - job.began >= moment:
                # A process that has ended already cannot be killed.
                if any(p.poll() is not None for p in job.processes):
                    break
                whom = ", one host" if hosts > 1 and len(victims) == 1 else ""
                hit = job.doing() + whom
                job.kill(victims)
                break
        codes = job.wait()
        seen["left"].update(job.leftovers())
        if hit and -signal.SIGKILL in codes:  # Else it had ended a moment before.
            kills.append(hit)
            if hosts > 1 and len(victims) == 1:
                code, text = codes[1 - victims[0]], "".join(job.lines[1 - victims[0]])
                # One that had done its work when the other was killed has lost nothing.
                done = code == 0 and (workdir / "report.json").exists()
                seen["codes"][code] += 1
                if not done and not (code == 75 and names_the_lost(text, victims[0])):
                    seen["wrong"] += 1
                    print(f"after a kill ({hit}): {codes}\n{job.said()}", flush=True)
        text = "".join(job.lines[0])
        resumed += re.findall(r"resume: step (\d+) of", text)
        if not any(codes):
            return kills, resumed, starts
        if all(code >= 0 for code in codes):  # Not killed, and not done.
            raise SystemExit(f"a start ended with {codes}\n{job.said()}")
        if starts > budget + 20:
            raise SystemExit(f"the run makes no progress\n{job.said()}")


# Near the end of a run, as it is seen from outside.
WINDOWS = {
    "after the last step": lambda job, last: job.printed(f"step {last}/{last}  loss"),
    "in the last save": lambda job, last: job.saved(f"{last}.unfinished"),
    "in the last evaluation": lambda job, last: job.saved(f"{last}/checksums.json"),
    "before the report": lambda job, last: job.printed(f"step {last}/{last}  top-1"),
    "after the report": lambda job, _: (job.workdir / "report.json").exists(),
}


def aim(config, folder, evaluate, last, wanted, rng, signals):
    """Ends runs of one process in each window; returns how many went wrong."""
    wrong = 0
    for name, is_in in WINDOWS.items():
        for number in signals:
            job = Job(config, folder / f"{name}, {number.name}", 1, evaluate)
            while job.running() and not is_in(job, last):
                time.sleep(0.002)
            if name == "after the report":
                time.sleep(rng.uniform(0, 0.5))
            job.processes[0].send_signal(number)
            (code,) = job.wait()
            again = Job(config, job.workdir, 1, evaluate)
            got = outcome(job.workdir) if again.wait() == [0] else {}
            bad = [key for key in wanted if got.get(key) != wanted[key]]
            if code not in (0, 75 if number == signal.SIGTERM else -number):
                bad.append(f"code {code}")
            wrong += bool(bad)
            print(
                f"{number.name} {name}: {code}, {', '.join(bad) or 'identical'}",
                flush=True,
            )
            if bad:
                print(job.said(), again.said(), flush=True)
    return wrong


def main():
    """Runs the soak and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hosts", default="1,2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--one_host", action="store_true")
    parser.add_argument("--aimed", default="", help="signals, separated by commas")
    flags = smoke.parse(parser, "--kills=0 --steps=14 --hosts=1")
    rng, began = random.Random(flags.seed), time.monotonic()
    counts, different, rows = collections.Counter(), 0, []
    seen = collections.defaultdict(collections.Counter) | {"wrong": 0}
    kinds = [int(x) for x in flags.hosts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        evaluate = max(flags.steps // 4, 14)  # It starts loader processes.
        make_images(folder / "images")
        text = CONFIG.replace("STEPS", str(flags.steps))
        text = text.replace("IMAGES", str(folder / "images"))
        text = text.replace("WORKERS", str(flags.workers))
        (folder / "soak.py").write_text(text.replace("EVALUATE", str(evaluate)))
        for i, hosts in enumerate(kinds):
            share = flags.kills // len(kinds) + (i < flags.kills % len(kinds))
            place = folder / str(hosts)
            wanted, seconds = undisturbed(
                folder / "soak.py", place / "undisturbed", hosts, evaluate
            )
            print(
                f"{hosts} host(s): undisturbed {seconds:.1f} s, params sha256 "
                f"{wanted['sha256'][:16]}",
                flush=True,
            )
            if flags.aimed and hosts == 1:
                different += aim(
                    *(folder / "soak.py", place, evaluate, flags.steps, wanted, rng),
                    [signal.Signals[name] for name in flags.aimed.split(",")],
                )
            run = 0
            while share:
                run += 1
                workdir = place / f"run{run}"
                kills, resumed, starts = punish(
                    *(folder / "soak.py", workdir, hosts, evaluate, seconds, rng),
                    min(share, KILLS_A_RUN),
                    seen,
                    one_host=flags.one_host,
                )
                share -= len(kills)
                got = outcome(workdir)
                wrong = [key for key in wanted if got[key] != wanted[key]]
                different += bool(wrong)
                counts.update((hosts, kill) for kill in kills)
                rows.append((hosts, len(kills), starts))
                print(
                    f"{hosts} host(s), run {run}: {len(kills)} kills, {starts} starts, "
                    f"resumed from {', '.join(resumed) or 'nothing'}, "
                    f"{seen['left'].total()} left behind: "
                    f"{'DIFFERENT in ' + ', '.join(wrong) if wrong else 'identical'}",
                    flush=True,
                )
                for key in wrong:
                    print(f"{key}: {got[key]}, not {wanted[key]}", flush=True)
    print(f"\n{'killed during':40} " + " ".join(f"{h} host(s)" for h in kinds))
    for what in sorted({what for _, what in counts}):
        cells = [f"{counts[hosts, what]:9}" for hosts in kinds]
        print(f"{what:40} " + " ".join(cells))
    print(
        f"{counts.total()} kills, {sum(s for *_, s in rows)} starts, {len(rows)} runs, "
        f"{different} different, seed {flags.seed}, {time.monotonic() - began:.0f} s"
    )
    codes = ", ".join(f"{code}: {n}" for code, n in sorted(seen["codes"].items()))
    print(
        f"hosts that lost the other ended with {codes or 'nothing'}; {seen['wrong']} not "
        "with 75 and its name"
    )
    left = ", ".join(f"{n} x {what}" for what, n in sorted(seen["left"].items()))
    print(f"left behind: {left or 'nothing'}")
    return int(different > 0 or seen["wrong"] > 0 or bool(seen["left"]))


if __name__ == "__main__":
    sys.exit(main())

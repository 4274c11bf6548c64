"""Kills a small run again and again, and compares its end with one left alone.

Run: python benchmarks/soak.py [--kills=200] [--hosts=1,2] [--seed=0] [--steps=160]

Each run is started, killed with SIGKILL at a random moment, uniform over the time that
an undisturbed run takes from its start to its report, and started again, until it is
done. Runs are begun until there were enough kills; half of them of one process and half
of two that train together as two hosts do, of which one or both are killed. Every run
must end with the parameters of the undisturbed one of as many hosts, bit for bit, and
with its metrics, each step once. A host that loses the other must end by itself. Starts
share a cache of compiled programs; one in twenty finds it empty.

Prints what was being done at each kill, seen from outside: by the last line printed, and
for a save by the unfinished folder on the disk. Exits with 1 if any run differs.
"""

import argparse
import collections
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

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.name, c.seed, c.total_steps, c.batch_size = "soak", 3, STEPS, 24
    c.data = dict(name="made", classes=5, examples=3_000, image_size=(16, 24))
    c.data.ops = "random_crop | flip | mixup(0.3)"
    c.model = dict(variant="Ti/4", width=48, depth=2, heads=3, mlp_dim=96)
    c.model.dropout = 0.1
    c.optim = dict(rate=0.01, warmup_steps=5)
    c.evals = dict(val="val[:400]")
    c.every = dict(log=1, evaluate=EVALUATE, checkpoint=7)
    return c
"""
LOST_SECONDS = 8  # Of silence after which a host counts as lost.
START_SECONDS = 45  # For which a host waits for one that was killed before it came.
HANG_SECONDS = 120.0
KILLS_A_RUN = 20  # Then it is left to finish.
COLD = 0.05  # Of the starts find no compiled program.


class Job:
    """One start of a run, of one process or several."""

    def __init__(self, config, workdir, hosts, evaluate):
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
            thread = threading.Thread(target=lines.extend, args=(process.stdout,))
            thread.start()
            self.processes.append(process)
            self.lines.append(lines)
            self._threads.append(thread)

    def running(self):
        """Tells whether any process of it runs."""
        return any(process.poll() is None for process in self.processes)

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

    def wait(self):
        """Waits for the end of all; returns their exit codes."""
        until, hung = time.monotonic() + HANG_SECONDS, []
        for host, process in enumerate(self.processes):
            try:
                process.wait(timeout=max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # It prints its stacks.
                hung.append(host)
        for thread, process in zip(self._threads, self.processes, strict=True):
            process.wait()
            thread.join()
            process.stdout.close()
        if hung:
            raise SystemExit(f"hung for {HANG_SECONDS:g} s: {hung}\n{self.said()}")
        return [process.returncode for process in self.processes]

    def said(self):
        """Returns all that was printed, for an error."""
        return "".join(f"--- host {i}\n{''.join(x)}" for i, x in enumerate(self.lines))


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


def punish(config, workdir, hosts, evaluate, seconds, rng, budget):
    """Starts a run until it is done, killing it up to `budget` times.

    Returns:
      What it was at when it was killed, and the steps from which it was resumed.
    """
    kills, resumed, starts = [], [], 0
    while True:
        if rng.random() < COLD:
            shutil.rmtree(compiled(config), ignore_errors=True)
        job, moment = Job(config, workdir, hosts, evaluate), rng.uniform(0, seconds)
        starts, hit = starts + 1, ""
        victims = rng.choice([[0], [1], [0, 1], [0, 1]]) if hosts > 1 else [0]
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
        if hit and -signal.SIGKILL in codes:  # Else it had ended a moment before.
            kills.append(hit)
        text = "".join(job.lines[0])
        resumed += re.findall(r"resume: step (\d+) of", text)
        if not any(codes):
            return kills, resumed, starts
        if all(code >= 0 for code in codes):  # Not killed, and not done.
            raise SystemExit(f"a start ended with {codes}\n{job.said()}")
        if starts > budget + 20:
            raise SystemExit(f"the run makes no progress\n{job.said()}")


def main():
    """Runs the soak and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hosts", default="1,2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160)
    flags = parser.parse_args()
    rng, began = random.Random(flags.seed), time.monotonic()
    counts, different, rows = collections.Counter(), 0, []
    kinds = [int(x) for x in flags.hosts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        evaluate = flags.steps // 4
        text = CONFIG.replace("STEPS", str(flags.steps))
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
            run = 0
            while share:
                run += 1
                workdir = place / f"run{run}"
                kills, resumed, starts = punish(
                    *(folder / "soak.py", workdir, hosts, evaluate, seconds, rng),
                    min(share, KILLS_A_RUN),
                )
                share -= len(kills)
                got = outcome(workdir)
                wrong = [key for key in wanted if got[key] != wanted[key]]
                different += bool(wrong)
                counts.update((hosts, kill) for kill in kills)
                rows.append((hosts, len(kills), starts))
                print(
                    f"{hosts} host(s), run {run}: {len(kills)} kills, {starts} starts, "
                    f"resumed from {', '.join(resumed) or 'nothing'}: "
                    f"{'DIFFERENT in ' + ', '.join(wrong) if wrong else 'identical'}",
                    flush=True,
                )
    print(f"\n{'killed during':40} " + " ".join(f"{h} host(s)" for h in kinds))
    for what in sorted({what for _, what in counts}):
        cells = [f"{counts[hosts, what]:9}" for hosts in kinds]
        print(f"{what:40} " + " ".join(cells))
    print(
        f"{counts.total()} kills, {sum(s for *_, s in rows)} starts, {len(rows)} runs, "
        f"{different} different, seed {flags.seed}, {time.monotonic() - began:.0f} s"
    )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

"""How long a run takes until its first step is done, at its first and second start.

Run: python -m benchmarks.reliability.startup [--rounds=5] [--cases=digits,S/16]

Starts `python -m vit_jax.train` as a user does, with an empty compilation cache and then
with the one that this left, and reads what the run itself says of its start; it is ended
after its first step. One cold and one warm start of each case a round. Prints medians in
seconds, and how much sooner the second start is there, with the quartiles of single
rounds. The training step is compiled while the state is made ("init"): "compile" is what
is left to wait for after that. "compiling" is all of it, or reading it again.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks import smoke

ROOT = pathlib.Path(__file__).resolve().parents[2]
PHASES = ("import", "devices", "data", "trace", "init", "compile", "first step")
MADE = (
    "--config.data.name=synthetic",
    "--config.data.num_examples=200",
    "--config.evals={}",
)
SMALL = (*MADE, "--config.data.num_classes=1000", "--config.model.head_bias_init=0.0")
CASES = {
    "tiny": ("configs/digits.py:quick", *MADE),  # For --smoke.
    "digits": ("configs/digits.py",),
    "flowers": ("configs/flowers.py", *MADE, "--config.batch_size=8"),
    "S/16": (
        "configs/b16_i1k.py",
        *SMALL,
        "--config.model.variant=S/16",
        "--config.batch_size=8",
    ),
    "B/16": ("configs/b16_i1k.py", *SMALL, "--config.batch_size=2"),
    "L/16": ("configs/b16_i1k.py:model=L/16", *SMALL, "--config.batch_size=1"),
    "R50+B/16": (
        "configs/b16_i1k.py",
        *SMALL,
        "--config.model.variant=R50+B/16",
        "--config.batch_size=2",
    ),
}


def start(words: tuple[str, ...], cache: str) -> dict[str, float]:
    """Starts a run, ends it after its first step and returns seconds by phase."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    env["XDG_CACHE_HOME"] = cache
    with tempfile.TemporaryDirectory() as workdir:
        config, *rest = words
        command = [sys.executable, "-m", "vit_jax.train", f"--config={config}", *rest]
        command += [f"--workdir={workdir}", "--config.log_every_steps=1"]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step 1/"):
                    break
            # The line is printed before the metrics are written.
            for _ in range(100):
                if found := phases(pathlib.Path(workdir) / "metrics.jsonl"):
                    break
                time.sleep(0.1)
            process.kill()
        if not found:
            sys.exit("".join(lines))
    return found


def phases(path: pathlib.Path) -> dict[str, float]:
    """Returns seconds by phase from the metrics of a first step, {} if not there yet."""
    if not path.exists():
        return {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        if "train/start_import" in values:
            found = {phase: values[f"train/start_{phase}"] for phase in PHASES}
            return found | {"compiling": values["train/compile_seconds"]}
    return {}


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="digits,S/16,B/16,R50+B/16")
    args = smoke.parse(parser, "--rounds=1 --cases=tiny")
    names = args.cases.split(",")
    seconds = {(name, kind): [] for name in names for kind in ("first", "second")}
    for _ in range(args.rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("first", "second"):
                    seconds[name, kind].append(start(CASES[name], cache))
    print(f"| config | start | {' | '.join(PHASES)} | sum | compiling |")
    print("|---|---" + "|---" * (len(PHASES) + 2) + "|")
    for (name, kind), rounds in seconds.items():
        cells = [statistics.median(r[phase] for r in rounds) for phase in PHASES]
        cells.append(statistics.median(sum(r[p] for p in PHASES) for r in rounds))
        cells.append(statistics.median(r["compiling"] for r in rounds))
        print(f"| {name} | {kind} | {' | '.join(f'{x:.2f}' for x in cells)} |")
    print("\n| config | first / second start | without the first step itself |")
    print("|---|---|---|")
    for name in names:
        cells = []
        for counted in (PHASES, PHASES[:-1]):
            first, second = (
                np.array([sum(r[p] for p in counted) for r in seconds[name, kind]])
                for kind in ("first", "second")
            )
            low, high = np.quantile(first / second, (0.25, 0.75))
            ratio = np.median(first) / np.median(second)
            cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

"""The tables of docs/scale.md: runs on 300 million images on 256 to 4,096 chips.

python -m benchmarks.compile.scale --out=rows.jsonl  compiles what is not in the file yet
python -m benchmarks.compile.scale --out=rows.jsonl --table --plan=price=1.2  prints tables

Needs the extra `tpu`. Each row is a process of its own, one after the other, and takes
minutes. The tables are made from the file with any inputs of the plan (docs/compile.md),
without compiling again.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import shlex
import subprocess
import sys

from benchmarks import smoke
from vit_jax.distributed import chips
from vit_jax.tools.planning import run_plan
from vit_jax.tools.planning.analysis import Analysis, Roofline

_PEAK = chips.find("TPU v5e").peak_flops
_MODELS = {
    "B/16": ["--config=configs/jft.py:model=B/16"],
    "L/16": ["--config=configs/jft.py:model=L/16-14ep"],
    "H/14": ["--config=configs/jft.py:model=H/14"],
    # Not in the paper: the recipe of H/14, with what makes it fit.
    "g/14": [
        "--config=configs/jft.py:model=H/14",
        "--config.model.variant=g/14",
        "--config.mesh.fsdp=16",
        "--config.optim.mu_dtype=bfloat16",
    ],
}
# Slices of v5e:16x16 to images in a step: 16 on a chip, and 8 on each of 4,096.
_BATCHES = {1: 4_096, 4: 16_384, 16: 32_768}


def _rows():
    """Yields name and words of each row, the smaller slices first."""
    for slices, batch in _BATCHES.items():
        for model, words in _MODELS.items():
            yield (
                f"{model} {256 * slices}",
                [
                    *words,
                    "--topology=v5e:16x16",
                    f"--slices={slices}",
                    f"--config.batch_size={batch}",
                    "--plan",
                    "--json",
                ],
            )


def _compile(words):
    done = subprocess.run(
        [sys.executable, "-m", "vit_jax.compile", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3):
        raise RuntimeError(f"ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def _plan(row, assumed):
    """Returns a row's plan with other inputs."""
    names = [field.name for field in dataclasses.fields(Analysis)]
    bounds = row["roofline"]
    times = [bounds[field.name] for field in dataclasses.fields(Roofline)]
    found = {name: row[name] for name in names}
    found |= {"roofline": Roofline(*times), "collectives": tuple(row["collectives"])}
    old = row["plan"]
    stated = tuple(one["stated"] for one in old["checkpoints"])
    return run_plan.make(
        Analysis(**found),
        old["chips"],
        old["hosts"],
        old["steps"],
        stated,
        _PEAK,
        assumed,
    )


def _table(heads, rows):
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def _tables(rows, assumed):
    """Prints three tables in Markdown: the step, what feeds and saves it, failures."""
    fitting = {name: row for name, row in rows.items() if row["fits"]}
    plans = {name: _plan(row, assumed) for name, row in fitting.items()}
    for name in rows.keys() - fitting.keys():
        print(f"{name} does not fit")
    _table(
        ("model, chips", "peak GiB", "floor, ms", "step, ms", "by", "MB ICI", "MB DCN"),
        [
            (
                name,
                f"{fitting[name]['peak_bytes'] / 2**30:.2f}",
                f"{fitting[name]['roofline']['floor'] * 1e3:.1f}",
                f"{plan.step_seconds * 1e3:.1f}",
                plan.bound,
                f"{plan.sent_bytes[0] / 1e6:,.0f}",
                f"{plan.sent_bytes[1] / 1e6:,.1f}",
            )
            for name, plan in plans.items()
        ],
    )
    heads = ("model, chips", "images/s", "hosts", "input hosts", "GB/s read")
    _table(
        (*heads, "checkpoint, GB", "s, disk", "s, storage"),
        [
            (
                name,
                f"{plan.images_per_second:,.0f}",
                f"{plan.hosts:,}",
                f"{plan.input_hosts(assumed):,}",
                f"{plan.images_per_second * assumed.image_bytes / 1e9:.1f}",
                f"{plan.state_bytes / 1e9:.2f}",
                *(f"{one.job.write:.1f}" for one in plan.checkpoints),
            )
            for name, plan in plans.items()
        ],
    )
    heads = ("model, chips", "days of steps", "failures", "Young's, steps", "best")
    _table(
        (*heads, "goodput", "with storage", "chip-hours", "cost"),
        [
            (
                name,
                f"{plan.days_of_steps:.2f}",
                f"{local.job.work / local.job.mean_time:.1f}",
                f"{local.young:,}",
                f"{local.best:,}",
                f"{local.goodput:.1%}",
                f"{storage.goodput:.1%}",
                f"{plan.chip_hours:,.0f}",
                f"{plan.chip_hours * assumed.price:,.0f}",
            )
            for name, plan in plans.items()
            for local, storage in [plan.checkpoints]
        ],
    )


SMOKE = """--out={folder}/rows.jsonl --only='B/16 256' --extra='--topology=v5e:2x2
--config.model.variant=Ti/16 --config.model.depth=1 --config.batch_size=8
--config.data.num_classes=10 --config.data.image_size=(32,32)'"""


def main() -> None:
    """Compiles or prints, as the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--extra", default="", help="words for each command")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plan", default="", help="inputs: price=1.2,host_days=30")
    flags = smoke.parse(parser, SMOKE)
    lines = flags.out.read_text().splitlines() if flags.out.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    if flags.table:
        _tables(rows, run_plan.parse(flags.plan))
        return
    for name, words in _rows():
        if name in rows or not re.search(flags.only, name):
            continue
        words += shlex.split(flags.extra)
        print(name, " ".join(words), flush=True)
        row = {"name": name} | _compile(words)
        with flags.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"  {row['compile_seconds']} s, fits: {row['fits']}", flush=True)


if __name__ == "__main__":
    main()

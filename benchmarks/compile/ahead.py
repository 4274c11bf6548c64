"""What tpu_ahead.py and gpu_ahead.py share: a file of compiled rows, and its flags."""

import argparse
import json
import pathlib
import re
import resource
import shlex
import subprocess
import sys
import time


def parser(about):
    """Returns the flags of a script with this docstring."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--extra", default="", help="words for each command")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--prefix", default="", help="of each command, as a lock")
    parser.add_argument("--list", action="store_true")
    return parser


def run(flags, rows, table):
    """Compiles or prints, as the flags say.

    Args:
      flags: result of `parser`.
      rows: name and words of each command, the most wanted first.
      table: function that prints the rows of the file.
    """
    lines = flags.out.read_text().splitlines() if flags.out.exists() else []
    compiled = [json.loads(line) for line in lines]
    if flags.table:
        table(compiled)
        return
    done = {row["name"] for row in compiled}
    for name, words in rows:
        if name in done or not re.search(flags.only, name):
            continue
        words += shlex.split(flags.extra)
        print(name, " ".join(words), flush=True)
        if flags.list:
            continue
        row = {"name": name} | _run(words, flags.prefix)
        if row["code"] not in (0, 3):  # Killed, say: no result, to be tried again.
            print(f"  ended with {row['code']}: {row.get('error')}", flush=True)
            continue
        with flags.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        peak = row.get("peak_bytes", 0) / 2**30
        print(f"  {row['seconds']} s, {peak:.2f} GiB, {row.get('error')}", flush=True)


def _run(words, prefix):
    """Runs one compilation; returns what it printed and what it took."""
    began, before = time.perf_counter(), _children()
    json_flag = ["--json"] if words[0] == "vit_jax.compile" else []
    done = subprocess.run(
        [*shlex.split(prefix), sys.executable, "-m", *words, *json_flag],
        capture_output=True,
        text=True,
        check=False,
    )
    row = {"words": words, "seconds": round(time.perf_counter() - began)}
    usage = _children()
    row["code"] = done.returncode
    row["cpu_seconds"] = round(usage.ru_utime - before.ru_utime)
    row["rss_gib"] = round(usage.ru_maxrss / 2**20, 2)  # The most of all so far.
    try:
        return row | json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return row | {"error": done.stderr[-500:]}


def _children():
    return resource.getrusage(resource.RUSAGE_CHILDREN)

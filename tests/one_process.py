"""Runs commands one after another in one process: most of their time is Python's start.

run([["python", "-m", "vit_jax.predict", "--help"]], cwd)
"""

import json
import os
import pathlib
import runpy
import subprocess
import sys


def run(commands, cwd, **environment):
    """Runs commands, each a list of words, in a new process; all must succeed."""
    end = subprocess.run(
        [sys.executable, pathlib.Path(__file__).resolve()],
        input=json.dumps(commands),
        cwd=cwd,
        env=os.environ | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    begun = end.stdout.count("=== begins: ")
    assert end.returncode == 0, f"{end.stdout[-5_000:]}\n{end.stderr[-5_000:]}"
    assert begun == len(commands)


def _run(words):
    """Runs a command in this process; returns its exit code."""
    python, *words = words
    assert python == "python", python
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


if __name__ == "__main__":
    sys.path.insert(0, "")  # As `python -m` has it.
    for words in json.load(sys.stdin):
        print(f"=== begins: {words}", flush=True)
        if code := _run(words):
            sys.exit(f"exit code {code}: {words}")

"""A short soak: ten kills at random moments; benchmarks/soak.py makes two hundred."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_runs_that_are_killed_ten_times_end_as_the_undisturbed_ones():
    words = ["--kills=10", "--steps=48", "--seed=7"]
    # Compiled in a hurry: what is killed is the same.
    flags = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    end = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "soak.py", *words],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert end.returncode == 0, end.stdout + end.stderr
    assert re.search(r"\n10 kills, \d+ starts, \d+ runs, 0 different", end.stdout)

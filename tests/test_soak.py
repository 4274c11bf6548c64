"""A short soak: two kills at random moments, and a SIGTERM in each window near the end.

benchmarks/soak.py makes two hundred kills; its aimed SIGKILLs are left out here, since each
aimed signal takes two starts, and the random kills are SIGKILLs.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from hosts import HURRY

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_runs_that_are_killed_twice_end_as_the_undisturbed_ones():
    words = ["--kills=2", "--steps=20", "--seed=7", "--aimed=SIGTERM"]
    end = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "soak.py", *words],
        env=os.environ | {"XLA_FLAGS": HURRY},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert end.returncode == 0, end.stdout + end.stderr
    assert re.search(r"\n2 kills, \d+ starts, \d+ runs, 0 different", end.stdout)

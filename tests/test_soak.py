"""A short soak: a kill of hosts at a random moment, a SIGTERM in each window near the end.

benchmarks/soak.py makes two hundred kills. Its aimed SIGKILLs and its loader processes are
left out here, since each aimed signal takes two starts; test_resume.py kills one process,
test_ending.py loaders.
"""

import re

import pytest
from helpers import ROOT, run_python
from hosts import HURRY


@pytest.mark.slow
def test_runs_that_are_killed_or_ended_are_equal_to_the_undisturbed_ones():
    words = ["--kills=1", "--hosts=2,1", "--steps=14", "--seed=7", "--workers=0"]
    words.append("--aimed=SIGTERM")
    end = run_python(ROOT / "benchmarks" / "soak.py", *words, XLA_FLAGS=HURRY)
    assert end.returncode == 0, end.stdout + end.stderr
    assert re.search(r"\n1 kills, \d+ starts, \d+ runs, 0 different", end.stdout)

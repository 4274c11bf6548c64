"""A short soak: a SIGTERM in each window near the end of a run.

benchmarks/reliability/soak.py makes two hundred kills besides. They are left out here, since each takes
two starts: test_resume.py kills one process, test_two_hosts.py hosts, test_ending.py loaders.
"""

import re

import pytest
import warm
from helpers import ROOT
from hosts import HURRY


@pytest.mark.slow
def test_runs_that_are_ended_are_equal_to_the_undisturbed_one():
    words = ["--kills=0", "--hosts=1", "--steps=14", "--workers=0", "--aimed=SIGTERM"]
    with warm.Process(
        ROOT, fork=True, PYTHONPATH=str(ROOT), XLA_FLAGS=HURRY
    ) as process:
        out = warm.succeed(process, "benchmarks/reliability/soak.py", words)
    assert len(re.findall(r"^SIGTERM .*: \d+, identical$", out, re.MULTILINE)) == 5
    assert re.search(r"\n0 kills, 0 starts, 0 runs, 0 different", out)

"""Processes that JAX's C++ code aborts: which exit code they get."""

import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# The abort comes from another thread than Python's, as JAX's does.
PROGRAM = """
import ctypes, faulthandler, os, threading, time
from vit_jax.parallel import aborts

faulthandler.enable()
aborts.explain(lambda: (3, "not this"))
aborts.explain(lambda: {answer})
abort = ctypes.CDLL(None).abort
threading.Thread(target=abort).start()
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ("(75, 'process 0 is lost')", 75, "error: process 0 is lost\n"),
        ("None", -signal.SIGABRT, "Fatal Python error: Aborted"),
        ("1 / 0", -signal.SIGABRT, "Fatal Python error: Aborted"),
    ],
)
def test_an_abort_gets_the_exit_code_that_it_means(answer, code, said):
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(answer=answer)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == code, process.stderr
    assert process.stderr.startswith(said)

"""Processes that end in different ways, and the messages printed for them."""

import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import os, signal, sys, time
from vit_jax.distributed import crash_reporter
crash_reporter.set_message("not this")
crash_reporter.set_message("it was killed")
exec(sys.argv[1])
"""


def stderr_of(ending):
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, ending],
        cwd=ROOT,
        check=False,
        capture_output=True,  # Ends when the reporter has ended too.
        text=True,
        timeout=60,
    )
    return process.returncode, process.stderr


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("os._exit(7)", 7),
    ],
)
def test_the_message_is_printed_for_a_process_that_ends_without_a_word(ending, code):
    assert stderr_of(ending) == (code, "error: it was killed\n")


@pytest.mark.parametrize(
    "ending", ["pass", "sys.exit(3)", "crash_reporter.clear(); os.abort()"]
)
def test_nothing_is_said_for_one_that_ends_in_order(ending):
    assert stderr_of(ending)[1] == ""


def test_sigterm_for_all_does_not_silence_the_reporter():
    ending = "time.sleep(0.3); crash_reporter._reporters[0].terminate(); os.abort()"
    assert stderr_of(ending)[1] == "error: it was killed\n"

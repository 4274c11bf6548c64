"""Processes that end in different ways, and what is said for them."""

import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import os, signal, sys, time
from vit_jax.parallel import last_words
last_words.leave("not this")
last_words.leave("it was killed")
exec(sys.argv[1])
"""


def stderr_of(ending):
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, ending],
        cwd=ROOT,
        check=False,
        capture_output=True,  # Ends when the witness has ended too.
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
def test_the_last_words_are_said_for_a_process_that_ends_without_a_word(ending, code):
    assert stderr_of(ending) == (code, "error: it was killed\n")


@pytest.mark.parametrize(
    "ending", ["pass", "sys.exit(3)", "last_words.forget(); os.abort()"]
)
def test_nothing_is_said_for_one_that_ends_in_order(ending):
    assert stderr_of(ending)[1] == ""


def test_sigterm_for_all_does_not_silence_the_witness():
    ending = "time.sleep(0.3); last_words._started[0].terminate(); os.abort()"
    assert stderr_of(ending)[1] == "error: it was killed\n"

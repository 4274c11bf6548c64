"""Processes that end in different ways, and what is said for them."""

import pathlib
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import os, signal, sys, time
from vit_jax.parallel import last_words
last_words.leave("not this")
last_words.leave("it was killed", *sys.argv[2:], patience=1.0)
exec(sys.argv[1])
"""


def stderr_of(ending, *words):
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, ending, *words],
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


def test_other_words_are_said_when_the_service_is_gone():
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        there = stderr_of("os.abort()", address, "process 0 is gone")[1]
    gone = stderr_of("os.abort()", address, "process 0 is gone")[1]
    assert there == "error: it was killed\n"
    assert gone == "error: process 0 is gone\n"


@pytest.mark.parametrize(
    ("pause", "said"),
    [(0.0, "it was killed"), pytest.param(1.5, "0 is gone", marks=pytest.mark.slow)],
)
def test_other_words_are_said_when_the_service_has_not_answered(pause, said):
    ending = f"time.sleep(1.1); last_words.answered(); time.sleep({pause}); os.abort()"
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        assert stderr_of(ending, address, "0 is gone")[1] == f"error: {said}\n"

"""Processes that end in different ways, and the messages printed for them."""

import signal

import pytest
from helpers import run_python

PROGRAM = """
import os, signal, sys, time
from vit_jax.distributed import crash_reporter
crash_reporter.set_message("not this")
crash_reporter.set_message("it was killed")
exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, True),
        ("os.abort()", -signal.SIGABRT, True),
        ("os._exit(7)", 7, True),
        ("pass", 0, False),
        ("sys.exit(3)", 3, False),
        ("crash_reporter.clear(); os.abort()", -signal.SIGABRT, False),
        # SIGTERM for all does not silence the reporter.
        (
            "time.sleep(0.3); crash_reporter._reporters[0].terminate(); os.abort()",
            -signal.SIGABRT,
            True,
        ),
    ],
)
def test_the_message_is_printed_for_a_process_that_ends_without_a_word(
    ending, code, said
):
    end = run_python("-c", PROGRAM, ending)  # Ends when the reporter has ended too.
    assert end.returncode == code
    assert end.stderr == ("error: it was killed\n" if said else "")

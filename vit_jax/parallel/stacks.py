"""The stacks of all threads, for a process that hangs and of one that waits for it."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal

_SHOWING_SECONDS = 2.0  # That a loader process has to write its stacks.


def show(who: str) -> None:
    """Writes the stacks to stderr, those of loader processes included, which end by it.

    Args:
      who: in front of the line that introduces them.
    """
    # Not through sys.stderr: a thread that hangs may hold its lock.
    os.write(2, f"\n{who}: the stacks of all threads:\n".encode())
    faulthandler.dump_traceback(file=2, all_threads=True)
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            os.kill(child.pid, signal.SIGABRT)
        # Or lines of several processes would be mixed.
        child.join(_SHOWING_SECONDS)

"""What is said for this process when it ends without a chance to say it itself.

JAX aborts a process, with a C++ stack trace and no way to prevent it, when it loses the
process that runs the coordination service; the kernel kills one that is out of memory.
So a small second process (witness.py) holds the other end of a pipe, and prints the
words that were left with it when the pipe closes.
"""

import atexit
import contextlib
import json
import pathlib
import subprocess
import sys

from vit_jax.parallel import witness

_started: list[subprocess.Popen] = []


def leave(
    words: str, service: str = "", if_gone: str = "", patience: float = 0.0
) -> None:
    """Leaves words for a sudden end, in place of those left before.

    Args:
      words: one line.
      service: host:port of the coordination service, in another process.
      if_gone: words instead, if the service cannot be reached when this process ends,
        or has not answered for some time (`answered`).
      patience: that time, in seconds.
    """
    if not _started:
        path = pathlib.Path(witness.__file__)
        with contextlib.suppress(OSError):  # Training goes on without.
            command = [sys.executable, "-I", "-S", str(path)]
            _started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
            atexit.register(forget)
    will = {"words": words, "service": service, "if_gone": if_gone}
    _tell(json.dumps(will | {"patience": patience}))


def answered() -> None:
    """Notes that the service has just answered."""
    _tell("+")


def forget() -> None:
    """Takes the words back: this process has said, or will say, why it ends."""
    _tell("")


def _tell(line: str) -> None:
    for process in _started:
        with contextlib.suppress(OSError):  # Somebody has killed it.
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

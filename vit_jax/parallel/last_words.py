"""What is said for this process when it ends without a chance to say it itself.

The kernel kills one that is out of memory, and C++ code may crash it. So a small second
process (witness.py) holds the other end of a pipe, and prints the words that were left
with it when the pipe closes.
"""

import atexit
import contextlib
import pathlib
import subprocess
import sys

from vit_jax.parallel import witness

_started: list[subprocess.Popen] = []


def leave(words: str) -> None:
    """Leaves words for a sudden end, in place of those left before.

    Args:
      words: one line.
    """
    if not _started:
        path = pathlib.Path(witness.__file__)
        with contextlib.suppress(OSError):  # Training goes on without.
            command = [sys.executable, "-I", "-S", str(path)]
            _started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
            atexit.register(forget)
    _tell(words)


def forget() -> None:
    """Takes the words back: this process has said, or will say, why it ends."""
    _tell("")


def _tell(line: str) -> None:
    for process in _started:
        with contextlib.suppress(OSError):  # Somebody has killed it.
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

"""Prints a message for this process if it ends without a chance to print one.

The kernel kills a process that is out of memory, and C++ code may crash it. A small
second process holds the other end of a pipe, and prints the message that it was sent
last when the pipe closes. It runs this file as a script, so that the file imports the
standard library only.
"""

import atexit
import contextlib
import signal
import subprocess
import sys

_reporters: list[subprocess.Popen] = []


def set_message(message: str) -> None:
    """Sets the message that is printed if this process ends suddenly.

    Args:
      message: one line, which replaces the message that was set before.
    """
    if not _reporters:
        with contextlib.suppress(OSError):  # Training continues without a reporter.
            command = [sys.executable, "-I", "-S", __file__]
            _reporters.append(subprocess.Popen(command, stdin=subprocess.PIPE))
            atexit.register(clear)
    _send(message)


def clear() -> None:
    """Removes the message: this process has printed, or will print, why it ends."""
    _send("")


def _send(line: str) -> None:
    for reporter in _reporters:
        with contextlib.suppress(OSError):  # The reporter may have been killed.
            reporter.stdin.write(line.encode() + b"\n")
            reporter.stdin.flush()


def main() -> None:
    """Waits until the process ends, which closes stdin, then prints its message.

    Each line on stdin is a message that replaces the one before; an empty one is not
    printed.
    """
    # Signals are meant for the process; this one ends later.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    last = ""
    for line in sys.stdin:
        last = line.strip()
    if last:
        print(f"error: {last}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

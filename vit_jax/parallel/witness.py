"""Runs beside a process and says its last words when it ends without a word.

Started by last_words.py as a script, with nothing but the standard library. Each line
on stdin is a JSON object that takes the place of the one before it: `words`, and
perhaps `service` (host:port) with `if_gone`, the words if that cannot be reached any
more, or has not answered for `patience` seconds. A line with a plus sign: it has just
answered. An empty line: nothing is to be said. The end of stdin is the end of the
process.
"""

import json
import signal
import socket
import sys
import time

_SECONDS = 5  # To reach a service that is there.


def main() -> None:
    """Waits for the process to end; prints what is to be said, if anything."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Meant for the process; we end after it.
    last, heard = "", time.monotonic()
    for line in sys.stdin:
        heard = time.monotonic()
        last = last if line == "+\n" else line.strip()
    quiet = time.monotonic() - heard
    if not last:
        return
    will = json.loads(last)
    gone = will["service"] and (
        quiet > will["patience"] or not _reachable(will["service"])
    )
    print(f"error: {will['if_gone' if gone else 'words']}", file=sys.stderr, flush=True)


def _reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _SECONDS):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()

"""Runs beside a process and says its last words when it ends without a word.

Started by last_words.py as a script, with nothing but the standard library. Each line on
stdin takes the place of the one before it; an empty one: nothing is to be said. The end
of stdin is the end of the process.
"""

import signal
import sys


def main() -> None:
    """Waits for the process to end; prints what is to be said, if anything."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Meant for the process; we end after it.
    last = ""
    for line in sys.stdin:
        last = line.strip()
    if last:
        print(f"error: {last}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

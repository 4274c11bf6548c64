"""Which process a number means: when it started, and where numbers are counted."""

import os
import pathlib


def started(pid: int | str) -> str:
    """Returns when a process started, in clock ticks since the boot; "" if it is gone.

    A later process that was given the same number so does not count as the same. It is
    "" for every process where there is no /proc.
    """
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def namespace() -> str:
    """Returns the number of this process's pid namespace, such as a container's; or "0"."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"

"""Which process a number means, its age, and how the child processes of this one end."""

import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable
from multiprocessing import util

_JOIN_SECONDS = 1  # They die of a signal; a host that leaves is waited for.

_after_children: list[Callable[[], None]] = []


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


def age() -> float:
    """Returns for how many seconds this process has run; 0 if that is unknown."""
    try:
        ticks = int(started("self"))  # Since the machine's boot.
        born = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - born)
    except (ValueError, OSError, AttributeError):  # Not Linux.
        return 0.0


def namespace() -> str:
    """Returns the number of this process's pid namespace, such as a container's; or "0"."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def after_children(function: Callable[[], None]) -> None:
    """Has a function called when this process ends, after its child processes."""
    _after_children.append(function)
    # Of negative priority: when the children have ended. `atexit` is too early.
    util.Finalize(None, function, exitpriority=-1)


def end_children() -> None:
    """Ends child processes before an `os._exit`, as Python does when it exits."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(_JOIN_SECONDS)
    for function in _after_children:
        function()

"""Identifies processes by their start, and ends the child processes of this one."""

import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable
from multiprocessing import util

_JOIN_SECONDS = 1  # A signal ends them; other hosts wait for one that exits.

_after_children: list[Callable[[], None]] = []


def started(pid: int | str) -> str:
    """Returns when a process started, in clock ticks since the boot; "" if it is gone.

    The start distinguishes a process from a later one with the same pid. Without /proc
    the result is "" for every process.
    """
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def age() -> float:
    """Returns the age of this process in seconds; 0 if unknown."""
    try:
        ticks = int(started("self"))  # Since the machine's boot.
        born = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - born)
    except (ValueError, OSError, AttributeError):  # Not Linux.
        return 0.0


def namespace() -> str:
    """Returns the number of this process's pid namespace; "0" if unknown.

    Each container has a separate namespace.
    """
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def after_children(function: Callable[[], None]) -> None:
    """Registers a function to call when this process ends, after its children."""
    _after_children.append(function)
    # A negative priority is after the end of the children; `atexit` would be before it.
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

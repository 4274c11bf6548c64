"""Exit codes of our own where JAX's C++ code aborts this process.

JAX aborts a process that loses the coordination service, which process 0 runs, and one
whose job does not come together. It cannot be kept from it, so SIGABRT is caught before
it ends the process.
"""

import ctypes
import os
import signal
from collections.abc import Callable

_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_explain: list[Callable[[], tuple[int, str] | None]] = []
_former: list[int | None] = []


def explain(why: Callable[[], tuple[int, str] | None]) -> None:
    """Sets what an abort of this process means, in place of what was set before.

    Args:
      why: called in the thread that aborts; returns the exit code and the line for
        stderr, or None where the abort is no matter of the job. Then the process ends
        by SIGABRT as without this module.
    """
    _explain[:] = [why]
    if not _former:
        # Not Python's own `signal`: it runs handlers in the main thread, later.
        _former.append(_libc.signal(signal.SIGABRT, _address))


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    try:
        end = _explain[0]()
    except Exception:  # noqa: BLE001 (the abort is what matters)
        end = None
    if end is not None:
        code, line = end
        # Not through sys.stderr: a thread that hangs may hold its lock.
        os.write(2, f"error: {line}\n".encode())
        os._exit(code)
    _libc.signal(signal.SIGABRT, _former[0])  # Such as faulthandler's.
    getattr(_libc, "raise")(number)  # It comes when this function has returned.


_address = ctypes.cast(_on_abort, ctypes.c_void_p)

"""How a command ends after a signal, or when nobody reads its output."""

import atexit
import io
import os
import select
import signal
import sys
import threading

from vit_jax.distributed import crash_reporter
from vit_jax.errors import EXIT_INTERRUPTED, EXIT_TRY_AGAIN, Stopped

_interrupted = threading.Event()
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def catch(*, trains: bool) -> None:
    """Makes signals end this process with one line; call it in the main thread.

    Ctrl-C raises KeyboardInterrupt; a second one ends the process at once.

    Args:
      trains: whether SIGTERM and SIGHUP end the process with exit code 75, and it
        continues when its output cannot be written, because the terminal is gone.
        Training handles these signals while it has something to save
        (training/guards.py).
    """
    # nohup and background jobs of scripts start with signals ignored; they stay so.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python runs handlers in the main thread, which may be blocked in C code.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_count, args=(reader,), daemon=True).start()
    if not trains:
        return
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _preempt)
            # At its exit Python restores the handler that kills.
            atexit.register(signal.signal, number, signal.SIG_IGN)
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def raise_stopped() -> None:
    """Makes SIGTERM and SIGHUP raise `Stopped`, as Ctrl-C raises KeyboardInterrupt."""
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


def interrupted() -> bool:
    """Returns whether Ctrl-C has raised KeyboardInterrupt."""
    return _interrupted.is_set()


def unread() -> bool:
    """Returns whether the reader of stdout or stderr has gone away."""
    poll = select.poll()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_output() -> None:
    """Discards all output that is buffered or written later."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(nowhere, stream.fileno())


def _interrupt(_, frame) -> None:
    _interrupted.set()
    while frame is not None:
        # Modules that are being imported drop an exception, or abort the process.
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end("interrupted", EXIT_INTERRUPTED)
        frame = frame.f_back
    # It may be raised where Python can only report it, as in a destructor.
    sys.excepthook = sys.unraisablehook = threading.excepthook = lambda *_: None
    raise KeyboardInterrupt


def _count(reader: int) -> None:
    """Ends the process when Ctrl-C comes a second time."""
    count = 0
    while count < 2:
        count += os.read(reader, 1) == bytes([signal.SIGINT])
    _end("Ctrl-C again: ended at once", EXIT_INTERRUPTED)


def _stop(number: int, _) -> None:
    for each in _ENDING:  # A second signal must not interrupt the cleanup.
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)


def _preempt(number: int, _) -> None:
    name = signal.Signals(number).name
    text = f"{name}: ended, no training was under way; the same command resumes"
    _end(text, EXIT_TRY_AGAIN)


def _end(words: str, code: int) -> None:
    crash_reporter.clear()
    # Not through sys.stderr: the main thread may hold its lock.
    try:
        os.write(2, f"{words}\n".encode())
    finally:
        os._exit(code)


class _Lossy(io.FileIO):
    """A file that drops output that cannot be written."""

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _lossy(stream: io.TextIOWrapper | None) -> io.TextIOWrapper | None:
    if stream is None or stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # Closed or replaced.
    stream.flush()
    raw = _Lossy(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )

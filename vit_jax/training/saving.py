"""One checkpoint on its way to the disk, and how all processes agree on its end."""

import concurrent.futures
import itertools
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from vit_jax.parallel import board
from vit_jax.training import leftovers
from vit_jax.weights import workdir as layout

_LOOK_SECONDS = 0.2
_numbers = itertools.count()  # Of saves; the same in all processes.


class Save:
    """Writes a checkpoint in the background, with checksums once all of it is there.

    Several processes write one checkpoint together, and Orbax lets each of them wait
    for the others. One whose disk fails does not come. So each leaves word how its own
    part went, process 0 says how the whole went, and a process whose part is waiting
    in vain is told. Its waiting thread is left behind, for up to 20 minutes.

    Args:
      path: folder of the checkpoint, which does not exist.
      tree: arrays to save; they are copied before this returns.
      about: what goes with them, for JSON.
      trouble: why nothing should be written, the same on all processes; or None.
      settled: called at the end in this process's background, with None or the reason.
    """

    def __init__(
        self,
        path: epath.Path,
        tree: dict,
        about: dict,
        trouble: str | None,
        settled: Callable[[str | None], None],
    ):
        self._path = path
        self._settled = settled
        self._reason = trouble
        self._board = f"vit_jax/saves/{next(_numbers)}"
        self._writing = concurrent.futures.Future()
        if trouble is None:
            try:
                if jax.process_index() == 0:
                    leftovers.begin(path)
                # Several processes compare their paths.
                with _context(), jax.transfer_guard("allow"):
                    response = ocp.save_async(path, tree, custom_metadata=about)
                _start(self._write, response)
            except Exception as error:  # noqa: BLE001 (whatever a disk may say)
                self._writing.set_exception(error)
        self._end = _start(self._finish)

    def result(self) -> str | None:
        """Waits, and returns None or why it failed: the same on all processes."""
        self._end.join()
        return self._reason

    def _write(self, response) -> None:
        try:
            self._writing.set_result(response.result())
        except BaseException as error:  # noqa: BLE001
            self._writing.set_exception(error)

    def _finish(self) -> None:
        if self._reason is None:
            if jax.process_count() == 1:
                self._reason = self._finish_alone()
            else:
                self._reason = self._finish_together()
        self._settled(self._reason)

    def _finish_alone(self) -> str | None:
        try:
            self._writing.result()
            layout.write_checksums(self._path, layout.compute_checksums(self._path))
            leftovers.end(self._path)
        except Exception as error:  # noqa: BLE001
            return reason(error)
        return None

    def _finish_together(self) -> str | None:
        me, everyone = jax.process_index(), jax.process_count()
        failed, done = f"{self._board}/failed", f"{self._board}/done"
        while not self._writing.done() and not board.read(failed):
            concurrent.futures.wait([self._writing], timeout=_LOOK_SECONDS)
        try:
            if self._writing.done():
                self._writing.result()
                part = layout.compute_checksums(self._path, me, everyone)
                board.write(f"{done}/{me}", json.dumps(part))
        except Exception as error:  # noqa: BLE001
            board.write(f"{failed}/{me}", reason(error))
        if me == 0:
            while len(parts := board.read(done)) < everyone and not board.read(failed):
                time.sleep(_LOOK_SECONDS)
            board.write(f"{self._board}/end/0", self._declare(parts, everyone))
        while not (end := board.read(f"{self._board}/end")):
            time.sleep(_LOOK_SECONDS)
        return end["0"] or None

    def _declare(self, parts: dict[str, str], everyone: int) -> str:
        for process, why in board.read(f"{self._board}/failed").items():
            return f"process {process} of {everyone}: {why}"
        try:
            files = [json.loads(part) for part in parts.values()]
            layout.write_checksums(
                self._path, {k: v for part in files for k, v in part.items()}
            )
            leftovers.end(self._path)
        except Exception as error:  # noqa: BLE001 (a bucket's are no OSErrors)
            return f"process 0 of {everyone}: {reason(error)}"
        return ""


def _context() -> ocp.Context:
    context = ocp.Context()
    # In this thread, where a disk that is read-only shows at once: else threads wait for
    # the folder, and hold up the end of this process for minutes. Of several processes,
    # all would wait here for the first; they leave such threads behind.
    several = jax.process_count() > 1
    context.asynchronous.create_directories_asynchronously = several
    # `path` does not exist; looking for it is another place to wait for each other.
    context.file.skip_sync_file_validations = True
    return context


def silence_orbax() -> None:
    """Drops the tracebacks that a failed save prints: one line says what went wrong."""
    logging.getLogger("absl").addFilter(_not_of_a_failed_save)
    if sys.unraisablehook is not _unraisable:
        _unraisable.before = sys.unraisablehook
        sys.unraisablehook = _unraisable


def _not_of_a_failed_save(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _unraisable(found) -> None:
    # TensorStore's writes go on when Orbax has given up already, and find nobody there.
    if str(found.exc_value) != "Event loop is closed":
        _unraisable.before(found)


def reason(error: BaseException) -> str:
    """Says in a few words why writing failed."""
    text = " ".join(str(error).split())
    # TensorStore names long paths before it comes to the point.
    code = re.search(r"os_error_code='(\d+)'", text)
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return text[:300] or type(error).__name__


def _start(work: Callable, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True, name="save")
    thread.start()
    return thread

"""TensorBoard's event files, written at once.

tensorboardX's own writer has a thread, which dies on a full disk; after ten more events
its caller waits for ever. Here an error is the caller's to see.
"""

import contextlib
import time

from etils import epath

from vit_jax.report.tensorboard import event_file_writer, event_pb2, summary_pb2


class Events:
    """Appends to a new event file in a folder.

    Args:
      folder: made if it is missing.
      purge: TensorBoard forgets what earlier files hold from this step on.

    Raises:
      OSError: here and in `add`: it cannot be written.
    """

    def __init__(self, folder: epath.Path, purge: int):
        if "://" not in str(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._file = event_file_writer.EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(step=purge, session_log=start))

    def add(self, step: int, summary: summary_pb2.Summary) -> None:
        """Writes what `tensorboardX.summary` makes of a number, an image or a text."""
        self._write(event_pb2.Event(step=step, summary=summary))

    def flush(self) -> None:
        """Sees to it that all is on the disk."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file; what could not be written is lost."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        self._file.write_event(event)

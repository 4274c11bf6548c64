"""Limits of the explorer's connections: how many, and how slow a request may be."""

import contextlib
import io
import socket
import threading
import time

MOST = 64  # At once; each has a thread. A browser opens six.
SECONDS = (
    10  # For a request to begin, then for all of it, or for a mebibyte of its body.
)
_ROOM = 1  # Seconds that a connection which must go has until its thread has ended.


class Connections:
    """The open connections, at most MOST.

    A new one takes the place of the one that has waited longest for a request to be
    complete, so that idle or slow connections cannot keep others out. Methods may be
    called by several threads, `admit` by one.
    """

    def __init__(self):
        # Each with whether it waits for a request; the longest waiting come first.
        self._waits: dict[socket.socket, bool] = {}
        self._changed = threading.Condition()

    def admit(self, connection: socket.socket) -> bool:
        """Returns whether there is room for a new connection, which then waits."""
        with self._changed:
            if len(self._waits) >= MOST:
                oldest = next((c for c, waits in self._waits.items() if waits), None)
                if oldest is None:
                    return False
                with contextlib.suppress(OSError):  # The other side may have ended it.
                    oldest.shutdown(socket.SHUT_RDWR)  # Ends what its thread reads.
                if not self._changed.wait_for(lambda: len(self._waits) < MOST, _ROOM):
                    return False
            self._waits[connection] = True
            return True

    def wait(self, connection: socket.socket) -> None:
        """Notes that a connection waits for its next request."""
        with self._changed:
            del self._waits[connection]  # To the end.
            self._waits[connection] = True

    def work(self, connection: socket.socket) -> None:
        """Notes that a connection is answered, and must not be closed for another."""
        with self._changed:
            self._waits[connection] = False

    def end(self, connection: socket.socket) -> None:
        """Gives the place of a connection free, if it has one."""
        with self._changed:
            self._waits.pop(connection, None)
            self._changed.notify()


class Timed(io.RawIOBase):
    """Reads a connection until a time that holds for many reads together.

    The timeout of a socket begins anew with each byte.

    Args:
      connection: to read.
    """

    def __init__(self, connection: socket.socket):
        super().__init__()
        self._connection = connection
        self.allow()

    def allow(self) -> None:
        """Allows reading for SECONDS from now."""
        self._end = time.monotonic() + SECONDS

    def readable(self) -> bool:
        """Is true, as `io.BufferedReader` wants it."""
        return True

    def readinto(self, buffer) -> int:
        """Reads what is there into a buffer; raises TimeoutError at the end of time."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request came too slowly")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)

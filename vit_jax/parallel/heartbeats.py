"""Who has fallen silent among the processes of a job."""

import time
from collections.abc import Callable

LEFT = "left"  # The beat of a process that has ended in order.


class Heartbeats:
    """Remembers when the beat of each process last changed.

    Only the clock of this process is read: a beat is any text that differs from the one
    before it.

    Args:
      processes: number of them.
      limit: seconds of silence after which one is lost.
      clock: seconds that never go back.
    """

    def __init__(
        self,
        processes: int,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limit, self._clock = limit, clock
        self._last = {i: ("", clock()) for i in range(processes)}

    def silent(self, beats: dict[int, str]) -> int | None:
        """Takes a look.

        Args:
          beats: process to its beat; one that has not begun to beat is left out.

        Returns:
          The lowest process that has been silent for longer than the limit, or None.
        """
        now = self._clock()
        for process, beat in beats.items():
            if beat != self._last[process][0]:
                self._last[process] = (beat, now)
        for process, (beat, since) in self._last.items():
            if beat != LEFT and now - since > self._limit:
                return process
        return None

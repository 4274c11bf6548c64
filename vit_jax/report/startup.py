"""Where the time goes between the command and the first step."""

import os
import time

from vit_jax import processes


class Startup:
    """A stop watch of the phases of a start; a phase is named when it ends.

    Args:
      earlier: seconds that had gone before, such as those of `process_age`.

    Attributes:
      seconds: phase to seconds, in the order in which the phases ended.
    """

    def __init__(self, earlier: float = 0.0):
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter() - earlier
        self._told = False

    def done(self, phase: str) -> None:
        """Gives a phase the time since the last one ended."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def news(self) -> dict[str, float]:
        """Returns the phases as metrics the first time it is called, then nothing."""
        told, self._told = self._told, True
        return {} if told else {f"start_{k}": v for k, v in self.seconds.items()}

    def line(self) -> str:
        """Puts the phases into one line."""
        parts = ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items())
        return f"first step after {self.total:.1f} s: {parts}"


def process_age() -> float:
    """Returns for how many seconds this process has run; 0 where no one tells."""
    try:
        ticks = int(processes.started("self"))  # Since the machine's boot.
        started = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (ValueError, OSError, AttributeError):  # Not Linux.
        return 0.0

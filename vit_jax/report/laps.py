"""Which part of a step took how long, and which was slow."""

import collections
import statistics
import time

# What a step can consist of. A step is on its way on the device while the loop loads
# the next batch, so that "device step" is the time in which the loop waits for it.
TRAINING = ("input", "host-to-device", "device step")
SCHEDULED = ("logging", "checkpoint", "evaluation")

_LEAST_SECONDS = 0.5  # A shorter hiccup is worth no line, however short the steps.
_LEAST_STEPS = 5  # So many must be known before one is called slow.
_REMEMBERED = 101


class Laps:
    """Gives the time of every step to its phases and finds steps that are slow.

    A phase was slow if it took more than `factor` times its running median, and more
    than its median and `factor` - 1 steps together. A save usually costs nothing, so its
    first one is judged; a first evaluation is not.

    Args:
      factor: from which a phase is slow; 0 finds none.
      process: of this host. All but the first report only what is their own: in a
        device step all hosts wait for the slowest.
    """

    def __init__(self, factor: float, process: int = 0):
        self._factor, self._process = factor, process
        self._since = time.perf_counter()
        self._lap: dict[str, float] = {}
        self._known = collections.defaultdict(
            lambda: collections.deque(maxlen=_REMEMBERED)
        )
        self._steps = collections.deque(maxlen=_REMEMBERED)
        self._first, self._quiet = True, False
        self._slow, self._saving = 0, 0.0

    def mark(self, phase: str) -> None:
        """Gives a phase the time since the last mark."""
        now = time.perf_counter()
        self._lap[phase] = self._lap.get(phase, 0.0) + now - self._since
        self._since = now

    def end(self, step: int) -> str:
        """Ends a step; time since the last mark belongs to none.

        Returns:
          A line if a phase was slow, else "". After one there is none until `report` is
          called, so that there are never more of them than lines of progress.
        """
        lap, self._lap = self._lap, {}
        self._since = time.perf_counter()
        self._saving += lap.get("checkpoint", 0.0)
        if self._first:  # It compiled.
            self._first = False
            return ""
        text = self._judge(step, lap) if self._factor else ""
        for phase, seconds in lap.items():
            self._known[phase].append(seconds)
        self._steps.append(sum(lap.get(phase, 0.0) for phase in TRAINING))
        if not text or self._quiet:
            return ""
        self._quiet = True
        return text

    def report(self) -> dict[str, float]:
        """Returns what happened since the last report.

        Returns:
          checkpoint_stall: seconds in which the loop stood still for saves; slow_steps:
          how many were found.
        """
        values = {"checkpoint_stall": self._saving, "slow_steps": self._slow}
        self._slow, self._saving, self._quiet = 0, 0.0, False
        return values

    def _judge(self, step: int, lap: dict[str, float]) -> str:
        if sum(lap.values()) < _LEAST_SECONDS or len(self._steps) < _LEAST_STEPS:
            return ""
        usual_step = statistics.median(self._steps)
        worst, excess = "", 0.0
        for phase, seconds in lap.items():
            known = self._known[phase]
            if not known and phase == "evaluation":
                continue
            usual = statistics.median(known) if known else 0.0
            least = max(_LEAST_SECONDS, (self._factor - 1) * usual_step)
            if seconds > self._factor * usual and seconds - usual > max(least, excess):
                worst, excess = phase, seconds - usual
        if not worst or (self._process and worst == "device step"):
            return ""
        self._slow += 1
        where = f"process {self._process}: " if self._process else ""
        usual = lap[worst] - excess
        return (
            f"{where}slow step {step}: {worst} took {lap[worst]:.2f} s, usually "
            f"{usual:.2f} s (a step: {usual_step:.2f} s)"
        )

"""Timers of a run: start-up, phases of a step, data stalls, compilations."""

import collections
import contextlib
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import jax

# Phases of a step. The device computes a step while the loop loads the next batch, so
# "device step" is the time in which the loop waits for the device.
TRAINING = ("input", "host-to-device", "device step")

_LEAST_SECONDS = 0.5  # Shorter delays are not reported, however short the steps are.
_LEAST_STEPS = 5  # Number of measured steps before a step can be reported as slow.
_REMEMBERED = 101  # Number of steps in the running medians.


class RunClock:
    """Measures the time of a run over all its starts."""

    def __init__(self):
        self._began = time.perf_counter()
        self._seconds = self._device_seconds = 0.0

    def add(self, seconds: float, device_seconds: float) -> None:
        """Adds the time of earlier starts."""
        self._seconds += seconds
        self._device_seconds += device_seconds

    def elapsed(self) -> tuple[float, float]:
        """Returns the seconds of all starts, and the sum of seconds times devices."""
        now = time.perf_counter() - self._began
        return self._seconds + now, self._device_seconds + now * jax.device_count()


class StepTimer:
    """Measures the phases of every step and reports slow ones.

    A phase is slow if it takes longer than `factor` times its running median, and
    longer than the sum of its median and `factor` - 1 median steps. The first save may
    be reported, because a save usually takes no time; the first evaluation is not.

    Args:
      factor: multiple of the median above which a phase is slow; 0 disables reports.
      process: index of this process. Only the first process reports slow device steps,
        because all processes wait for the slowest device.
    """

    def __init__(self, factor: float, process: int = 0):
        self._factor, self._process = factor, process
        self._since = time.perf_counter()
        self._lap = collections.Counter()  # Seconds by phase in this step.
        self._known = collections.defaultdict(
            lambda: collections.deque(maxlen=_REMEMBERED)
        )
        self._steps = collections.deque(maxlen=_REMEMBERED)
        self._first, self._quiet = True, False
        self._slow, self._saving = 0, 0.0

    def mark(self, phase: str) -> None:
        """Adds the time since the last mark to a phase."""
        now = time.perf_counter()
        self._lap[phase] += now - self._since
        self._since = now

    def end_step(self, step: int) -> str:
        """Ends a step; the time since the last mark is not counted.

        Returns:
          A line if a phase was slow, else "". There is at most one line between two
          calls of `summary`, so that reports are never more frequent than lines of
          progress.
        """
        lap, self._lap = self._lap, collections.Counter()
        self._since = time.perf_counter()
        self._saving += lap["checkpoint"]
        if self._first:  # The first step compiles.
            self._first = False
            return ""
        text = self._judge(step, lap) if self._factor else ""
        for phase, seconds in lap.items():
            self._known[phase].append(seconds)
        self._steps.append(sum(lap[phase] for phase in TRAINING))
        if not text or self._quiet:
            return ""
        self._quiet = True
        return text

    def summary(self) -> dict[str, float]:
        """Returns checkpoint_stall and slow_steps since the last call.

        checkpoint_stall is the time in seconds in which the loop waited for saves,
        slow_steps the number of steps with a slow phase.
        """
        values = {"checkpoint_stall": self._saving, "slow_steps": self._slow}
        self._slow, self._saving, self._quiet = 0, 0.0, False
        return values

    def _judge(self, step: int, lap: dict[str, float]) -> str:
        if sum(lap.values()) < _LEAST_SECONDS or len(self._steps) < _LEAST_STEPS:
            return ""
        usual_step = statistics.median(self._steps)
        least = max(_LEAST_SECONDS, (self._factor - 1) * usual_step)
        worst, excess = "", least
        for phase, seconds in lap.items():
            known = self._known[phase]
            if known or phase != "evaluation":
                usual = statistics.median(known) if known else 0.0
                if seconds > self._factor * usual and seconds - usual > excess:
                    worst, excess = phase, seconds - usual
        if not worst or (self._process and worst == "device step"):
            return ""
        self._slow += 1
        where = f"process {self._process}: " if self._process else ""
        return (
            f"{where}slow step {step}: {worst} took {lap[worst]:.2f} s, usually "
            f"{lap[worst] - excess:.2f} s (a step: {usual_step:.2f} s)"
        )


class DataStallTimer:
    """Measures the time in which the device waited for a batch; a context manager.

    While the device computes the previous step, waiting for a batch costs nothing. So a
    thread records when each step is done, and only the time after that is counted.

    Attributes:
      seconds: total time so far.
    """

    def __init__(self):
        self.seconds = 0.0
        self._given = self._done = 0  # Numbers of steps.
        self._done_at = 0.0
        self._running = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def iterate(self, batches: Iterable) -> Iterator:
        """Yields the batches, and measures how long the device waits for each.

        The first batch of a start is not counted, since it cannot be loaded in advance.
        """
        batches = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if 0 < self._given == self._done:
                self.seconds += time.perf_counter() - max(asked, self._done_at)
            yield batch

    def step_started(self, metrics: object) -> None:
        """Records that a step was queued; it is done when its metrics are ready."""
        self._given += 1
        self._running.put(metrics)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._running.put(None)
        self._thread.join(timeout=10)  # A step may wait for a dead host forever.

    def _watch(self) -> None:
        while (metrics := self._running.get()) is not None:
            with contextlib.suppress(Exception):  # The loop raises the same error.
                jax.block_until_ready(metrics)
            self._done_at = time.perf_counter()
            self._done += 1


def data_stall_advice(fraction: float, images_per_second: float, data) -> str:
    """Returns a line with the keys to raise if the input is the bottleneck, else "".

    Args:
      fraction: fraction of the time in which the device waited for input.
      images_per_second: training speed.
      data: section `data` of the config.
    """
    if fraction < 0.1:
        return ""
    speed = f"{images_per_second:.0f} images/s"
    if fraction < 1:
        speed += f", about {images_per_second / (1 - fraction):.0f} without waiting"
    threads = f"data.num_threads (now {data.num_threads})"
    if data.num_threads >= data.prefetch:  # More threads need more batches to load.
        threads += f" with data.prefetch (now {data.prefetch})"
    cores = os.cpu_count() or 1
    with contextlib.suppress(AttributeError):  # Some systems lack this function.
        cores = len(os.sched_getaffinity(0))
    return (
        f"input is the bottleneck: the device waited {fraction:.0%} of the time "
        f"({speed}); raise {threads} if the storage is slow, data.num_workers (now "
        f"{data.num_workers}; {cores} CPU cores per machine) if decoding is slow, and "
        f"data.prefetch (now {data.prefetch}) if the speed varies"
    )


class StartupTimer:
    """Measures the phases of a start.

    Args:
      earlier: seconds before this timer was created, such as `processes.age()`.
      say: function that prints a line, called when a long phase begins.

    Attributes:
      seconds: seconds by phase, in the order in which the phases ended.
    """

    def __init__(
        self, earlier: float = 0.0, say: Callable[[str], None] = lambda line: None
    ):
        self.seconds: dict[str, float] = {}
        self._say = say
        self._since = time.perf_counter() - earlier
        self._reported = False

    def end_phase(self, phase: str, begins: str = "") -> None:
        """Ends a phase.

        Args:
          phase: name of the phase, which began when the previous one ended.
          begins: description of the next phase, which is printed; "" prints nothing.
        """
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
        if begins:
            self.announce(begins)

    def announce(self, begins: str) -> None:
        """Prints, in process 0, the seconds so far and the phase that begins."""
        if jax.process_index() == 0:
            self._say(f"{self.total:6.1f} s  {begins}")

    @property
    def total(self) -> float:
        """Total seconds of all phases that have ended."""
        return sum(self.seconds.values(), 0.0)

    def new_metrics(self) -> dict[str, float]:
        """Returns the phases as metrics in the first call, and an empty dict later."""
        reported, self._reported = self._reported, True
        return {} if reported else {f"start_{k}": v for k, v in self.seconds.items()}

    def summary(self) -> str:
        """Returns the phases as one line."""
        parts = ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items())
        return f"first step after {self.total:.1f} s: {parts}"


class CompilationCounter:
    """Counts the programs that JAX compiles, in all threads; a context manager.

    Attributes:
      seconds: time to compile programs, or to read them from the compilation cache.
      programs: number of programs that were compiled or read from the cache.
      cached: number of programs that were read from the cache.
    """

    def __init__(self):
        self.seconds, self.programs, self.cached = 0.0, 0, 0

    def summary(self) -> str:
        """Returns the counts as a phrase for the log."""
        return (
            f"{self.programs} programs compiled or read in {self.seconds:.1f} s, "
            f"{self.cached} of them from the compilation cache"
        )

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, seconds: float, **_) -> None:
        # The event covers programs that are read from the cache as well.
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds += seconds
            self.programs += 1

    def _on_event(self, event: str, **_) -> None:
        self.cached += event == "/jax/compilation_cache/cache_hits"

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
# "device step" is the time in which the loop waits for it.
TRAINING = ("input", "host-to-device", "device step")

_LEAST_SECONDS = 0.5  # Shorter delays are not reported, however short the steps are.
_LEAST_STEPS = 5  # Steps to measure before one is called slow.
_REMEMBERED = 101


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
        """Returns seconds, and seconds times devices."""
        now = time.perf_counter() - self._began
        return self._seconds + now, self._device_seconds + now * jax.device_count()


class StepTimer:
    """Measures the phases of every step and reports slow ones.

    A phase was slow if it took more than `factor` times its running median, and more
    than its median and `factor` - 1 steps together. A save usually costs nothing, so its
    first one is judged; a first evaluation is not.

    Args:
      factor: multiple of the median above which a phase is slow; 0 disables reports.
      process: index of this host. Only the first one reports device steps, in which all
        hosts wait for the slowest.
    """

    def __init__(self, factor: float, process: int = 0):
        self._factor, self._process = factor, process
        self._since = time.perf_counter()
        self._lap = collections.Counter()  # Phase to seconds in this step.
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
          A line if a phase was slow, else "". At most one between two calls of `summary`,
          so that there are never more of them than lines of progress.
        """
        lap, self._lap = self._lap, collections.Counter()
        self._since = time.perf_counter()
        self._saving += lap["checkpoint"]
        if self._first:  # It compiled.
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
        """Returns checkpoint_stall, seconds, and the number of slow_steps since the last call.

        During a stall the loop waits for a save.
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
    """Measures the time in which the device was idle because it waited for a batch.

    Waiting for a batch costs nothing while the device computes the step before. So a
    thread notes when each step is done, and only later waiting counts. A context manager.

    Attributes:
      seconds: total so far.
    """

    def __init__(self):
        self.seconds = 0.0
        self._given = self._done = 0  # Steps.
        self._done_at = 0.0
        self._running = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def iterate(self, batches: Iterable) -> Iterator:
        """Yields the batches, and measures how long the device waits for each.

        The first one of a start is not counted, since it could not be ready.
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
        """Notes that a step was dispatched, whose end is when its metrics are ready."""
        self._given += 1
        self._running.put(metrics)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._running.put(None)
        self._thread.join(timeout=10)  # A step may wait for a host that is gone.

    def _watch(self) -> None:
        while (metrics := self._running.get()) is not None:
            with contextlib.suppress(Exception):  # The loop meets it as well.
                jax.block_until_ready(metrics)
            self._done_at = time.perf_counter()
            self._done += 1


def data_stall_advice(fraction: float, images_per_second: float, data) -> str:
    """Returns a line with the keys to raise if the input is the bottleneck, else "".

    `fraction` is the part of the time in which the device waited for input.
    """
    if fraction < 0.1:
        return ""
    speed = f"{images_per_second:.0f} images/s"
    if fraction < 1:
        speed += f", about {images_per_second / (1 - fraction):.0f} without waiting"
    threads = f"data.num_threads (now {data.num_threads})"
    if data.num_threads >= data.prefetch:  # Each thread makes a batch of these.
        threads += f" with data.prefetch (now {data.prefetch})"
    cores = os.cpu_count() or 1
    with contextlib.suppress(AttributeError):  # Not on every system.
        cores = len(os.sched_getaffinity(0))
    return (
        f"input is the bottleneck: the device waited {fraction:.0%} of the time "
        f"({speed}); raise {threads} if the storage is slow, data.num_workers (now "
        f"{data.num_workers}; {cores} CPU cores a machine) if decoding is, and "
        f"data.prefetch (now {data.prefetch}) if the speed varies"
    )


class StartupTimer:
    """Measures the phases of a start; a phase is named when it ends.

    Args:
      earlier: seconds before this timer, such as `processes.age()`.
      say: prints a line when a phase begins that may last.

    Attributes:
      seconds: phase to seconds, in the order in which the phases ended.
    """

    def __init__(
        self, earlier: float = 0.0, say: Callable[[str], None] = lambda line: None
    ):
        self.seconds: dict[str, float] = {}
        self._say = say
        self._since = time.perf_counter() - earlier
        self._reported = False

    def end_phase(self, phase: str, begins: str = "") -> None:
        """Adds the time since the last phase ended to this one, and announces the next."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
        if begins:
            self.announce(begins)

    def announce(self, begins: str) -> None:
        """Prints what begins now, in process 0, after how many seconds of this start."""
        if jax.process_index() == 0:
            self._say(f"{self.total:6.1f} s  {begins}")

    @property
    def total(self) -> float:
        """Seconds of all phases that ended."""
        return sum(self.seconds.values(), 0.0)

    def new_metrics(self) -> dict[str, float]:
        """Returns the phases as metrics the first time it is called, then nothing."""
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
      programs: number compiled or read.
      cached: number of those that were read.
    """

    def __init__(self):
        self.seconds, self.programs, self.cached = 0.0, 0, 0

    def summary(self) -> str:
        """Returns the counts as a few words."""
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
        if event == "/jax/core/compile/backend_compile_duration":  # Or read.
            self.seconds += seconds
            self.programs += 1

    def _on_event(self, event: str, **_) -> None:
        self.cached += event == "/jax/compilation_cache/cache_hits"

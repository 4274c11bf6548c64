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

# What a step can consist of. A step is on its way on the device while the loop loads
# the next batch, so that "device step" is the time in which the loop waits for it.
TRAINING = ("input", "host-to-device", "device step")

_LEAST_SECONDS = 0.5  # A shorter hiccup is worth no line, however short the steps.
_LEAST_STEPS = 5  # So many must be known before one is called slow.
_REMEMBERED = 101


class RunClock:
    """Measures the time of a run: of this start, and of those before it."""

    def __init__(self):
        self._began = time.perf_counter()
        self._seconds = self._device_seconds = 0.0

    def add(self, seconds: float, device_seconds: float) -> None:
        """Adds the time of the starts before."""
        self._seconds += seconds
        self._device_seconds += device_seconds

    def elapsed(self) -> tuple[float, float]:
        """Returns seconds, and seconds times devices."""
        own = time.perf_counter() - self._began
        return self._seconds + own, self._device_seconds + own * jax.device_count()


class StepTimer:
    """Measures the phases of every step and finds steps that are slow.

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
        """Adds the time since the last mark to a phase."""
        now = time.perf_counter()
        self._lap[phase] = self._lap.get(phase, 0.0) + now - self._since
        self._since = now

    def end_step(self, step: int) -> str:
        """Ends a step; the time since the last mark is not counted.

        Returns:
          A line if a phase was slow, else "". After one there is none until `summary` is
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

    def summary(self) -> dict[str, float]:
        """Returns totals since the last call.

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


# A device that waits less is not worth a message.
BOTTLENECK = 0.1


class DataStallTimer:
    """Measures the time in which the device was idle because it waited for a batch.

    That the loop waits for a batch is no loss while the device is at the step before.
    So a thread notes when each step is done, and only what comes later counts. Use as
    a context manager.
    """

    def __init__(self):
        self.seconds = 0.0  # So far.
        self._given = self._done = 0  # Steps.
        self._done_at = 0.0
        self._running = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def iterate(self, batches: Iterable) -> Iterator:
        """Yields the batches, and counts how long the device waits for each.

        The first of a start is not counted: nothing could be ready.
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
        """Notes a step that was dispatched to the device.

        Args:
          metrics: arrays of the step; they are there when it is done.
        """
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
    """Returns a line if the input is the bottleneck, with the keys to raise; else "".

    Args:
      fraction: of the time that the device waited for input.
      images_per_second: speed in that time.
      data: `config.data`.
    """
    if fraction < BOTTLENECK:
        return ""
    speed = f"{images_per_second:.0f} images/s"
    if fraction < 1:
        speed += f", about {images_per_second / (1 - fraction):.0f} without waiting"
    threads = f"data.num_threads (now {data.num_threads})"
    if data.num_threads >= data.prefetch:  # A thread makes a batch, and more have none.
        threads += f" with data.prefetch (now {data.prefetch})"
    return (
        f"input is the bottleneck: the device waited {fraction:.0%} of the time "
        f"({speed}); raise {threads} if the storage is slow, data.num_workers (now "
        f"{data.num_workers}; {_cores()} CPU cores a machine) if decoding is, and "
        f"data.prefetch (now {data.prefetch}) if the speed varies"
    )


def _cores() -> int:
    with contextlib.suppress(AttributeError):  # Not on every system.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class StartupTimer:
    """Measures the phases of a start; a phase is named when it ends.

    Args:
      earlier: seconds that had gone before, such as those of `processes.age`.
      say: takes a line when a phase begins that may last.

    Attributes:
      seconds: phase to seconds, in the order in which the phases ended.
    """

    def __init__(
        self, earlier: float = 0.0, say: Callable[[str], None] = lambda line: None
    ):
        self.seconds: dict[str, float] = {}
        self._say = say
        self._since = time.perf_counter() - earlier
        self._told = False

    def end_phase(self, phase: str, begins: str = "") -> None:
        """Adds the time since the last phase ended to this one, and announces the next."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
        if begins:
            self.announce(begins)

    def announce(self, begins: str) -> None:
        """Says in process 0 what begins now, and after how many seconds of this start."""
        if jax.process_index() == 0:
            self._say(f"{self.total:6.1f} s  {begins}")

    @property
    def total(self) -> float:
        """Seconds of all phases that ended."""
        return sum(self.seconds.values(), 0.0)

    def new_metrics(self) -> dict[str, float]:
        """Returns the phases as metrics the first time it is called, then nothing."""
        told, self._told = self._told, True
        return {} if told else {f"start_{k}": v for k, v in self.seconds.items()}

    def summary(self) -> str:
        """Returns the phases as one line."""
        parts = ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items())
        return f"first step after {self.total:.1f} s: {parts}"


# As JAX reports them; the first includes reading a program that was kept.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"


class CompilationCounter:
    """Counts the programs that JAX compiles, in all threads; a context manager.

    Attributes:
      seconds: taken to compile programs, or to read those that were kept.
      programs: compiled or read.
      found: of those, read from the compilation cache.
    """

    def __init__(self):
        self.seconds, self.programs, self.found = 0.0, 0, 0

    def summary(self) -> str:
        """Returns the counts as a few words."""
        return (
            f"{self.programs} programs compiled or read in {self.seconds:.1f} s, "
            f"{self.found} of them from the compilation cache"
        )

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, seconds: float, **_) -> None:
        if event == _COMPILED:
            self.seconds += seconds
            self.programs += 1

    def _on_event(self, event: str, **_) -> None:
        self.found += event == _FOUND

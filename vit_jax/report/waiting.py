"""How long the device stood idle for want of a batch, and what to do about it."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator

import jax

# A device that waits less is not worth a message.
BOTTLENECK = 0.1


class InputWait:
    """Measures the time in which the device had nothing to do but wait for a batch.

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

    def over(self, batches: Iterable) -> Iterator:
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

    def began(self, metrics: object) -> None:
        """Takes note of a step that was given to the device.

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


def advice(fraction: float, images_per_second: float, data) -> str:
    """Says that the input is the bottleneck, and what to raise; "" if it is not.

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
    threads = f"data.threads (now {data.threads})"
    if data.threads >= data.prefetch:  # A thread makes a batch, and more have none.
        threads += f" with data.prefetch (now {data.prefetch})"
    return (
        f"input is the bottleneck: the device waited {fraction:.0%} of the time "
        f"({speed}); raise {threads} if the storage is slow, data.workers (now "
        f"{data.workers}; {_cores()} CPU cores a machine) if decoding is, and "
        f"data.prefetch (now {data.prefetch}) if the speed varies"
    )


def _cores() -> int:
    with contextlib.suppress(AttributeError):  # Not on every system.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

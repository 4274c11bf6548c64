import threading
import time

import pytest

from vit_jax.training import config, timers
from vit_jax.training.timers import DataStallTimer, data_stall_advice


class Step:
    """Metrics of a step that is done when the test says so."""

    def __init__(self):
        self.done = threading.Event()

    def block_until_ready(self):
        self.done.wait()
        return self


@pytest.fixture
def wait(monkeypatch):
    monkeypatch.setattr(timers.jax, "block_until_ready", Step.block_until_ready)
    with DataStallTimer() as wait:
        yield wait


def slow(*seconds):
    for number in seconds:
        time.sleep(number)
        yield number


def test_only_the_time_without_a_step_at_work_counts(wait):
    steps = [Step() for _ in range(3)]
    batches = wait.iterate(slow(0.3, 0.2, 0.2))
    next(batches)
    assert wait.seconds == 0  # The first cannot be ready.
    wait.step_started(steps[0])
    next(batches)  # All the while, the device is at the first step.
    assert wait.seconds == 0
    steps[0].done.set()
    wait.step_started(steps[1])
    threading.Timer(0.1, steps[1].done.set).start()
    next(batches)  # Half of the while.
    assert 0.05 < wait.seconds < 0.19
    before = wait.seconds
    wait.step_started(steps[2])
    steps[2].done.set()
    assert list(batches) == []  # The end of the run is no wait.
    assert wait.seconds == before


def test_what_the_loop_does_between_batches_is_no_waiting_for_input(wait):
    step = Step()
    batches = wait.iterate(slow(0.0, 0.1))
    next(batches)
    wait.step_started(step)
    step.done.set()
    time.sleep(0.4)  # Saves a checkpoint, say.
    next(batches)
    assert 0.09 < wait.seconds < 0.3


def data(**keys):
    raw = {"batch_size": 8, "optim": {"learning_rate": 0.1}}
    raw["data"] = {"name": "synthetic", "num_classes": 3, **keys}
    return config.complete(raw).data


def test_a_bottleneck_names_the_figures_and_what_to_raise():
    text = data_stall_advice(0.6, 100.0, data(num_threads=3, num_workers=2, prefetch=5))
    assert text.startswith(
        "input is the bottleneck: the device waited 60% of the time (100 images/s, about "
        "250 without waiting); raise data.num_threads (now 3) if the storage is slow, "
        "data.num_workers (now 2; "
    )
    assert text.endswith("and data.prefetch (now 5) if the speed varies")
    more = data_stall_advice(1.0, 100.0, data(num_threads=5, prefetch=5))
    assert (
        "(100 images/s); raise data.num_threads (now 5) with data.prefetch (now" in more
    )


def test_no_bottleneck_says_nothing():
    assert data_stall_advice(0.09, 100.0, data()) == ""

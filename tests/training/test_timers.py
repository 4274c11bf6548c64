"""Timers of a run: phases of steps and of the start, data stalls, compilations."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest
from helpers import run_python, tiny_config, train

from vit_jax.command_line import processes
from vit_jax.training import timers
from vit_jax.training.timers import (
    TRAINING,
    CompilationCounter,
    DataStallTimer,
    StartupTimer,
    StepTimer,
    data_stall_advice,
)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand."""
    now = [0.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def take(clock):
    """Returns a function that takes a step of 0.01, 0.02 and 0.3 s, but for what is stated."""

    def take(laps, step, **seconds):
        usual = dict(zip(TRAINING, (0.01, 0.02, 0.3), strict=True))
        for phase, value in (usual | seconds).items():
            clock[0] += value
            laps.mark(phase)
        return laps.end_step(step)

    return take


@pytest.fixture
def steady(take):
    """Returns a function that makes a timer, which has seen ten usual steps."""

    def steady(factor=3.0, **options):
        laps = StepTimer(factor, **options)
        assert not any(take(laps, step) for step in range(1, 11))
        return laps

    return steady


SLOW = "slow step 11: {} took {} s, usually {} s (a step: 0.33 s)"


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ({"input": 2.5}, SLOW.format("input", "2.50", "0.01")),
        ({"host-to-device": 2.5}, SLOW.format("host-to-device", "2.50", "0.02")),
        ({"device step": 2.5}, SLOW.format("device step", "2.50", "0.30")),
        # The phase that lost the most.
        (
            {"input": 2.0, "device step": 4.0},
            SLOW.format("device step", "4.00", "0.30"),
        ),
        ({"input": 4.0, "device step": 2.0}, SLOW.format("input", "4.00", "0.01")),
        # Just below the factor.
        ({"device step": 0.3 * 2.95}, ""),
        ({"checkpoint": 0.1}, ""),
        ({"checkpoint": 5.0}, SLOW.format("checkpoint", "5.00", "0.00")),
        # The first evaluation is not judged, but what is beside it.
        ({"evaluation": 60.0}, ""),
        ({"evaluation": 60.0, "input": 2.0}, SLOW.format("input", "2.00", "0.01")),
    ],
)
def test_a_slow_phase_is_named_with_its_usual_time(steady, take, seconds, line):
    assert take(steady(), 11, **seconds) == line
    assert not take(steady(0.0), 11, **seconds)  # Zero finds none.
    # Another process reports only what is its own.
    other = "" if "device step took" in line else line
    assert take(steady(process=2), 11, **seconds) == (other and f"process 2: {line}")


def test_a_hiccup_of_tiny_steps_is_no_news(take):
    laps = StepTimer(3.0)
    tiny = dict.fromkeys(TRAINING, 0.001)
    for step in range(1, 10):
        take(laps, step, **tiny)
    assert not take(laps, 10, **tiny | {"input": 0.49})
    assert take(laps, 11, **tiny | {"input": 0.51})


def test_the_first_step_compiles_and_the_next_have_nothing_to_compare_with(take):
    laps = StepTimer(3.0)
    assert not take(laps, 1, **{"device step": 60.0})
    assert not take(laps, 2, **{"device step": 9.0})
    assert not any(take(laps, step) for step in range(3, 11))
    assert take(laps, 11, **{"device step": 9.0})


def test_saves_and_evaluations_are_judged_by_those_before_and_stalls_added_up(
    steady, take
):
    laps = steady()
    take(laps, 11, checkpoint=0.1)
    line = "slow step 12: checkpoint took 3.00 s, usually 0.10 s (a step: 0.33 s)"
    assert take(laps, 12, checkpoint=3.0) == line
    assert laps.summary()["checkpoint_stall"] == pytest.approx(3.1)
    assert laps.summary()["checkpoint_stall"] == 0
    for step, seconds in enumerate((60.0, 100.0), 13):
        assert not take(laps, step, evaluation=seconds)
    line = take(laps, 15, evaluation=300.0)
    assert "evaluation took 300.00 s, usually 80.00 s" in line


def test_there_is_one_line_until_the_next_report_and_all_are_counted(steady, take):
    laps = steady()
    lines = [take(laps, 11 + i, input=9.0) for i in range(4)]
    assert [bool(line) for line in lines] == [True, False, False, False]
    assert laps.summary()["slow_steps"] == 4
    assert take(laps, 15, input=9.0)
    # What is slow for long becomes usual.
    for step in range(16, 40):
        take(laps, step, input=9.0)
    laps.summary()
    assert not take(laps, 40, input=9.0)


def test_what_has_no_name_is_not_given_to_the_next_step(steady, take, clock):
    laps = steady()
    laps.mark("device step")
    clock[0] += 99  # Writes a trace.
    assert not laps.end_step(11)
    assert not any(take(laps, step) for step in (12, 13))


@pytest.mark.slow
def test_a_run_marks_each_phase_of_a_step(tmp_path, monkeypatch):
    marked, mark = [], StepTimer.mark

    def noting(self, phase):
        marked.append(phase)
        mark(self, phase)

    monkeypatch.setattr(StepTimer, "mark", noting)
    train(tiny_config(evals={}, total_steps=3), tmp_path)
    assert [marked.count(phase) for phase in TRAINING] == [3, 3, 3]


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
    return tiny_config(data=keys).data


def test_a_bottleneck_names_the_figures_and_what_to_raise():
    text = data_stall_advice(0.6, 100.0, data(num_threads=3, num_workers=2, prefetch=5))
    assert text.startswith(
        "input is the bottleneck: the device waited 60% of the time (100 images/s, about "
        "250 without waiting); raise data.num_threads (now 3) if the storage is slow, "
        "data.num_workers (now 2; "
    )
    assert text.endswith("and data.prefetch (now 5) if the speed varies")
    more = data_stall_advice(1.0, 100.0, data(num_threads=5, prefetch=5))
    said = "(100 images/s); raise data.num_threads (now 5) with data.prefetch (now"
    assert said in more
    assert data_stall_advice(0.09, 100.0, data()) == ""


def test_each_phase_gets_the_time_since_the_one_before(clock):
    startup = StartupTimer(earlier=2.5)
    for phase, seconds in [("import", 1.0), ("data", 0.25), ("compile", 4.0)]:
        clock[0] += seconds
        startup.end_phase(phase)
    assert startup.seconds == {"import": 3.5, "data": 0.25, "compile": 4.0}
    assert startup.total == pytest.approx(7.75)
    assert startup.summary() == (
        "first step after 7.8 s: import 3.5, data 0.2, compile 4.0"
    )


def test_a_phase_is_announced_with_the_seconds_before_it(clock):
    lines = []
    startup = StartupTimer(2.0, lines.append)
    clock[0] += 1.25
    startup.end_phase("import")
    startup.announce("opening cifar10")
    assert lines == ["   3.2 s  opening cifar10"]


def test_phases_become_metrics_once():
    startup = StartupTimer()
    startup.end_phase("data")
    assert list(startup.new_metrics()) == ["start_data"]
    assert startup.new_metrics() == {}


def test_the_age_is_that_of_the_process():
    code = (
        "import time; time.sleep(0.3); from vit_jax.command_line import processes;"
        "print(processes.age())"
    )
    began = time.perf_counter()
    out = run_python("-c", code)
    assert 0.3 < float(out.stdout) < time.perf_counter() - began + 0.02
    assert processes.age() > 0


def test_programs_of_all_threads_are_counted_while_it_is_open():
    functions = [jax.jit(lambda x, i=i: jnp.sin(x) * (i + 71.5)) for i in range(4)]
    x = jnp.ones(3)
    with CompilationCounter() as compilations:
        functions[0](x)
        functions[0](x)  # Is compiled already.
        thread = threading.Thread(target=functions[1], args=(x,))
        thread.start()
        thread.join()
        functions[2].lower(x).compile()
    functions[3](x)
    assert compilations.programs == 3
    assert 0 < compilations.seconds < 60
    assert compilations.summary().startswith("3 programs compiled or read in ")


def test_programs_from_the_cache_are_told_apart():
    compilations = CompilationCounter()
    with compilations:
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        jax.monitoring.record_event("/jax/compilation_cache/cache_misses")
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert compilations.cached == 1

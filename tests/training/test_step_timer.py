import pytest
from helpers import tiny_config, train

from vit_jax.training import timers as module
from vit_jax.training.timers import TRAINING, StepTimer


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def take(laps, clock, step, **seconds):
    """Takes a step of 0.01, 0.02 and 0.3 s, but for what is stated."""
    usual = dict(zip(TRAINING, (0.01, 0.02, 0.3), strict=True))
    for phase, value in (usual | seconds).items():
        clock[0] += value
        laps.mark(phase)
    return laps.end_step(step)


def steady(laps, clock, first=1, last=10):
    assert not any(take(laps, clock, step) for step in range(first, last + 1))


@pytest.mark.parametrize(
    ("phase", "usual"), [*zip(TRAINING, ("0.01", "0.02", "0.30"), strict=True)]
)
def test_a_slow_phase_is_named_with_its_usual_time(clock, phase, usual):
    laps = StepTimer(3.0)
    steady(laps, clock)
    assert take(laps, clock, 11, **{phase: 2.5}) == (
        f"slow step 11: {phase} took 2.50 s, usually {usual} s (a step: 0.33 s)"
    )


@pytest.mark.parametrize("worst", ["input", "device step"])
def test_the_phase_that_lost_the_most_is_named(clock, worst):
    laps = StepTimer(3.0)
    steady(laps, clock)
    line = take(laps, clock, 11, **{"input": 2.0, "device step": 2.0} | {worst: 4.0})
    assert line.startswith(f"slow step 11: {worst} took 4.00 s")


def test_a_step_just_below_the_factor_is_not_slow(clock):
    laps = StepTimer(3.0)
    steady(laps, clock)
    assert not take(laps, clock, 11, **{"device step": 0.3 * 2.95})
    assert take(laps, clock, 12, **{"device step": 0.3 * 3.3 + 0.1})


def test_a_hiccup_of_tiny_steps_is_no_news(clock):
    laps = StepTimer(3.0)
    tiny = dict.fromkeys(TRAINING, 0.001)
    for step in range(1, 10):
        take(laps, clock, step, **tiny)
    assert not take(laps, clock, 10, **tiny | {"input": 0.49})
    assert take(laps, clock, 11, **tiny | {"input": 0.51})


def test_the_first_step_compiles_and_the_next_have_nothing_to_compare_with(clock):
    laps = StepTimer(3.0)
    assert not take(laps, clock, 1, **{"device step": 60.0})
    assert not take(laps, clock, 2, **{"device step": 9.0})
    steady(laps, clock, 3, 10)
    assert take(laps, clock, 11, **{"device step": 9.0})


def test_a_save_that_stalls_is_slow_and_one_that_does_not_is_not(clock):
    laps = StepTimer(3.0)
    steady(laps, clock)
    assert not take(laps, clock, 11, checkpoint=0.1)
    assert take(laps, clock, 12, checkpoint=3.0) == (
        "slow step 12: checkpoint took 3.00 s, usually 0.10 s (a step: 0.33 s)"
    )
    assert laps.summary()["checkpoint_stall"] == pytest.approx(3.1)
    assert laps.summary()["checkpoint_stall"] == 0


def test_the_first_save_is_judged_and_the_first_evaluation_is_not(clock):
    laps = StepTimer(3.0)
    steady(laps, clock)
    assert not take(laps, clock, 11, evaluation=60.0)
    assert "checkpoint took 5.00 s, usually 0.00 s" in take(
        laps, clock, 12, checkpoint=5.0
    )
    laps.summary()
    assert not take(laps, clock, 13, evaluation=100.0)
    assert "evaluation took 300.00 s, usually 80.00 s" in take(
        laps, clock, 14, evaluation=300.0
    )


def test_a_slow_phase_is_found_beside_a_long_evaluation(clock):
    laps = StepTimer(3.0)
    steady(laps, clock)
    take(laps, clock, 11, evaluation=60.0)
    assert "input took 2.00 s" in take(laps, clock, 12, input=2.0, evaluation=61.0)


def test_there_is_one_line_until_the_next_report_and_all_are_counted(clock):
    laps = StepTimer(3.0)
    steady(laps, clock)
    lines = [take(laps, clock, 11 + i, input=9.0) for i in range(4)]
    assert [bool(line) for line in lines] == [True, False, False, False]
    assert laps.summary()["slow_steps"] == 4
    assert take(laps, clock, 15, input=9.0)


def test_what_is_slow_for_long_becomes_usual(clock):
    laps = StepTimer(3.0)
    steady(laps, clock)
    for step in range(11, 40):
        take(laps, clock, step, input=2.0)
    laps.summary()
    assert not take(laps, clock, 40, input=2.0)


def test_zero_finds_none(clock):
    laps = StepTimer(0.0)
    steady(laps, clock)
    assert not take(laps, clock, 11, input=99.0)


def test_another_process_reports_only_what_is_its_own(clock):
    laps = StepTimer(3.0, process=2)
    steady(laps, clock)
    assert not take(laps, clock, 11, **{"device step": 9.0})
    assert take(laps, clock, 12, input=9.0).startswith("process 2: slow step 12: input")


def test_what_has_no_name_is_not_given_to_the_next_step(clock):
    laps = StepTimer(3.0)
    steady(laps, clock)
    laps.mark("device step")
    clock[0] += 99  # Writes a trace.
    assert not laps.end_step(11)
    steady(laps, clock, 12, 13)


def test_a_run_marks_each_phase_of_a_step(tmp_path, monkeypatch):
    marked, mark = [], StepTimer.mark

    def noting(self, phase):
        marked.append(phase)
        mark(self, phase)

    monkeypatch.setattr(StepTimer, "mark", noting)
    train(tiny_config(evals={}, total_steps=9), tmp_path)
    assert [marked.count(phase) for phase in TRAINING] == [9, 9, 9]

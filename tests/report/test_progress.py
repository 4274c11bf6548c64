import pytest

from vit_jax.report import progress as module
from vit_jax.report.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_speed_leaves_out_the_first_step_and_the_pauses(clock, capsys):
    progress = Progress(10, 100, batch_size=32, devices=4, active=True)
    clock[0] += 50  # Compiles.
    progress.done(11)
    clock[0] += 2
    progress.done(12)
    progress.pause()
    clock[0] += 1000  # Evaluates.
    progress.resume()
    clock[0] += 2
    progress.done(13)
    speed = progress.log(13, loss=1.5, rate=0.01, waited=1.0)
    assert speed["images_per_second"] == pytest.approx(2 * 32 / 4)
    assert speed["images_per_second_per_device"] == pytest.approx(4)
    assert speed["input_wait"] == pytest.approx(1 / 4)
    assert progress.images_per_second == pytest.approx(16)
    out = capsys.readouterr().out
    # 87 steps of 2 s are left.
    assert out == (
        "step 13/100  loss 1.5000  rate 1.00e-02  16 images/s  4 a device  "
        "25% waiting for input  2:54 left\n"
    )


def test_speed_of_a_line_is_that_since_the_last_line(clock):
    progress = Progress(0, 100, batch_size=10, devices=1, active=False)
    waited = 0.0
    for step, seconds in [(1, 9.0), (2, 1.0), (3, 1.0), (4, 5.0)]:
        waited += seconds / step
        clock[0] += seconds
        progress.done(step)
        speed = progress.log(step, 0.0, 0.0, waited)
    assert speed["images_per_second"] == pytest.approx(2.0)
    assert speed["input_wait"] == pytest.approx(1 / 4)
    assert progress.images_per_second == pytest.approx(30 / 7)


def test_a_single_step_has_no_speed(clock):
    progress = Progress(0, 1, batch_size=10, devices=1, active=False)
    clock[0] += 9
    progress.done(1)
    assert progress.images_per_second == 0.0


def test_a_terminal_gets_one_line_that_moves(clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress = Progress(0, 9, batch_size=10, devices=1, active=True)
    progress.done(1)
    progress.log(1, 0.0, 0.0, 0.0)
    progress.log(2, 0.0, 0.0, 0.0)
    progress.say("a line that stays")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.endswith("a line that stays\n")
    assert out.count("\rstep ") == 2


def test_other_processes_print_nothing(clock, capsys):
    progress = Progress(0, 9, batch_size=10, devices=1, active=False)
    progress.done(1)
    progress.log(1, 0.0, 0.0, 0.0)
    progress.say("hello")
    assert capsys.readouterr().out == ""

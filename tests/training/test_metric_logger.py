import dataclasses

import jax
import pytest

from vit_jax import models
from vit_jax.models import cost
from vit_jax.training import metric_logger
from vit_jax.training.metric_logger import Progress


@pytest.mark.slow
def test_the_ideal_is_six_operations_a_multiply_accumulate_at_the_peak():
    # TPU v4: 275e12 operations a second. L/16 at 224: 61.6 GMACs (arXiv:2010.11929,
    # figure 5); 14 % of an image's second.
    large = cost.training_flops(models.create("L/16", num_classes=1000))
    ideal = metric_logger.ideal_seconds(large, "TPU v4")
    assert ideal == pytest.approx(6 * 61.6e9 / 275e12, rel=0.01)
    assert metric_logger.ideal_seconds(1, "cpu") == 0  # Its peak is not known.


@dataclasses.dataclass
class Device:
    stats: dict | None

    def memory_stats(self):
        return self.stats


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    devices = [
        Device({"bytes_in_use": 2**30, "peak_bytes_in_use": 5 * 2**30}),
        Device({"bytes_in_use": 2**31, "peak_bytes_in_use": 3 * 2**30}),
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert metric_logger.memory_use() == {"memory_gib": 2.0, "memory_peak_gib": 5.0}
    devices.append(Device(None))
    assert metric_logger.memory_use() == {}


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand."""
    now = [0.0]
    monkeypatch.setattr(metric_logger.time, "perf_counter", lambda: now[0])
    return now


def test_speed_leaves_out_the_first_step_and_the_pauses(clock, capsys):
    progress = Progress(10, 100, batch_size=32, devices=4, active=True)
    clock[0] += 50  # Compiles.
    progress.step_done(11)
    clock[0] += 2
    progress.step_done(12)
    progress.pause()
    clock[0] += 1000  # Evaluates.
    progress.resume()
    clock[0] += 2
    progress.step_done(13)
    speed = progress.log(13, loss=1.5, waited=1.0)
    assert speed["images_per_second"] == pytest.approx(2 * 32 / 4)
    assert speed["images_per_second_per_device"] == pytest.approx(4)
    assert speed["input_wait"] == pytest.approx(1 / 4)
    assert progress.images_per_second == pytest.approx(16)
    out = capsys.readouterr().out
    # 87 steps of 2 s are left.
    assert out == (
        "step 13/100  loss 1.5000  2.000 s  4 images/s a device  "
        "input wait 25%  2:54 left\n"
    )
    assert "mfu" not in speed  # Nobody knows this device's peak.


def test_speed_of_a_line_is_that_since_the_last_line_and_others_print_nothing(
    clock, capsys
):
    progress = Progress(0, 100, batch_size=10, devices=1, active=False)
    waited = 0.0
    for step, seconds in [(1, 9.0), (2, 1.0), (3, 1.0), (4, 5.0)]:
        waited += seconds / step
        clock[0] += seconds
        progress.step_done(step)
        speed = progress.log(step, 0.0, waited)
    assert speed["images_per_second"] == pytest.approx(2.0)
    assert speed["input_wait"] == pytest.approx(1 / 4)
    assert progress.images_per_second == pytest.approx(30 / 7)
    progress.info("hello")
    assert capsys.readouterr() == ("", "")


def test_a_single_step_has_no_speed(clock, capsys):
    progress = Progress(0, 1, batch_size=10, devices=1, active=True, ideal=0.1)
    clock[0] += 9
    progress.step_done(1)
    assert progress.log(1, 1.5, 0.0) == {}
    assert capsys.readouterr().out == "step 1/1  loss 1.5000\n"
    assert progress.images_per_second == 0.0


def test_utilisation_memory_and_stalls_are_shown_where_they_are_known(clock, capsys):
    # 4 devices, 3 s a step of 512 images: 128 / 3 images a device and second, of which
    # each would take 0.01 s at its peak.
    progress = Progress(0, 1000, 512, devices=4, active=True, ideal=0.01)
    progress.step_done(1)
    clock[0] += 3
    progress.step_done(2)
    speed = progress.log(2, loss=9.9872, waited=0.0, stalled=1.24, memory=14.25)
    assert speed["mfu"] == pytest.approx(128 / 3 * 0.01)
    assert speed["step_seconds"] == pytest.approx(3)
    out = capsys.readouterr().out
    assert out == (
        "step 2/1000  loss 9.9872  3.000 s  43 images/s a device  "
        "MFU 43%  saving 1.2 s  14.2 GiB  49:54 left\n"
    )

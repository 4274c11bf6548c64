import dataclasses

import jax
import pytest

from vit_jax import models
from vit_jax.models import cost
from vit_jax.training import metric_logger

MODEL = models.create(
    "Ti/4",
    width=12,
    depth=1,
    num_heads=3,
    mlp_dim=20,
    num_classes=5,
    image_size=(8, 12),
)


def test_the_ideal_is_six_operations_a_multiply_accumulate_at_the_peak():
    # TPU v4: 275e12 operations a second.
    ideal = metric_logger.ideal_seconds(cost.training_flops(MODEL), "TPU v4")
    assert ideal == pytest.approx(6 * cost.macs_per_image(MODEL) / 275e12)
    # L/16 at 224: 61.6 GMACs (arXiv:2010.11929, figure 5); 14 % of an image's second.
    large = cost.training_flops(models.create("L/16", num_classes=1000))
    assert metric_logger.ideal_seconds(large, "TPU v4") == pytest.approx(
        6 * 61.6e9 / 275e12, rel=0.01
    )


def test_the_peak_of_a_cpu_is_not_known():
    assert metric_logger.ideal_seconds(1, "cpu") == 0


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
    assert metric_logger.device_memory() == {"memory_gib": 2.0, "memory_peak_gib": 5.0}
    devices.append(Device(None))
    assert metric_logger.device_memory() == {}


def test_a_cpu_does_not_tell_its_memory():
    assert metric_logger.device_memory() == {}

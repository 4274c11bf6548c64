"""Batches that the devices of this process share, eight made ones here."""

import jax
import numpy as np
import pytest
from helpers import TINY, draw_params

from vit_jax import models
from vit_jax.evaluators.local_devices import LocalDevices


@pytest.fixture
def computed(monkeypatch):
    """Collects the arrays on the devices that outputs are fetched from."""
    arrays, fetch = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: arrays.append(x) or fetch(x))
    return arrays


@pytest.mark.usefixtures("all_devices")
def test_all_devices_share_a_batch(computed):
    model = models.create("Ti/8", num_classes=0, image_size=(16, 24), **TINY)
    params = draw_params(model)
    pixels = np.random.default_rng(0).integers(0, 256, (11, 16, 24, 3), np.uint8)

    def function(params, pixels):
        images = pixels.astype("float32") / 255
        return dict(enumerate(model.layer_features(params, images, (0, -1))))

    devices, traces = LocalDevices(model), []

    def run(*batch):
        traced = lambda *x: traces.append(0) or function(*x)
        return devices.run("both", traced, *batch, rows=13)

    found = run(params, pixels)
    assert {len(x.sharding.device_set) for x in computed[0].values()} == {8}
    assert computed[0][0].shape[0] == 16  # 13 rows, filled up to 2 per device.
    expected = jax.jit(function)(params, pixels)
    for layer in (0, 1):
        assert isinstance(found[layer], np.ndarray)
        np.testing.assert_allclose(found[layer], expected[layer], atol=1e-5)
    last = run(params, pixels[:3])
    np.testing.assert_allclose(last[1], found[1][:3], atol=1e-6)
    assert len(traces) == 1
    others = jax.tree.map(lambda x: 0 * x, params)
    assert not run(others, pixels[:3])[1].any()

import jax
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.parallel import distributed
from vit_jax.parallel import mesh as meshes


@pytest.mark.parametrize("sizes", [{"data": -1}, {"data": 8}, {"data": -1, "x": 2}])
def test_mesh_takes_all_devices(sizes):
    mesh = meshes.create(sizes)
    assert mesh.size == 8
    assert mesh.axis_names == tuple(sizes)


@pytest.mark.parametrize("sizes", [{"data": 3}, {"data": -1, "x": 3}, {"data": 16}])
def test_a_mesh_of_other_sizes_is_refused(sizes):
    with pytest.raises(UserError, match="does not make 8 devices"):
        meshes.create(sizes)


def test_batches_lie_split_over_the_devices_and_parameters_whole():
    mesh = meshes.create({"data": -1})
    host = np.arange(16 * 3).reshape(16, 3)
    batch = meshes.to_devices({"x": host}, mesh)["x"]
    np.testing.assert_array_equal(batch, host)
    assert {s.data.shape for s in batch.addressable_shards} == {(2, 3)}
    whole = jax.device_put(host, meshes.replicated(mesh))
    assert {s.data.shape for s in whole.addressable_shards} == {(16, 3)}


def test_a_batch_that_does_not_divide_is_refused_with_all_numbers():
    mesh = meshes.create({"data": -1})
    meshes.check_batch(32, 2, mesh)
    with pytest.raises(
        UserError, match="batch_size=24 is not a multiple of 8 devices x "
    ):
        meshes.check_batch(24, 2, mesh)


def test_a_process_alone_joins_nobody(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a: pytest.fail("joined"))
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.start() == 1

import jax
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.parallel import distributed
from vit_jax.parallel import mesh as meshes


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"data": -1}, (8, 1, 1)),
        ({"data": 8}, (8, 1, 1)),
        ({"data": -1, "fsdp": 2}, (4, 2, 1)),
        ({"data": 2, "fsdp": -1, "model": 2}, (2, 2, 2)),
        ({"fsdp": 8}, (1, 8, 1)),
    ],
)
def test_mesh_takes_all_devices(sizes, shape):
    mesh = meshes.create(sizes)
    assert mesh.axis_names == ("data", "fsdp", "model")
    assert mesh.devices.shape == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, r"mesh.data=3 x .* not make 8 devices: the stated sizes make 3"),
        ({"data": -1, "model": 3}, r"mesh.model=3 does not make 8 .* make 3"),
        ({"data": 16}, r"does not make 8 devices: the stated sizes make 16"),
        ({"data": -1, "fsdp": -1}, r"mesh.data=-1 and mesh.fsdp=-1: only one .* 8"),
        ({"data": 8, "fsdp": 0}, r"mesh.fsdp=0 must be at least 1"),
        ({"data": 8, "dcn_data": -1}, r"mesh.dcn_data=-1 must be at least 1"),
        ({"data": -1, "pipe": 2}, r"mesh.pipe is no axis: there are data, fsdp, model"),
        ({"data": 8, "dcn_data": 2}, r"dcn_data=2 x .*dcn_fsdp=1 does not make 1 proc"),
    ],
)
def test_a_mesh_of_other_sizes_is_refused_with_the_numbers(sizes, message):
    with pytest.raises(UserError, match=message):
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

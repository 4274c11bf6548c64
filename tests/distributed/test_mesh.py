import jax
import numpy as np
import pytest

from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("all_devices")


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"data": -1}, (8, 1, 1)),
        ({"data": 8}, (8, 1, 1)),
        ({"data": -1, "fsdp": 2}, (4, 2, 1)),
        ({"data": 2, "fsdp": -1, "model": 2}, (2, 2, 2)),
        ({"data": 1, "fsdp": 8}, (1, 8, 1)),
    ],
)
def test_mesh_takes_all_devices(sizes, shape):
    mesh = meshes.create(MeshConfig(**sizes))
    assert mesh.axis_names == ("data", "fsdp", "model")
    assert mesh.devices.shape == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, r"mesh.data=3 x .* not make 8 devices: these sizes make 3"),
        ({"data": -1, "model": 3}, r"mesh.model=3 does not make 8 .* make 3"),
        ({"data": 16}, r"does not make 8 devices: these sizes make 16"),
        ({"data": -1, "fsdp": -1}, r"mesh.data=-1 and mesh.fsdp=-1: only one .* 8"),
        ({"data": 8, "fsdp": 0}, r"mesh.fsdp=0 must be at least 1"),
        ({"data": 8, "dcn_data": -1}, r"mesh.dcn_data=-1 must be at least 1"),
        ({"data": 8, "dcn_data": 2}, r"dcn_data=2 x .*dcn_fsdp=1 does not make 1 proc"),
    ],
)
def test_a_mesh_of_other_sizes_is_refused_with_the_numbers(sizes, message):
    with pytest.raises(UserError, match=message):
        meshes.create(MeshConfig(**sizes))


def test_batches_lie_split_over_the_devices_and_parameters_whole():
    mesh = meshes.create(MeshConfig())
    host = np.arange(16 * 3).reshape(16, 3)
    batch = meshes.to_devices({"x": host}, mesh)["x"]
    np.testing.assert_array_equal(batch, host)
    assert {s.data.shape for s in batch.addressable_shards} == {(2, 3)}
    whole = jax.device_put(host, meshes.replicated(mesh))
    assert {s.data.shape for s in whole.addressable_shards} == {(16, 3)}


def test_a_batch_that_does_not_divide_is_refused_with_all_numbers():
    mesh = meshes.create(MeshConfig())
    meshes.check_batch(32, 2, mesh)
    with pytest.raises(UserError, match="batch_size=24 is not a multiple of 8 devices"):
        meshes.check_batch(24, 2, mesh)


class Fake:
    """What the arrangement looks at of a device."""

    platform, device_kind = "gpu", "fake"

    def __init__(self, number, process, piece=None):
        self.id, self.process_index = number, process
        if piece is not None:
            self.slice_index = piece


def fakes(groups, size, kind):
    """Returns groups of devices, which are slices or nodes, in an unhelpful order."""
    devices = [
        Fake(n, n // size, *([n // size] if kind == "slices" else []))
        for n in range(groups * size)
    ]
    return devices[::2] + devices[1::2]


@pytest.mark.parametrize("kind", ["slices", "nodes"])
@pytest.mark.parametrize(
    ("sizes", "inner"),
    [
        # What must stay within one group: pairs of neighbours along these axes.
        ({"data": -1, "fsdp": 2, "model": 2, "dcn_data": 3}, (1, 2)),
        ({"data": 2, "fsdp": -1, "dcn_fsdp": 3}, (0,)),
        ({"data": 3, "fsdp": 4, "dcn_data": 3}, (1,)),
    ],
)
def test_fast_axes_stay_within_a_slice_or_node(kind, sizes, inner):
    devices = fakes(3, 4, kind)
    laid = meshes.arrange(MeshConfig(**sizes), devices)
    assert sorted(d.id for d in laid.flat) == list(range(12))
    group = np.vectorize(lambda d: d.process_index)(laid)
    for axis in inner:
        assert (group == group.take([0], axis)).all()
    # Each group is one block: its devices are neighbours along the axis across, too.
    assert sum((np.diff(group, axis=axis) != 0).any() for axis in range(3)) == 1


@pytest.mark.parametrize(
    ("sizes", "across"),
    [({"data": -1}, 0), ({"data": 6, "model": 2}, 0), ({"data": 2, "fsdp": 6}, 1)],
)
def test_several_slices_are_found_without_being_told(sizes, across):
    group = np.vectorize(lambda d: d.slice_index)(
        meshes.arrange(MeshConfig(**sizes), fakes(3, 4, "slices"))
    )
    moves = [(np.diff(group, axis=axis) != 0).any() for axis in range(3)]
    assert moves == [axis == across for axis in range(3)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": -1, "dcn_data": 2}, "dcn_data=2 x mesh.dcn_fsdp=1 .* make 3 slices"),
        ({"data": 4, "fsdp": 3, "dcn_data": 3}, "mesh.data=4 does not divide over 3 s"),
        ({"data": 1, "fsdp": 2, "model": 6}, "mesh.fsdp=2 does not divide over 3 slic"),
    ],
)
def test_slices_that_do_not_fit_the_axes_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        meshes.arrange(MeshConfig(**sizes), fakes(3, 4, "slices"))


def test_nodes_are_needed_for_axes_between_nodes():
    with pytest.raises(UserError, match=r"dcn_fsdp=4 does not make 3 processes: set"):
        meshes.arrange(MeshConfig(data=1, fsdp=-1, dcn_fsdp=4), fakes(3, 4, "nodes"))


def test_without_slices_a_process_for_each_gpu_counts_each_process():
    # Two nodes of four GPUs, one process a GPU.
    devices = [Fake(n, n) for n in range(8)]
    words = r"dcn_data=2 x .* not make 8 processes: .* both to 1 .*process counts, not"
    with pytest.raises(UserError, match=words):
        meshes.arrange(MeshConfig(data=2, fsdp=4, dcn_data=2), devices)
    # What the message proposes: nodes are rows.
    laid = meshes.arrange(MeshConfig(data=2, fsdp=4), devices)
    assert [[d.id for d in row.flat] for row in laid] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    spread = MeshConfig(data=2, fsdp=4, dcn_data=2, dcn_fsdp=4)
    assert (meshes.arrange(spread, devices) == laid).all()


@pytest.mark.parametrize(
    ("sizes", "groups", "expected"),
    [
        ({"data": -1}, 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ({"data": 2, "fsdp": 4}, 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ({"data": 4, "model": 2}, 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ({"data": 2, "model": 4}, 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ({"data": 1, "model": 8}, 4, [(0, 1)] * 4),
    ],
)
def test_processes_with_the_same_images_load_the_same_shard(sizes, groups, expected):
    devices = [Fake(n, n // (8 // groups)) for n in range(8)]
    shards = meshes.data_shards(meshes.arrange(MeshConfig(**sizes), devices))
    assert [shards[process] for process in range(groups)] == expected


def test_processes_whose_images_overlap_are_refused():
    devices = [Fake(n, n // 4) for n in range(12)]
    with pytest.raises(UserError, match="mesh.model=3 does not fit the 4 devices of a"):
        meshes.data_shards(meshes.arrange(MeshConfig(model=3), devices))

"""Builds the device mesh, splits batches over it, and gathers values of processes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.config.fields import key
from vit_jax.distributed import compilation, internals
from vit_jax.errors import UserError

# In the order of their traffic, least first: devices that are neighbours along the last
# axis are neighbours in the network. Batches are split over the first two axes.
AXES = ("data", "fsdp", "model")
BATCH_AXES = ("data", "fsdp")

internals.silence_tpu()  # At import, before anybody makes a backend.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices on each axis of the mesh; -1 is all that the others leave."""

    data: int = key(
        -1,
        "Number of devices that split the images of a batch and hold a copy of the "
        "parameters each (data parallelism).",
        at_least=None,
    )
    fsdp: int = key(
        1,
        "Number of devices that split the images of a batch, and also parameters and "
        "the optimiser's moments. Parameters are gathered where needed (FSDP).",
        at_least=None,
    )
    model: int = key(
        1,
        "Number of devices that split attention heads and MLPs (tensor parallelism).",
        reason="layers that are too large for one device",
        at_least=None,
    )
    dcn_data: int = key(
        1,
        "Factor of `mesh.data` that is spread over TPU slices or GPU nodes, or over "
        "processes if JAX reports no slices. If `mesh.dcn_data` and `mesh.dcn_fsdp` "
        "are both 1, factors that fit are chosen.",
        reason="several slices or nodes",
        at_least=1,
    )
    dcn_fsdp: int = key(
        1,
        "Factor of `mesh.fsdp` that is spread over TPU slices or GPU nodes, or over "
        "processes if JAX reports no slices.",
        reason="parameters that do not fit one slice or node",
        at_least=1,
    )


def create(config: MeshConfig, devices: Sequence | None = None) -> Mesh:
    """Arranges devices in a mesh of the axes "data", "fsdp" and "model".

    Devices with the same `slice_index`, which JAX may set for GPU nodes too, are a
    slice. If all devices have the same index, each process (not each node) counts as a
    slice. If `dcn_data` and `dcn_fsdp` are both 1, slices lie along "data" as far as
    they divide it, then along "fsdp"; GPUs without slices keep their order.

    Args:
      config: devices along each axis.
      devices: devices of this job or of a described topology; if None, all devices of
        all processes.

    Raises:
      UserError: the sizes do not multiply to the number of devices or of slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    compilation.disable_cache_of_split_cpu(devices)
    axis_types = (AxisType.Auto,) * len(AXES)
    return Mesh(arrange(config, devices), AXES, axis_types=axis_types)


def arrange(config: MeshConfig, devices: Sequence) -> np.ndarray:
    """Returns the devices as `create` arranges them, (data, fsdp, model).

    Only attributes of the devices are read.
    """
    shape = _shape(config, len(devices))
    granule = _granule(devices)
    count = len({getattr(device, granule) for device in devices})
    across = [config.dcn_data, config.dcn_fsdp, 1]
    kind = "slices" if granule == "slice_index" else "processes"
    if math.prod(across) == 1:
        if granule == "process_index":
            return _neighbours(shape, devices)
        across[0] = math.gcd(shape[0], count)
        across[1] = count // across[0]
    if math.prod(across) != count:
        remedy = f"set their product to {count}, or both to 1"
        if granule == "process_index":
            remedy += " (without slices each process counts, not each node)"
        raise UserError(
            f"mesh.dcn_data={across[0]} x mesh.dcn_fsdp={across[1]} does not make "
            f"{count} {kind}: {remedy}"
        )
    for axis, size, parts in zip(AXES, shape, across, strict=True):
        if size % parts:
            raise UserError(
                f"mesh.{axis}={size} does not divide over {parts} {kind}: set it to a "
                f"multiple of {parts}, or mesh.dcn_data and mesh.dcn_fsdp to numbers "
                "that divide mesh.data and mesh.fsdp"
            )
    within = [size // parts for size, parts in zip(shape, across, strict=True)]
    groups = {}
    for device in devices:
        groups.setdefault(getattr(device, granule), []).append(device)
    if len({len(group) for group in groups.values()}) > 1:
        raise UserError(
            f"the {count} {kind} have {sorted(map(len, groups.values()))} devices: a "
            "mesh needs the same number in each"
        )
    blocks = np.empty(across, object)
    for place, group in zip(np.ndindex(*across), sorted(groups), strict=True):
        blocks[place] = _neighbours(within, groups[group])
    return np.block(blocks.tolist())


def _shape(config: MeshConfig, count: int) -> list[int]:
    """Returns the number of devices along each axis."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    for name, size in dataclasses.asdict(config).items():
        if size < 1 and (size != -1 or name not in AXES):
            raise UserError(f"mesh.{name}={size} must be at least 1")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(
            f"mesh.{free[0]}=-1 and mesh.{free[1]}=-1: only one axis can take the "
            f"rest of the {count} devices"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (fixed != count and not free):
        named = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        raise UserError(
            f"{named} does not make {count} devices: these sizes make {fixed}; "
            "set one axis to -1 and the others to numbers that divide the devices"
        )
    return [count // fixed if size == -1 else size for size in sizes.values()]


def _granule(devices: Sequence) -> str:
    """Returns the attribute that separates slices, or processes without slices."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    return "slice_index" if len(slices) > 1 else "process_index"


def _neighbours(shape: Sequence[int], devices: Sequence) -> np.ndarray:
    """Arranges devices that a fast network connects, by its topology."""
    try:
        return mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:  # An axis of the mesh would split one of the torus.
        return mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batched(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that splits the leading axis over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def check_batch(batch_size: int, accumulate: int, mesh: Mesh) -> None:
    """Checks that a batch splits evenly over devices and microbatches.

    Raises:
      UserError: it does not; the message has all numbers.
    """
    devices = num_data_devices(mesh)
    if batch_size % (devices * accumulate):
        micro = f" x {accumulate} microbatches" if accumulate > 1 else ""
        raise UserError(
            f"batch_size={batch_size} is not a multiple of {devices} devices{micro}: "
            f"set it to a multiple of {devices * accumulate}"
        )


def num_data_devices(mesh: Mesh) -> int:
    """Returns the number of devices that have different images of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def data_shard(mesh: Mesh) -> tuple[int, int]:
    """Returns the index of the shard that this process loads, and their number."""
    return data_shards(mesh.devices)[jax.process_index()]


def data_shards(devices: np.ndarray) -> dict[int, tuple[int, int]]:
    """Returns, for each process, the index of the shard that it loads and their number.

    Processes that hold the same images, because "model" reaches over several of them,
    load the same shard.

    Args:
      devices: devices of a mesh, (data, fsdp, model).

    Raises:
      UserError: the images of two processes overlap, but are not the same.
    """
    rows = devices.reshape(-1, devices.shape[-1])
    rows_of = {}
    for row, replicas in enumerate(rows):
        for device in replicas:
            rows_of.setdefault(device.process_index, []).append(row)
    rows_of = {process: tuple(sorted(set(held))) for process, held in rows_of.items()}
    shards = sorted(set(rows_of.values()))
    if sum(map(len, shards)) != len(rows) or len(set(map(len, shards))) > 1:
        raise UserError(
            f"mesh.model={devices.shape[-1]} does not fit the "
            f"{devices.size // len(rows_of)} devices of a process: set it to a divisor "
            "or a multiple of them"
        )
    return {i: (shards.index(held), len(shards)) for i, held in rows_of.items()}


def to_devices(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict:
    """Builds global arrays from each process's shard of a batch."""
    sharding = batched(mesh)
    # The transfer is intended, but with several processes JAX counts it as implicit.
    with jax.transfer_guard_host_to_device("allow"):
        return {
            name: jax.make_array_from_process_local_data(sharding, value)
            for name, value in batch.items()
        }


def process_allgather(**values: object) -> dict[str, np.ndarray]:
    """Gathers numbers of all processes, which all call it: name to array."""
    arrays = {name: np.asarray(value) for name, value in values.items()}
    if jax.process_count() == 1:
        return {name: array[None] for name, array in arrays.items()}
    # As bytes: JAX would cut 64-bit numbers to 32.
    sent = {name: np.frombuffer(a.tobytes(), np.uint8) for name, a in arrays.items()}
    with jax.transfer_guard("allow"):  # The transfer is intended.
        gathered = multihost_utils.process_allgather(sent)
    return {
        name: np.ascontiguousarray(gathered[name]).view(a.dtype).reshape(-1, *a.shape)
        for name, a in arrays.items()
    }

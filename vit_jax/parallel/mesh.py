"""The device mesh, and how batches lie on it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.config.fields import key
from vit_jax.errors import UserError

# From the least to the most talkative: devices that are neighbours in the last axis
# are neighbours on the wire. The batch is split over the first two.
AXES = ("data", "fsdp", "model")
BATCH_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices an axis; -1 is all that are left."""

    data: int = key(-1, "Copies of the parameters.", at_least=None)
    fsdp: int = key(
        1,
        "Parameters and moments are split, and gathered where needed.",
        at_least=None,
    )
    model: int = key(1, "Attention heads and MLPs are split.", at_least=None)
    dcn_data: int = key(
        1,
        "How many of `data` are different slices (TPU, GPU nodes) or, where JAX knows "
        "of no slices, processes; with dcn_fsdp 1 too: as it fits.",
        at_least=1,
    )
    dcn_fsdp: int = key(1, "The same of `fsdp`.", at_least=1)


def create(sizes: Mapping[str, int], devices: Sequence | None = None) -> Mesh:
    """Arranges devices in a mesh.

    Args:
      sizes: devices along the axes "data", "fsdp" and "model", 1 where nothing is said;
        one of them may be -1, "all that are left". "dcn_data" and "dcn_fsdp" say how
        many of the devices along "data" and "fsdp" are in different slices, which only
        the data centre's network connects; if both are 1 the slices lie along "data"
        as far as they divide it, then along "fsdp". Slices are told apart by the
        `slice_index` of the devices, which JAX may give GPU nodes too. Where it does
        not differ each process counts as one, not each node; with both 1 GPUs then
        keep their order.
      devices: to arrange, also those of a topology that is not here; all devices of all
        processes if None.

    Returns:
      The mesh, always of the three axes.

    Raises:
      UserError: the sizes do not multiply to the number of devices or of slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    return Mesh(arrange(sizes, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(sizes: Mapping[str, int], devices: Sequence) -> np.ndarray:
    """Lays devices out as `create` does; only their attributes are looked at.

    Returns:
      Array of the devices, (data, fsdp, model).
    """
    shape = _shape(sizes, len(devices))
    granule = _granule(devices)
    count = len({getattr(device, granule) for device in devices})
    across = [sizes.get("dcn_data", 1), sizes.get("dcn_fsdp", 1), 1]
    asked = math.prod(across)
    kind = "slices" if granule == "slice_index" else "processes"
    if asked == 1 and granule == "slice_index" and count > 1:
        across[0] = math.gcd(shape[0], count)
        across[1] = count // across[0]
    elif asked == 1:
        return _neighbours(shape, devices)
    if math.prod(across) != count:
        remedy = f"set their product to {count}, or both to 1"
        if granule == "process_index":
            remedy += (
                " (no slices are known here, so each process counts, not each node)"
            )
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
            "mesh needs as many in each"
        )
    blocks = np.empty(across, object)
    for place, group in zip(np.ndindex(*across), sorted(groups), strict=True):
        blocks[place] = _neighbours(within, groups[group])
    return np.block(blocks.tolist())


def _shape(sizes: Mapping[str, int], count: int) -> list[int]:
    """Returns the devices along each axis."""
    stated = {axis: sizes.get(axis, 1) for axis in AXES}
    named = " x ".join(f"mesh.{axis}={size}" for axis, size in stated.items())
    if unknown := sizes.keys() - {*AXES, "dcn_data", "dcn_fsdp"}:
        raise UserError(f"mesh.{min(unknown)} is no axis: there are {', '.join(AXES)}")
    for name, size in sizes.items():
        if size < 1 and (size != -1 or name not in AXES):
            raise UserError(f"mesh.{name}={size} must be at least 1")
    free = [axis for axis, size in stated.items() if size == -1]
    if len(free) > 1:
        raise UserError(
            f"mesh.{free[0]}=-1 and mesh.{free[1]}=-1: only one axis can take the "
            f"devices that are left of the {count}"
        )
    fixed = math.prod(size for size in stated.values() if size != -1)
    if free and count % fixed == 0:
        stated[free[0]] = count // fixed
    elif free or fixed != count:
        raise UserError(
            f"{named} does not make {count} devices: the stated sizes make {fixed}; "
            "set one axis to -1 and the others to numbers that divide the devices"
        )
    return list(stated.values())


def _granule(devices: Sequence) -> str:
    """Names the attribute that tells slices, or else processes, apart."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    return "slice_index" if len(slices) > 1 else "process_index"


def _neighbours(shape: Sequence[int], devices: Sequence) -> np.ndarray:
    """Lays out devices that a fast network connects, after its form."""
    try:
        return mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:  # An axis would be a part of one of the torus.
        return mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that puts a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batched(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that splits the leading axis over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def check_batch(batch_size: int, accumulate: int, mesh: Mesh) -> None:
    """Refuses a batch that does not split evenly.

    Raises:
      UserError: with all numbers.
    """
    devices = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if batch_size % (devices * accumulate):
        micro = f" x {accumulate} microbatches" if accumulate > 1 else ""
        raise UserError(
            f"batch_size={batch_size} is not a multiple of {devices} devices{micro}: "
            f"set it to a multiple of {devices * accumulate}"
        )


def share(mesh: Mesh) -> tuple[int, int]:
    """Tells which part of every batch this process loads; see `shares`.

    Returns:
      Number of the part, and how many parts there are.
    """
    return shares(mesh.devices)[jax.process_index()]


def shares(devices: np.ndarray) -> dict[int, tuple[int, int]]:
    """Tells which part of every batch each process loads.

    Processes that hold the same images, because "model" reaches over several of them,
    load the same part.

    Args:
      devices: of a mesh, (data, fsdp, model).

    Returns:
      Process to the number of its part and how many parts there are.

    Raises:
      UserError: the images of two processes overlap, but are not the same.
    """
    rows = devices.reshape(-1, devices.shape[-1])
    held = {}
    for row, replicas in enumerate(rows):
        for device in replicas:
            held.setdefault(device.process_index, []).append(row)
    held = {process: tuple(sorted(set(rows))) for process, rows in held.items()}
    parts = sorted(set(held.values()))
    if sum(map(len, parts)) != len(rows) or len(set(map(len, parts))) > 1:
        raise UserError(
            f"mesh.model={devices.shape[-1]} does not fit the "
            f"{devices.size // len(held)} devices of a process: set it to a divisor or "
            "a multiple of them"
        )
    return {process: (parts.index(rows), len(parts)) for process, rows in held.items()}


def to_devices(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict:
    """Makes global arrays of what each process loaded of a batch."""
    sharding = batched(mesh)
    # This transfer is meant, but with several processes JAX does not mark it so.
    with jax.transfer_guard_host_to_device("allow"):
        return {
            name: jax.make_array_from_process_local_data(sharding, value)
            for name, value in batch.items()
        }

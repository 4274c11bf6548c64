"""The device mesh and how arrays lie on it."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit_jax.errors import UserError


def create(sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """Arranges all devices of all processes in a mesh.

    Args:
      sizes: devices along each axis; one of them may be -1, "all that are left".

    Returns:
      The mesh.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.device_count()
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    shape = [devices // fixed if size == -1 else size for size in sizes.values()]
    if int(np.prod(shape)) != devices:
        raise UserError(
            f"config.mesh={dict(sizes)} does not make {devices} devices: set one axis "
            "to -1 or make the product equal"
        )
    return jax.make_mesh(
        tuple(shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(shape)
    )


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding that puts a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batched(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding that splits the leading axis over the data axis."""
    return NamedSharding(mesh, PartitionSpec("data"))


def check_batch(batch_size: int, accumulate: int, mesh: jax.sharding.Mesh) -> None:
    """Refuses a batch that does not split evenly.

    Raises:
      UserError: with all numbers.
    """
    devices = mesh.shape["data"]
    if batch_size % (devices * accumulate):
        micro = f" x {accumulate} microbatches" if accumulate > 1 else ""
        raise UserError(
            f"batch_size={batch_size} is not a multiple of {devices} devices{micro}: "
            f"set it to a multiple of {devices * accumulate}"
        )


def to_devices(batch: Mapping[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict:
    """Makes global arrays of what each process loaded of a batch."""
    sharding = batched(mesh)
    # This transfer is meant, but with several processes JAX does not mark it so.
    with jax.transfer_guard_host_to_device("allow"):
        return {
            name: jax.make_array_from_process_local_data(sharding, value)
            for name, value in batch.items()
        }

"""Whether a network's parameters could be held by the memory that there is at all."""

import math
import os
from collections.abc import Sequence

import jax

from vit_jax.errors import UserError

_BYTES = 4  # A parameter is a float32.
_TRAINED = 16  # With its gradient and two moments of Adam.


def memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the memory of devices in bytes; None where it is not known.

    Of the CPU it is that of the host, once for each process.

    Args:
      devices: here or on other hosts, of the same kind.
    """
    if devices[0].platform == "cpu":
        return _host_memory() * len({device.process_index for device in devices})
    own = jax.local_devices()[0]
    if own.device_kind != devices[0].device_kind:  # Of a topology that is not here.
        return None
    limit = (own.memory_stats() or {}).get("bytes_limit")
    return limit and limit * len(devices)


def check(shapes: dict, devices: Sequence[jax.Device] = ()) -> None:
    """Refuses a network before it is built that no memory here could hold.

    Only the parameters count, so that nothing is refused that swapping, sharding or
    rematerialisation could make fit; what else is needed, the compiler tells.

    Args:
      shapes: the parameters, as jax.ShapeDtypeStruct.
      devices: that hold them together; none stands for the memory of this host.

    Raises:
      UserError: with what it would take, and what there is.
    """
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    # JAX may have been told to start no CPU backend, so that the host is no device.
    there = memory(devices) if devices else _host_memory()
    if there and _BYTES * count > there:
        raise UserError(
            f"out of memory before the start: the network has {count:,} parameters, "
            f"{_BYTES * count / 1e9:,.1f} GB ({_TRAINED * count / 1e9:,.1f} GB with "
            f"gradients and Adam's moments), and there are {there / 1e9:,.1f} GB: "
            "choose a smaller image size or model, or more devices"
        )


def _host_memory() -> int:
    """Returns the memory of this host in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""Starting as one of several processes."""

import importlib.util
import os
import pathlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.errors import UserError

# JAX's own is 100: longer than a pod should compute for a host that has died.
_HEARTBEAT_SECONDS = 40
_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start() -> int:
    """Joins the other processes of the job, if there are any.

    A job of several processes is one on a TPU pod slice, under SLURM, or one that sets
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. Anything else runs alone. Call before the first computation.

    Returns:
      The number of processes.

    Raises:
      UserError: only some of the three variables are set, or one is no such number.
    """
    given = [name for name in _NAMES if name in os.environ]
    if given:
        if len(given) < len(_NAMES):
            missing = [name for name in _NAMES if name not in given]
            raise UserError(
                f"{', '.join(given)} set but not {', '.join(missing)}: a job of several "
                "processes needs all three, or none of them"
            )
        address, count, process = (os.environ[name] for name in _NAMES)
        if not (
            count.isdecimal() and process.isdecimal() and int(process) < int(count)
        ):
            raise UserError(
                f"JAX_NUM_PROCESSES={count!r} and JAX_PROCESS_ID={process!r}: set the "
                "number of processes, and for each of them its own from 0 to one less"
            )
        jax.distributed.initialize(
            address,
            int(count),
            int(process),
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    elif _on_cluster():
        jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
    return jax.process_count()


def gather(**values: object) -> dict[str, np.ndarray]:
    """Returns each number as an array of what it is on every process.

    All processes of the job must call it at the same step.
    """
    arrays = {name: np.asarray(value) for name, value in values.items()}
    if jax.process_count() == 1:
        return {name: array[None] for name, array in arrays.items()}
    with jax.transfer_guard("allow"):  # This transfer is meant.
        return multihost_utils.process_allgather(arrays)


def _on_cluster() -> bool:
    # The hosts of a TPU slice learn of each other from its metadata, through JAX.
    chips = any(pathlib.Path("/dev").glob("accel[0-9]*"))
    chips = chips or any(pathlib.Path("/dev/vfio").glob("[0-9]*"))
    pod = chips and importlib.util.find_spec("libtpu") is not None
    # A SLURM step of several tasks; a batch script alone has no step.
    slurm = "SLURM_STEP_ID" in os.environ and int(
        os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    )
    return pod or bool(slurm and slurm > 1)

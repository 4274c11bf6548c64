"""Starting as one of several processes."""

import os

import jax

from vit_jax.errors import UserError

_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start() -> None:
    """Joins the other processes of the job, if there are any.

    A job of several processes is one on a TPU pod slice, under SLURM, or one that sets
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. Anything else runs alone. Call before the first computation.

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
        jax.distributed.initialize(address, int(count), int(process))
    elif _on_cluster():
        jax.distributed.initialize()


def _on_cluster() -> bool:
    pod = len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1
    # A SLURM step of several tasks; a batch script alone has no step.
    slurm = "SLURM_STEP_ID" in os.environ and int(
        os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    )
    return pod or bool(slurm and slurm > 1)

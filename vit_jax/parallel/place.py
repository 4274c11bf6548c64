"""The place of a process in a job of several, and how JAX is asked for it."""

import contextlib
import dataclasses
import os
import warnings

from vit_jax.errors import UserError

JAX_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # Of a pod of an indexed job.
ALONE = "JAX_NUM_PROCESSES=1 makes this process train alone"


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process in a job of several.

    Attributes:
      told_by: what said so, for messages.
      address: host:port at which process 0 serves the others.
      count: processes of the job.
      process: number of this one, from 0.
      gpus: local numbers of the GPUs that are its own; None is all that it sees.
    """

    told_by: str
    address: str
    count: int
    process: int
    gpus: tuple[int, ...] | None = None


def from_jax(
    cluster, told_by: str, wait_seconds: int, gpus: tuple[int, ...] | None = None
) -> Place:
    """Asks one of JAX's cluster classes.

    Args:
      cluster: class of `jax._src.clusters`.
      told_by: what it reads, for messages.
      wait_seconds: for the name of the first host to become known.
      gpus: of the place.

    Raises:
      UserError: it cannot tell.
    """
    with clear(told_by):
        count, process = cluster.get_process_count(), cluster.get_process_id()
        if count == 1:
            return Place(told_by, "", 1, 0)
        address = cluster.get_coordinator_address(
            timeout_secs=wait_seconds,
            override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
        )
    return Place(told_by, address, count, process, gpus)


@contextlib.contextmanager
def clear(told_by: str):
    """Turns what JAX raises over its surroundings into one line.

    Warnings there never become errors, and no deprecation is shown: the code is not ours.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except Exception as error:  # Of JAX, requests or kubernetes.
        raise UserError(
            f"the processes of this job cannot be found by {told_by} ({error}): mend "
            f"it, or set {', '.join(JAX_NAMES)}; {ALONE}"
        ) from error


def number(name: str, default: int) -> int:
    """Reads a whole number from the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(
            f"{name}={text!r} is not a whole number: leave it to the scheduler"
        )
    return int(text)

"""Starting as one of several processes."""

import contextlib
import errno
import os
import socket
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR, LostHost, UserError
from vit_jax.parallel import aborts, cluster, last_words
from vit_jax.parallel.place import Place

# Hosts of one job may start minutes apart: images are pulled, machines booted.
_START = "VIT_JAX_START_SECONDS"
_START_SECONDS = 300
_LOST = "VIT_JAX_LOST_SECONDS"
_LOST_SECONDS = 40
_LATER_SECONDS = 10  # Than ours, JAX looks for the lost.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # As gRPC reads them.


def start() -> int:
    """Joins the other processes of the job, if there are any.

    `cluster.find` says which they are: on a TPU slice or several, under SLURM, Open MPI
    or Kubernetes, by a list of hosts (VIT_JAX_HOSTS), or by JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID. Call before the first computation.

    Returns:
      The number of processes. Devices are not looked for yet.

    Raises:
      UserError: what the surroundings say is incomplete or contradictory.
      LostHost: process 0 cannot be reached in VIT_JAX_START_SECONDS.
    """
    seconds, began = _seconds(_START, _START_SECONDS), time.monotonic()
    place = cluster.find(seconds)
    if place is None:
        return 1
    _pass_by_proxies(place.address)
    if place.process:
        _wait_for_service(place, seconds)
    else:
        _check_port(place)
    left = max(round(seconds - (time.monotonic() - began)), 1)
    # JAX ends this process if the others do not come, or come twice.
    until = time.monotonic() + left
    aborts.explain(lambda: _not_joined(place, left, until))
    last_words.leave(f"process {place.process} of {place.count} ended while it started")
    jax.distributed.initialize(
        place.address,
        place.count,
        place.process,
        local_device_ids=place.gpus,
        cluster_detection_method="deactivate",  # It has been done.
        initialization_timeout=left,
        # Ours (together.py) comes first, and names the process. JAX's own ends this one
        # after half of this at the earliest, whatever our threads are at.
        heartbeat_timeout_seconds=2 * (lost_seconds() + _LATER_SECONDS),
    )
    return place.count


def service_is_gone(address: str) -> bool:
    """Tells whether nobody listens where process 0 runs the coordination service."""
    try:
        _connect(address)
    except OSError:
        return True
    return False


def lost_seconds() -> int:
    """Returns after how many seconds of silence a process counts as lost."""
    return _seconds(_LOST, _LOST_SECONDS, least=5)  # Beats are a second apart.


def gather(**values: object) -> dict[str, np.ndarray]:
    """Returns each number as an array of what it is on every process.

    All processes of the job must call it at the same step.
    """
    arrays = {name: np.asarray(value) for name, value in values.items()}
    if jax.process_count() == 1:
        return {name: array[None] for name, array in arrays.items()}
    # As bytes: JAX would cut 64-bit numbers to 32.
    sent = {name: np.frombuffer(a.tobytes(), np.uint8) for name, a in arrays.items()}
    with jax.transfer_guard("allow"):  # This transfer is meant.
        got = multihost_utils.process_allgather(sent)
    return {
        name: np.ascontiguousarray(got[name]).view(a.dtype).reshape(-1, *a.shape)
        for name, a in arrays.items()
    }


def _seconds(name: str, default: int, least: int = 1) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UserError(
            f"{name}={text!r}: state a whole number of seconds, from {least} on"
        )
    return int(text)


def _pass_by_proxies(address: str) -> None:
    """Keeps gRPC from asking a web proxy for process 0."""
    if not any(name in os.environ for name in _PROXIES):
        return
    name = "no_grpc_proxy" if "no_grpc_proxy" in os.environ else "no_proxy"
    hosts = [os.environ.get(name, ""), address.rpartition(":")[0]]
    os.environ["no_grpc_proxy"] = ",".join(filter(None, hosts))
    jax.config.update("jax_check_proxy_envs", False)  # It warns of them.


def _wait_for_service(place: Place, seconds: int) -> None:
    until, error = time.monotonic() + seconds, OSError()
    while time.monotonic() < until:
        try:
            return _connect(place.address)
        except OSError as failed:
            error = failed
        time.sleep(min(0.5, max(until - time.monotonic(), 0)))
    # An address that does not exist will not exist at the next start either.
    wrong = isinstance(error, socket.gaierror)
    raise (UserError if wrong else LostHost)(
        f"process {place.process} of {place.count} ({socket.gethostname()}) cannot reach "
        f"process 0 at {place.address} ({error.strerror or error}; tried for {seconds} "
        f"s; told by {place.told_by}): start process 0 there, open the port between the "
        f"hosts, or wait longer with {_START}"
    )


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
        pass


def _not_joined(place: Place, seconds: int, until: float) -> tuple[int, str]:
    """Returns the exit code and the reason where JAX aborts while the others come."""
    last_words.forget()
    own = f"process {place.process} of {place.count} ({socket.gethostname()})"
    if place.process and service_is_gone(place.address):
        return EXIT_TRY_AGAIN, (
            f"process 0 of {place.count} at {place.address} died or was lost before "
            f"{own} had joined it: start the job again"
        )
    code, who = EXIT_USER_ERROR, "the others"
    if time.monotonic() > until - 1:  # Else JAX refused what it was told.
        code = EXIT_TRY_AGAIN
        if place.count == 2:
            who = f"process {1 - place.process} of 2"
    return code, (
        f"{own} did not come together with {who} at {place.address} in {seconds} s: see "
        f"JAX's message above; start {place.count} processes, each with a number of its "
        f"own (this was told by {place.told_by}), or wait longer with {_START}"
    )


def _check_port(place: Place) -> None:
    port = int(place.address.rpartition(":")[2])
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("::", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # A host without IPv6: JAX will tell.
            raise UserError(
                f"port {port} of this host ({socket.gethostname()}) is taken: another "
                f"job runs here, or the last one has not ended yet; choose another port "
                f"for {place.address} (told by {place.told_by})"
            ) from error

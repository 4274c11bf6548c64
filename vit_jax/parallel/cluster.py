"""Which processes make up the job, and which of them this one is."""

import contextlib
import os
import socket

from vit_jax.errors import UserError
from vit_jax.parallel import schedulers
from vit_jax.parallel.place import JAX_NAMES, KUBERNETES_INDEX, Place

HOSTS = "VIT_JAX_HOSTS"
_PORT = 8476
_UDP = socket.SOCK_DGRAM


def find(wait_seconds: int = 300) -> Place | None:
    """Finds the place of this process from its surroundings.

    Looks, in this order, at JAX_COORDINATOR_ADDRESS and the like, VIT_JAX_HOSTS, Open
    MPI, SLURM, the TPU slice, and Kubernetes.

    Args:
      wait_seconds: for the name of a TPU slice's first host to become known.

    Returns:
      None if this process trains alone.

    Raises:
      UserError: a variable is missing, is no number, or contradicts another.
    """
    if os.environ.get("JAX_NUM_PROCESSES") == "1":
        return None
    place = _stated() or _listed()
    for look in schedulers.ALL:
        place = place or look(wait_seconds)
    if not place or place.count == 1:
        return None
    port = place.address.rpartition(":")[2]
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"port {port!r} of {place.address} (told by {place.told_by}) is no number "
            f"from 1 to {2**16 - 1}: state another, as {_PORT}"
        )
    return place


def _stated() -> Place | None:
    given = {name: os.environ[name] for name in JAX_NAMES if name in os.environ}
    if not given or HOSTS in os.environ and list(given) == ["JAX_PROCESS_ID"]:
        return None
    if HOSTS in os.environ:
        raise UserError(
            f"{HOSTS} and {', '.join(given)} are both set: unset the one or the other"
        )
    if KUBERNETES_INDEX in os.environ:
        given.setdefault("JAX_PROCESS_ID", os.environ[KUBERNETES_INDEX])
    if missing := [name for name in JAX_NAMES if name not in given]:
        raise UserError(
            f"{', '.join(given)} set but not {', '.join(missing)}: a job of several "
            "processes needs all three, or none of them"
        )
    address, count, process = (given[name] for name in JAX_NAMES)
    if not (count.isdecimal() and process.isdecimal() and int(process) < int(count)):
        raise UserError(
            f"JAX_NUM_PROCESSES={count!r} and JAX_PROCESS_ID={process!r}: set the "
            "number of processes, and for each of them its own from 0 to one less"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise UserError(
            f"JAX_COORDINATOR_ADDRESS={address!r}: state the host of process 0 and a "
            f"free port of it, as {address.rstrip(':') or 'host0'}:{_PORT}"
        )
    return Place("JAX_COORDINATOR_ADDRESS", address, int(count), int(process))


def _listed() -> Place | None:
    text = os.environ.get(HOSTS)
    if text is None:
        return None
    hosts = [host.strip() for host in text.split(",")]
    first, _, port = hosts[0].partition(":")
    if not all(hosts) or not (port or str(_PORT)).isdecimal():
        raise UserError(
            f"{HOSTS}={text!r}: list the hosts with commas between them, as "
            f"host0,host1; the first may have a port (host0:{_PORT})"
        )
    names = [first, *(host.partition(":")[0] for host in hosts[1:])]
    address = f"{first}:{port or _PORT}"
    number = os.environ.get("JAX_PROCESS_ID")
    if number is None:
        here = [i for i, name in enumerate(names) if is_this_host(name)]
        if len(here) != 1:
            which = "is not among them" if not here else "is several of them"
            raise UserError(
                f"{HOSTS}={text!r}: this host ({socket.gethostname()}) {which}; write "
                "it as `hostname` or its address says, or set JAX_PROCESS_ID to its "
                "place in the list, from 0"
            )
        number = str(here[0])
    if not (number.isdecimal() and int(number) < len(names)):
        raise UserError(
            f"JAX_PROCESS_ID={number!r}: {HOSTS} lists {len(names)} hosts; state a "
            f"number from 0 to {len(names) - 1}"
        )
    return Place(HOSTS, address, len(names), int(number))


def is_this_host(name: str) -> bool:
    """Tells whether a name or address is that of the machine this runs on."""
    own = socket.gethostname()
    if name in (own, own.partition(".")[0], socket.getfqdn()):
        return True
    with contextlib.suppress(OSError):
        for family, _, _, _, (address, *_) in socket.getaddrinfo(name, 9):
            with contextlib.suppress(OSError), socket.socket(family, _UDP) as probe:
                probe.connect((address, 9))  # Sends nothing.
                if probe.getsockname()[0] == address:  # The way there ends here.
                    return True
    return False

"""Finds the job of a process in variables of SLURM, Open MPI, TPU slices or Kubernetes.

JAX's cluster classes read these environment variables. This module checks them first,
so that a mistake ends in one line with a remedy, and divides the GPUs of a node.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import socket

from vit_jax.distributed.internals import cloud_tpu_init, clusters, hardware_utils
from vit_jax.errors import UserError

HOSTS = "VIT_JAX_HOSTS"
JAX_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_POD_INDEX = "JOB_COMPLETION_INDEX"  # In pods of an indexed Kubernetes job.
_ALONE = "JAX_NUM_PROCESSES=1 makes this process train alone"
_PORT = 8476
_UDP = socket.SOCK_DGRAM


@dataclasses.dataclass(frozen=True)
class JobProcess:
    """The job of this process, and its index in the job."""

    source: str  # Where these values were read, for messages.
    address: str  # host:port at which process 0 serves the others.
    count: int
    process: int
    gpus: tuple[int, ...] | None = None  # Local indices; None for all visible GPUs.


def find_job(wait_seconds: int = 300) -> JobProcess | None:
    """Finds the job of this process in its environment.

    Looks, in this order, at JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID; a list of hosts (VIT_JAX_HOSTS); Open MPI; SLURM; the TPU slice,
    waiting for the name of its first host; and Kubernetes.

    Returns:
      None if this process trains alone.

    Raises:
      UserError: a variable is missing, is not a number, or contradicts another.
    """
    if os.environ.get("JAX_NUM_PROCESSES") == "1":
        return None
    job = _from_jax_names() or _from_host_list()
    for find in (_open_mpi, _slurm, _tpu, _kubernetes):  # In JAX's order.
        if job is None and (scheduler := find()):
            job = _ask(*scheduler, wait_seconds)
    if job is None or job.count == 1:
        return None
    host, _, port = job.address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"{job.address!r}, the address of process 0 from {job.source}: write a "
            f"host and a port from 1 to {2**16 - 1}, as {host or 'host0'}:{_PORT}"
        )
    return job


def _from_jax_names() -> JobProcess | None:
    given = [name for name in JAX_NAMES if name in os.environ]
    if not given or (HOSTS in os.environ and given == ["JAX_PROCESS_ID"]):
        return None
    if HOSTS in os.environ:
        raise UserError(
            f"{HOSTS} and {', '.join(given)} are both set: unset the one or the other"
        )
    address, count, process = JAX_NAMES
    if process not in given and _POD_INDEX in os.environ:
        process = _POD_INDEX
    remedy = "a job of several processes needs all three, or none of them"
    numbers = _count_and_index(count, process, (address,), remedy)
    return JobProcess(address, os.environ[address], *numbers)


def _from_host_list() -> JobProcess | None:
    text = os.environ.get(HOSTS)
    if text is None:
        return None
    hosts = [host.strip() for host in text.split(",")]
    if not all(hosts):
        raise UserError(
            f"{HOSTS}={text!r}: list the hosts with commas between them, as "
            f"host0,host1; the first may have a port (host0:{_PORT})"
        )
    if "JAX_PROCESS_ID" in os.environ:
        remedy = f"it is a position, from 0, in {HOSTS}={text}"
        here = [env_number("JAX_PROCESS_ID", below=len(hosts), remedy=remedy)]
    else:
        names = [host.partition(":")[0] for host in hosts]
        here = [i for i, name in enumerate(names) if _is_this_host(name)]
    if len(here) != 1:
        which = "is several of them" if here else "is not among them"
        raise UserError(
            f"{HOSTS}={text!r}: this host ({socket.gethostname()}) {which}; write "
            "it as `hostname` or its address says, or set JAX_PROCESS_ID to its "
            "place in the list, from 0"
        )
    first = hosts[0] if ":" in hosts[0] else f"{hosts[0]}:{_PORT}"
    return JobProcess(HOSTS, first, len(hosts), *here)


def _is_this_host(name: str) -> bool:
    """Returns whether a name or address is that of this machine."""
    full = socket.gethostname()
    if name in (full, full.partition(".")[0], socket.getfqdn()):
        return True
    with contextlib.suppress(OSError):
        for family, _, _, _, (address, *_) in socket.getaddrinfo(name, 9):
            with contextlib.suppress(OSError), socket.socket(family, _UDP) as probe:
                probe.connect((address, 9))  # Sends nothing.
                if probe.getsockname()[0] == address:  # The route ends on this machine.
                    return True
    return False


# A scheduler: its name for messages, the class of JAX that reads its variables, and the
# GPUs that this process gets.
_Scheduler = tuple[str, type[clusters.ClusterEnv], tuple[int, ...] | None]


def _open_mpi() -> _Scheduler | None:
    size = "OMPI_COMM_WORLD_SIZE"
    if (count := env_number(size, 1)) == 1:
        return None
    cluster = clusters.OmpiCluster  # Open MPI 5 has no variable for the first host.
    if not cluster.is_env_present():
        cluster = clusters.Mpi4pyCluster
    if not cluster.is_env_present():
        raise UserError(
            f"{size}={count}: with Open MPI 5 JAX needs mpi4py (pip install mpi4py), or "
            f"{', '.join(JAX_NAMES)}; {_ALONE}"
        )
    task = env_number("OMPI_COMM_WORLD_LOCAL_RANK", 0)
    tasks = env_number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    return "Open MPI", cluster, _gpus_of_task(task, tasks, None)


def _slurm() -> _Scheduler | None:
    tasks = "SLURM_STEP_NUM_TASKS"
    # In a batch script only the number of nodes is set.
    several = tasks if "SLURM_STEP_ID" in os.environ else "SLURM_NNODES"
    if env_number(several, 1) == 1:
        return None
    others = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_LOCALID")
    remedy = (
        "start it as a task of srun (`srun python -m vit_jax.train ...`) that gets all "
        f"of srun's variables (--export=ALL, and in a container too); {_ALONE}"
    )
    if several != tasks:
        raise UserError(f"{several}={os.environ[several]} in a batch script: {remedy}")
    count, _ = _count_and_index(tasks, "SLURM_PROCID", others, remedy)
    if (other := env_number("SLURM_NTASKS")) != count:
        raise UserError(
            f"{tasks}={count} and SLURM_NTASKS={other} contradict: {remedy}"
        )
    # "2(x3),1" is two tasks on each of three nodes and one on the fourth.
    on_nodes = re.findall(
        r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    )
    on_node = [int(n) for n, times in on_nodes for _ in range(int(times or 1))]
    node = env_number("SLURM_NODEID", 0)
    even = -(-count // env_number("SLURM_STEP_NUM_NODES", 1))
    gpus = _gpus_of_task(
        env_number("SLURM_LOCALID"),
        on_node[node] if node < len(on_node) else even,
        env_number("SLURM_GPUS_ON_NODE", 0) or None,
    )
    return "SLURM", clusters.SlurmCluster, gpus


def _gpus_of_task(task: int, tasks: int, on_node: int | None) -> tuple[int, ...] | None:
    """Returns the indices of the GPUs of one task of a node; None for all it sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = on_node if visible is None else len([*filter(None, visible.split(","))])
    if tasks == 1 or seen == 0 or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    if seen is None:
        return (task,)  # As in JAX; it has no effect without GPUs.
    if seen == 1 and (on_node or tasks) >= tasks:
        return None  # The scheduler gave each task a different GPU.
    if seen % tasks:
        raise UserError(
            f"{tasks} processes on this node and {seen} GPUs, which do not divide: "
            "start one process per node (--ntasks-per-node=1), or one per GPU"
        )
    each = seen // tasks
    return tuple(range(task * each, (task + 1) * each))


def _tpu() -> _Scheduler | None:
    if not cloud_tpu_init.running_in_cloud_tpu_vm:
        chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
        if chips and os.environ.get("JAX_PLATFORMS") != "cpu":
            raise UserError(
                f"this machine has {chips} TPU chips but not libtpu: pip install -e "
                "'.[tpu]' in the clone, or set JAX_PLATFORMS=cpu to train without them"
            )
        return None
    gke = clusters.GkeTpuCluster
    if not gke.is_env_present():
        return "the metadata of this TPU VM", clusters.GceTpuCluster, None
    hosts = len(gke._get_worker_list_in_slice())
    slices = env_number("MEGASCALE_NUM_SLICES", 1)
    if hosts * slices == 1:
        return None
    remedy = (
        "GKE sets it and TPU_WORKER_HOSTNAMES for pods that ask for google.com/tpu; do "
        "not set them yourself"
    )
    env_number("TPU_WORKER_ID", below=hosts, remedy=remedy)
    if slices > 1:
        numbers = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
        remedy = "start the slices as one JobSet (launch/xpk.sh), which sets all three"
        _count_and_index(*numbers, ("MEGASCALE_COORDINATOR_ADDRESS",), remedy)
    return "GKE's TPU variables", gke, None


def _kubernetes() -> _Scheduler | None:
    index = os.environ.get(_POD_INDEX)
    if index is None or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            f"{_POD_INDEX}={index}: a pod of an indexed Kubernetes job must know the "
            "others; set JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES as in "
            f"launch/jobset_gpu.yaml, or pip install kubernetes; {_ALONE}"
        )
    return "Kubernetes", clusters.K8sCluster, None


def _ask(
    source: str, cluster, gpus: tuple[int, ...] | None, wait_seconds: int
) -> JobProcess | None:
    """Returns the job that a class of JAX reads; None if its scheduler is absent."""
    try:
        if not cluster.is_env_present():  # It also logs in to Kubernetes.
            return None
        if (count := cluster.get_process_count()) == 1:
            return JobProcess(source, "", 1, 0)
        process = cluster.get_process_id()
        address = cluster.get_coordinator_address(
            timeout_secs=wait_seconds,
            override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
        )
        return JobProcess(source, address, count, process, gpus)
    except Exception as error:  # From JAX, requests or kubernetes.
        raise UserError(
            f"the processes of this job cannot be read from {source} ({error}): mend "
            f"it, or set {', '.join(JAX_NAMES)}; {_ALONE}"
        ) from error


def _count_and_index(
    count: str, index: str, others: tuple[str, ...], remedy: str
) -> tuple[int, int]:
    """Returns the numbers in two variables, if they and all others are set."""
    names = (count, index, *others)
    if missing := [name for name in names if name not in os.environ]:
        given = ", ".join(name for name in names if name in os.environ)
        raise UserError(f"{given} set but not {', '.join(missing)}: {remedy}")
    number = env_number(count)
    remedy = f"{count}={number}; {remedy}"
    return number, env_number(index, below=number, remedy=remedy)


def env_number(
    name: str,
    default: int | str = "",
    *,
    least: int = 0,
    below: int = 2**31,
    remedy: str = "leave it to the scheduler",
) -> int:
    """Returns the whole number in an environment variable.

    Raises:
      UserError: it is not a whole number from `least` to `below - 1`.
    """
    text = os.environ.get(name, str(default))
    if not (text.isdecimal() and least <= int(text) < below):
        end = "on" if below == 2**31 else f"to {below - 1}"
        raise UserError(
            f"{name}={text!r}: write a whole number, from {least} {end}; {remedy}"
        )
    return int(text)

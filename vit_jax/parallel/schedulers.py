"""What SLURM, Open MPI, TPU slices and Kubernetes tell a process of its job.

They do so in environment variables (a TPU VM in its metadata), each in its own way.
Reading them is left to JAX's own classes; what is here looks at the variables first, so
that a mistake is named, and divides the GPUs of a node.
"""

import importlib.util
import os

from jax._src import cloud_tpu_init, clusters, hardware_utils  # No public door.

from vit_jax.errors import UserError
from vit_jax.parallel.place import (
    ALONE,
    JAX_NAMES,
    KUBERNETES_INDEX,
    Place,
    clear,
    from_jax,
    number,
)

_SLURM_NAMES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)


def _open_mpi(wait_seconds: int) -> Place | None:
    if number("OMPI_COMM_WORLD_SIZE", 1) == 1:
        return None
    mpi = clusters.OmpiCluster  # Up to version 4; it says nothing of the host since.
    if not mpi.is_env_present():
        mpi = clusters.Mpi4pyCluster
        if not mpi.is_env_present():
            raise UserError(
                f"OMPI_COMM_WORLD_SIZE={os.environ['OMPI_COMM_WORLD_SIZE']}: with Open "
                "MPI 5 JAX needs mpi4py (pip install mpi4py), or JAX_COORDINATOR_"
                f"ADDRESS and {JAX_NAMES[1]} and {JAX_NAMES[2]}; {ALONE}"
            )
    local = number("OMPI_COMM_WORLD_LOCAL_RANK", 0)
    gpus = _share(number("OMPI_COMM_WORLD_LOCAL_SIZE", 1), local, None)
    return from_jax(mpi, "Open MPI", wait_seconds, gpus)


def _slurm(wait_seconds: int) -> Place | None:
    if "SLURM_STEP_ID" not in os.environ:  # A batch script, or no SLURM.
        if (nodes := number("SLURM_NNODES", 1)) > 1:
            raise UserError(
                f"SLURM_NNODES={nodes}, but this process is not a task of srun: start "
                f"it as `srun python -m vit_jax.train ...`; {ALONE}"
            )
        return None
    tasks = number("SLURM_STEP_NUM_TASKS", 1)
    if tasks == 1:
        return None
    if missing := [name for name in _SLURM_NAMES if name not in os.environ]:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={tasks}, but {', '.join(missing)} not set: start "
            "this process with srun, and let srun's variables through "
            "(--export=ALL, and in a container too)"
        )
    count, process = number("SLURM_NTASKS", 1), number("SLURM_PROCID", 0)
    if count != tasks or process >= count:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={tasks}, SLURM_NTASKS={count} and SLURM_PROCID="
            f"{process} contradict each other: leave these variables to srun"
        )
    gpus = _share(
        _tasks_on_this_node(tasks),
        number("SLURM_LOCALID", 0),
        number("SLURM_GPUS_ON_NODE", 0) or None,
    )
    return from_jax(clusters.SlurmCluster, "SLURM", wait_seconds, gpus)


def _tasks_on_this_node(tasks: int) -> int:
    """Reads SLURM's "2(x3),1": two tasks on each of three nodes, one on the fourth."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = []
    for word in filter(None, text.split(",")):
        each, _, times = word.rstrip(")").partition("(x")
        counts += [int(each)] * int(times or 1)
    node = number("SLURM_NODEID", 0)
    if node < len(counts):
        return counts[node]
    return -(-tasks // number("SLURM_STEP_NUM_NODES", 1))


def _share(tasks: int, task: int, on_node: int | None) -> tuple[int, ...] | None:
    """Divides the GPUs of a node among its tasks.

    Args:
      tasks: processes on this node.
      task: which of them this is.
      on_node: GPUs of the node; None if it is not known.

    Returns:
      The numbers of this task's, among those that it sees; None for all of them.

    Raises:
      UserError: they do not divide.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = on_node if visible is None else len([*filter(None, visible.split(","))])
    if tasks == 1 or seen == 0 or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    if seen is None:
        return (task,)  # As JAX does it. Of no meaning without GPUs.
    if seen == 1 and (on_node or tasks) >= tasks:
        return None  # The scheduler has given each task its own.
    if seen % tasks:
        raise UserError(
            f"{tasks} processes on this node and {seen} GPUs, which do not divide: "
            "start one process a node (--ntasks-per-node=1), or one a GPU"
        )
    each = seen // tasks
    return tuple(range(task * each, (task + 1) * each))


def _tpu(wait_seconds: int) -> Place | None:
    if not cloud_tpu_init.running_in_cloud_tpu_vm:
        chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
        if chips and os.environ.get("JAX_PLATFORMS") != "cpu":
            raise UserError(
                f"this machine has {chips} TPU chips but not libtpu: pip install -e "
                "'.[tpu]' in the clone, or set JAX_PLATFORMS=cpu to train without them"
            )
        return None
    if not clusters.GkeTpuCluster.is_env_present():
        with clear("the metadata of this TPU VM"):
            there = clusters.GceTpuCluster.is_env_present()
        told_by = "the metadata of this TPU VM"
        return (
            from_jax(clusters.GceTpuCluster, told_by, wait_seconds) if there else None
        )
    with clear("TPU_WORKER_HOSTNAMES"):
        hosts = len(clusters.GkeTpuCluster._get_worker_list_in_slice())
    worker, slices = os.environ.get("TPU_WORKER_ID"), number("MEGASCALE_NUM_SLICES", 1)
    if hosts * slices == 1:
        return None
    if worker is None or not worker.isdecimal() or int(worker) >= hosts:
        raise UserError(
            f"TPU_WORKER_ID={worker!r} with {hosts} hosts in TPU_WORKER_HOSTNAMES: GKE "
            "sets both for pods that ask for google.com/tpu; do not set them yourself"
        )
    needed = ("MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
    missing = [name for name in needed if name not in os.environ]
    if slices > 1 and (missing or number(needed[0], 0) >= slices):
        raise UserError(
            f"MEGASCALE_NUM_SLICES={slices} with MEGASCALE_SLICE_ID="
            f"{os.environ.get(needed[0])} and MEGASCALE_COORDINATOR_ADDRESS="
            f"{os.environ.get(needed[1])}: start the slices as one JobSet "
            "(launch/xpk.sh), which sets all three"
        )
    return from_jax(clusters.GkeTpuCluster, "GKE's TPU variables", wait_seconds)


def _kubernetes(wait_seconds: int) -> Place | None:
    index = os.environ.get(KUBERNETES_INDEX)
    if index is None or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            f"{KUBERNETES_INDEX}={index}: a pod of an indexed Kubernetes job must know "
            "the others; set JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES as in "
            f"launch/jobset_gpu.yaml, or pip install kubernetes; {ALONE}"
        )
    with clear("the Kubernetes API"):
        clusters.K8sCluster.is_env_present()  # It also logs in.
    return from_jax(clusters.K8sCluster, "Kubernetes", wait_seconds)


ALL = (_open_mpi, _slurm, _tpu, _kubernetes)  # In JAX's order.

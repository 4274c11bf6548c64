"""Starts this process as one of several, by `jax.distributed.initialize`.

JAX's classes read what SLURM, Open MPI, TPU slices and Kubernetes say of a job. The code
here looks first, so that a mistake gets one line with a remedy, and divides the GPUs of
a node.

After joining, the processes compare their config, code and data through JAX's
coordination service, which needs no collective. Processes that differ would compile
different programs, and wait for each other in collectives that never meet.
"""

import contextlib
import dataclasses
import errno
import importlib.util
import itertools
import json
import os
import socket
import time
import warnings
from collections.abc import Mapping

import jax
from jax._src import cloud_tpu_init, clusters, hardware_utils  # There is no public API.

from vit_jax.distributed import crash_reporter, failures
from vit_jax.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR, LostHost, UserError

HOSTS = "VIT_JAX_HOSTS"
JAX_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # Of a pod of an indexed job.
_ALONE = "JAX_NUM_PROCESSES=1 makes this process train alone"
_SLURM_NAMES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
_PORT = 8476
_UDP = socket.SOCK_DGRAM
# Hosts of one job may start minutes apart: images are pulled, machines booted.
_START = "VIT_JAX_START_SECONDS"
_START_SECONDS = 300
_LATER_SECONDS = 10  # JAX's own search for lost processes starts later than ours.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # As gRPC reads them.
# The comparison of processes.
_POLL_SECONDS = 0.05
_MAX_KEYS, _MAX_PROCESSES = 4, 6  # In one message.
_REMEDIES = {
    "config": "start all processes with the same config",
    "code": "install the same code and packages on all hosts",
    "devices": "start every process with as many devices, of the same kind",
    "data": "give all hosts the same data",
    "weights": "give all hosts the same weights, opened with the same flags",
    "preprocess": "give all hosts the same flags on images",
    "workdir": "give all hosts the same --workdir, on storage that they share",
}
_rounds = itertools.count()  # Of comparisons; the same in all processes.


@dataclasses.dataclass(frozen=True)
class JobProcess:
    """This process as one of a job."""

    told_by: str  # Source of these values, for messages.
    address: str  # host:port at which process 0 serves the others.
    count: int
    process: int
    gpus: tuple[int, ...] | None = None  # Local indices; None is all that it sees.


def start() -> int:
    """Joins the other processes of the job, if `find_job` finds any; returns how many.

    Call it before the first computation; it does not look for devices yet.

    Raises:
      UserError: the environment is incomplete or contradicts itself.
      LostHost: process 0 cannot be reached in VIT_JAX_START_SECONDS.
    """
    seconds, began = failures.seconds_from_env(_START, _START_SECONDS), time.monotonic()
    job = find_job(seconds)
    if job is None:
        return 1
    _pass_by_proxies(job.address)
    if job.process:
        _wait_for_service(job, seconds)
    else:
        _check_port(job)
    left = max(round(seconds - (time.monotonic() - began)), 1)
    # JAX ends this process if the others do not come, or come twice.
    until = time.monotonic() + left
    failures.set_abort_handler(lambda: _not_joined(job, left, until))
    crash_reporter.set_message(
        f"process {job.process} of {job.count} ended while it started"
    )
    jax.distributed.initialize(
        job.address,
        job.count,
        job.process,
        local_device_ids=job.gpus,
        cluster_detection_method="deactivate",  # find_job has done it.
        initialization_timeout=left,
        # Our watcher (failures.py) acts first, and names the process. JAX ends this one
        # after half of this at the earliest, even if our threads hang.
        heartbeat_timeout_seconds=2 * (failures.lost_seconds() + _LATER_SECONDS),
    )
    return job.count


def find_job(wait_seconds: int = 300) -> JobProcess | None:
    """Finds the job of this process in its environment.

    Looks, in this order, at JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID; a list of hosts (VIT_JAX_HOSTS); Open MPI; SLURM; the TPU slice, the
    name of whose first host it waits for; and Kubernetes.

    Returns:
      None if this process trains alone.

    Raises:
      UserError: a variable is missing, is no number, or contradicts another.
    """
    if os.environ.get("JAX_NUM_PROCESSES") == "1":
        return None
    job = _from_jax_names() or _from_host_list()
    for find in (_open_mpi, _slurm, _tpu, _kubernetes):  # In JAX's order.
        job = job or find(wait_seconds)
    if not job or job.count == 1:
        return None
    port = job.address.rpartition(":")[2]
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"port {port!r} of {job.address} (told by {job.told_by}) is no number "
            f"from 1 to {2**16 - 1}: state another, as {_PORT}"
        )
    return job


def _from_jax_names() -> JobProcess | None:
    given = {name: os.environ[name] for name in JAX_NAMES if name in os.environ}
    if not given or HOSTS in os.environ and list(given) == ["JAX_PROCESS_ID"]:
        return None
    if HOSTS in os.environ:
        raise UserError(
            f"{HOSTS} and {', '.join(given)} are both set: unset the one or the other"
        )
    if _KUBERNETES_INDEX in os.environ:
        given.setdefault("JAX_PROCESS_ID", os.environ[_KUBERNETES_INDEX])
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
    return JobProcess("JAX_COORDINATOR_ADDRESS", address, int(count), int(process))


def _from_host_list() -> JobProcess | None:
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
    return JobProcess(HOSTS, address, len(names), int(number))


def is_this_host(name: str) -> bool:
    """Returns whether a name or address is that of this machine."""
    own = socket.gethostname()
    if name in (own, own.partition(".")[0], socket.getfqdn()):
        return True
    with contextlib.suppress(OSError):
        for family, _, _, _, (address, *_) in socket.getaddrinfo(name, 9):
            with contextlib.suppress(OSError), socket.socket(family, _UDP) as probe:
                probe.connect((address, 9))  # Sends nothing.
                if probe.getsockname()[0] == address:  # The route ends on this machine.
                    return True
    return False


def _open_mpi(wait_seconds: int) -> JobProcess | None:
    if _env_number("OMPI_COMM_WORLD_SIZE", 1) == 1:
        return None
    mpi = clusters.OmpiCluster  # Up to version 4; later ones do not tell the host.
    if not mpi.is_env_present():
        mpi = clusters.Mpi4pyCluster
        if not mpi.is_env_present():
            raise UserError(
                f"OMPI_COMM_WORLD_SIZE={os.environ['OMPI_COMM_WORLD_SIZE']}: with Open "
                "MPI 5 JAX needs mpi4py (pip install mpi4py), or JAX_COORDINATOR_"
                f"ADDRESS and {JAX_NAMES[1]} and {JAX_NAMES[2]}; {_ALONE}"
            )
    local = _env_number("OMPI_COMM_WORLD_LOCAL_RANK", 0)
    gpus = _gpus_of_task(_env_number("OMPI_COMM_WORLD_LOCAL_SIZE", 1), local, None)
    return _from_cluster(mpi, "Open MPI", wait_seconds, gpus)


def _slurm(wait_seconds: int) -> JobProcess | None:
    if "SLURM_STEP_ID" not in os.environ:  # A batch script, or no SLURM.
        if (nodes := _env_number("SLURM_NNODES", 1)) > 1:
            raise UserError(
                f"SLURM_NNODES={nodes}, but this process is not a task of srun: start "
                f"it as `srun python -m vit_jax.train ...`; {_ALONE}"
            )
        return None
    tasks = _env_number("SLURM_STEP_NUM_TASKS", 1)
    if tasks == 1:
        return None
    if missing := [name for name in _SLURM_NAMES if name not in os.environ]:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={tasks}, but {', '.join(missing)} not set: start "
            "this process with srun, and let srun's variables through "
            "(--export=ALL, and in a container too)"
        )
    count, process = _env_number("SLURM_NTASKS", 1), _env_number("SLURM_PROCID", 0)
    if count != tasks or process >= count:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={tasks}, SLURM_NTASKS={count} and SLURM_PROCID="
            f"{process} contradict each other: leave these variables to srun"
        )
    gpus = _gpus_of_task(
        _tasks_on_this_node(tasks),
        _env_number("SLURM_LOCALID", 0),
        _env_number("SLURM_GPUS_ON_NODE", 0) or None,
    )
    return _from_cluster(clusters.SlurmCluster, "SLURM", wait_seconds, gpus)


def _tasks_on_this_node(tasks: int) -> int:
    """Parses SLURM's "2(x3),1": two tasks on each of three nodes, one on the fourth."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = []
    for word in filter(None, text.split(",")):
        each, _, times = word.rstrip(")").partition("(x")
        counts += [int(each)] * int(times or 1)
    node = _env_number("SLURM_NODEID", 0)
    if node < len(counts):
        return counts[node]
    return -(-tasks // _env_number("SLURM_STEP_NUM_NODES", 1))


def _gpus_of_task(tasks: int, task: int, on_node: int | None) -> tuple[int, ...] | None:
    """Returns the GPUs of one of the tasks of a node, of those that it sees; None: all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = on_node if visible is None else len([*filter(None, visible.split(","))])
    if tasks == 1 or seen == 0 or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    if seen is None:
        return (task,)  # As in JAX; it has no effect without GPUs.
    if seen == 1 and (on_node or tasks) >= tasks:
        return None  # The scheduler gave each task its own.
    if seen % tasks:
        raise UserError(
            f"{tasks} processes on this node and {seen} GPUs, which do not divide: "
            "start one process a node (--ntasks-per-node=1), or one a GPU"
        )
    each = seen // tasks
    return tuple(range(task * each, (task + 1) * each))


def _tpu(wait_seconds: int) -> JobProcess | None:
    if not cloud_tpu_init.running_in_cloud_tpu_vm:
        chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
        if chips and os.environ.get("JAX_PLATFORMS") != "cpu":
            raise UserError(
                f"this machine has {chips} TPU chips but not libtpu: pip install -e "
                "'.[tpu]' in the clone, or set JAX_PLATFORMS=cpu to train without them"
            )
        return None
    if not clusters.GkeTpuCluster.is_env_present():
        vm, told_by = clusters.GceTpuCluster, "the metadata of this TPU VM"
        with _clear_errors(told_by):
            there = vm.is_env_present()
        return _from_cluster(vm, told_by, wait_seconds) if there else None
    with _clear_errors("TPU_WORKER_HOSTNAMES"):
        hosts = len(clusters.GkeTpuCluster._get_worker_list_in_slice())
    worker = os.environ.get("TPU_WORKER_ID")
    slices = _env_number("MEGASCALE_NUM_SLICES", 1)
    if hosts * slices == 1:
        return None
    if worker is None or not worker.isdecimal() or int(worker) >= hosts:
        raise UserError(
            f"TPU_WORKER_ID={worker!r} with {hosts} hosts in TPU_WORKER_HOSTNAMES: GKE "
            "sets both for pods that ask for google.com/tpu; do not set them yourself"
        )
    needed = ("MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
    missing = [name for name in needed if name not in os.environ]
    if slices > 1 and (missing or _env_number(needed[0], 0) >= slices):
        raise UserError(
            f"MEGASCALE_NUM_SLICES={slices} with MEGASCALE_SLICE_ID="
            f"{os.environ.get(needed[0])} and MEGASCALE_COORDINATOR_ADDRESS="
            f"{os.environ.get(needed[1])}: start the slices as one JobSet "
            "(launch/xpk.sh), which sets all three"
        )
    return _from_cluster(clusters.GkeTpuCluster, "GKE's TPU variables", wait_seconds)


def _kubernetes(wait_seconds: int) -> JobProcess | None:
    index = os.environ.get(_KUBERNETES_INDEX)
    if index is None or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            f"{_KUBERNETES_INDEX}={index}: a pod of an indexed Kubernetes job must know "
            "the others; set JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES as in "
            f"launch/jobset_gpu.yaml, or pip install kubernetes; {_ALONE}"
        )
    with _clear_errors("the Kubernetes API"):
        clusters.K8sCluster.is_env_present()  # It also logs in.
    return _from_cluster(clusters.K8sCluster, "Kubernetes", wait_seconds)


def _from_cluster(
    cluster, told_by: str, wait_seconds: int, gpus: tuple[int, ...] | None = None
) -> JobProcess:
    """Returns the job that one of the classes of `jax._src.clusters` finds."""
    with _clear_errors(told_by):
        count, process = cluster.get_process_count(), cluster.get_process_id()
        if count == 1:
            return JobProcess(told_by, "", 1, 0)
        address = cluster.get_coordinator_address(
            timeout_secs=wait_seconds,
            override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
        )
    return JobProcess(told_by, address, count, process, gpus)


@contextlib.contextmanager
def _clear_errors(told_by: str):
    """Converts exceptions, not warnings, of JAX's cluster classes to a UserError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except Exception as error:  # Of JAX, requests or kubernetes.
        raise UserError(
            f"the processes of this job cannot be found by {told_by} ({error}): mend "
            f"it, or set {', '.join(JAX_NAMES)}; {_ALONE}"
        ) from error


def _env_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(
            f"{name}={text!r} is not a whole number: leave it to the scheduler"
        )
    return int(text)


def _pass_by_proxies(address: str) -> None:
    """Excludes process 0 from the web proxies of gRPC."""
    if not any(name in os.environ for name in _PROXIES):
        return
    name = "no_grpc_proxy" if "no_grpc_proxy" in os.environ else "no_proxy"
    hosts = [os.environ.get(name, ""), address.rpartition(":")[0]]
    os.environ["no_grpc_proxy"] = ",".join(filter(None, hosts))
    jax.config.update("jax_check_proxy_envs", False)  # It warns of them.


def _wait_for_service(job: JobProcess, seconds: int) -> None:
    until, error = time.monotonic() + seconds, OSError()
    while time.monotonic() < until:
        try:
            return failures.connect(job.address)
        except OSError as failed:
            error = failed
        time.sleep(min(0.5, max(until - time.monotonic(), 0)))
    # An address that does not exist will not exist at the next start either.
    wrong = isinstance(error, socket.gaierror)
    raise (UserError if wrong else LostHost)(
        f"process {job.process} of {job.count} ({socket.gethostname()}) cannot reach "
        f"process 0 at {job.address} ({error.strerror or error}; tried for {seconds} "
        f"s; told by {job.told_by}): start process 0 there, open the port between the "
        f"hosts, or wait longer with {_START}"
    )


def _not_joined(job: JobProcess, seconds: int, until: float) -> tuple[int, str]:
    """Returns the exit code and reason if JAX aborts before all have joined."""
    crash_reporter.clear()
    own = f"process {job.process} of {job.count} ({socket.gethostname()})"
    if job.process and failures.service_is_gone(job.address):
        return EXIT_TRY_AGAIN, (
            f"process 0 of {job.count} at {job.address} died or was lost before "
            f"{own} had joined it: start the job again"
        )
    code, who = EXIT_USER_ERROR, "the others"
    if time.monotonic() > until - 1:  # Else JAX refused what it was told.
        code = EXIT_TRY_AGAIN
        if job.count == 2:
            who = f"process {1 - job.process} of 2"
    return code, (
        f"{own} did not come together with {who} at {job.address} in {seconds} s: see "
        f"JAX's message above; start {job.count} processes, each with a number of its "
        f"own (this was told by {job.told_by}), or wait longer with {_START}"
    )


def _check_port(job: JobProcess) -> None:
    port = int(job.address.rpartition(":")[2])
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("::", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # A host without IPv6: JAX raises later.
            raise UserError(
                f"port {port} of this host ({socket.gethostname()}) is taken: another "
                f"job runs here, or the last one has not ended yet; choose another port "
                f"for {job.address} (told by {job.told_by})"
            ) from error


def check_agreement(**kinds: Mapping[str, object]) -> None:
    """Checks that all processes of the job were started with the same values.

    All processes call it in the same order and wait for each other here; the watcher of
    `FailureBroadcast` ends the wait if one of them fails or is lost.

    Args:
      **kinds: "config", "code", "devices", "data", "weights", "preprocess" or
        "workdir" to the values that must be the same: key to a JSON value.

    Raises:
      UserError: processes differ; with the kind, the keys and each process's value.
    """
    count = failures.process_count()
    if count == 1:
        return
    folder, me = f"vit_jax/agreement/{next(_rounds)}", failures.process_index()
    failures.key_value_set(f"{folder}/values/{me}", json.dumps(kinds))
    if me == 0:
        while len(found := failures.key_value_dir_get(f"{folder}/values")) < count:
            time.sleep(_POLL_SECONDS)
        values = [json.loads(found[str(process)]) for process in range(count)]
        failures.key_value_set(
            f"{folder}/verdict/0", difference(values, failures.process_name)
        )
    while not (verdict := failures.key_value_dir_get(f"{folder}/verdict")):
        time.sleep(_POLL_SECONDS)
    if verdict["0"]:
        raise UserError(verdict["0"])


def difference(values: list[dict[str, dict]], who=str) -> str:
    """Describes in one line how the values of processes differ; "" if they do not.

    Args:
      values: for each process: kind to key to value.
      who: function from the index of a process to its name.
    """
    for kind in values[0]:
        texts = []
        for key in sorted({key for value in values for key in value[kind]}):
            holders = {}  # Value to the processes that have it.
            for process, value in enumerate(values):
                text = json.dumps(value[kind][key]) if key in value[kind] else "absent"
                holders.setdefault(text, []).append(process)
            if len(holders) > 1:
                held = (_held(text, where, who) for text, where in holders.items())
                texts.append(f"{key} is {', '.join(held)}")
        if texts:
            if (more := len(texts) - _MAX_KEYS) > 0:
                texts[_MAX_KEYS:] = [f"and {more} more keys"]
            return f"the hosts differ in {kind}: {'; '.join(texts)}: {_REMEDIES[kind]}"
    return ""


def _held(text: str, holders: list[int], who) -> str:
    names = ", ".join(who(process) for process in holders[:_MAX_PROCESSES])
    if (more := len(holders) - _MAX_PROCESSES) > 0:
        names += f" and {more} others"
    text = text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
    return f"{text} on {names}"

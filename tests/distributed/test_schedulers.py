"""What each scheduler's variables make of a process; JAX's own classes read them."""

import http.server
import os
import socket
import sys
import threading
import types

import pytest
from jax._src import cloud_tpu_init
from jax._src.clusters import cloud_tpu_cluster

from vit_jax.distributed import schedulers
from vit_jax.distributed.schedulers import JobProcess
from vit_jax.errors import UserError

STATED = {
    "JAX_COORDINATOR_ADDRESS": "host0:1234",
    "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4321",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SLURM_PORT = 4321 % 4096 + 61440  # As JAX chooses it.
MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
GKE = {"TPU_WORKER_HOSTNAMES": "localhost,t1,t2", "TPU_WORKER_ID": "1"}
SLICES = GKE | {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}


@pytest.fixture
def surroundings(monkeypatch):
    """Sets variables, after all that a scheduler may have set for the tests."""
    prefixes = ("JAX_", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JOB_")
    for name in list(os.environ):
        if name.startswith((*prefixes, "VIT_JAX_", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)

    def put(variables, *, tpu=False):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for module in (cloud_tpu_init, cloud_tpu_cluster):
            monkeypatch.setattr(module, "running_in_cloud_tpu_vm", tpu)

    return put


@pytest.fixture
def metadata():
    """Serves the metadata of a TPU VM: names to texts."""
    texts = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = texts.get(self.path.rsplit("/", 1)[1])
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield texts, f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


ALONE = {"JAX_NUM_PROCESSES": "1"}


@pytest.mark.parametrize(
    ("variables", "tpu"),
    [
        ({}, False),
        *((variables | ALONE, False) for variables in (STATED, SLURM, MPI, POD)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NNODES": "2"}, False),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, True),
    ],
)
def test_one_process_is_alone(surroundings, variables, tpu):
    surroundings(variables, tpu=tpu)
    assert schedulers.find_job() is None


def test_the_three_variables_of_jax_come_first(surroundings):
    job = JobProcess("JAX_COORDINATOR_ADDRESS", "host0:1234", 3, 2)
    surroundings(SLURM | STATED)
    assert schedulers.find_job() == job
    # A pod of an indexed job takes its index as its number.
    surroundings(POD | STATED)
    os.environ.pop("JAX_PROCESS_ID")
    assert schedulers.find_job() == job


def test_a_host_finds_itself_in_the_list_by_name_and_by_address(surroundings):
    here, name = socket.gethostname(), "VIT_JAX_HOSTS"
    surroundings({name: f"198.51.100.1:999, 198.51.100.2,{here}"})
    assert schedulers.find_job() == JobProcess(name, "198.51.100.1:999", 3, 2)
    surroundings({name: "198.51.100.1,127.0.0.1"})
    assert schedulers.find_job() == JobProcess(name, "198.51.100.1:8476", 2, 1)


def test_the_number_says_which_of_two_entries_of_one_host(surroundings):
    both = {"VIT_JAX_HOSTS": "127.0.0.1:99,localhost"}
    surroundings(both)
    with pytest.raises(UserError, match="VIT_JAX_HOSTS.*is several of them.*PROCESS_"):
        schedulers.find_job()
    surroundings(both | {"JAX_PROCESS_ID": "1"})
    assert schedulers.find_job() == JobProcess("VIT_JAX_HOSTS", "127.0.0.1:99", 2, 1)


def test_a_task_of_slurm_with_the_gpus_that_are_its_own(surroundings):
    address = f"node07:{SLURM_PORT}"
    surroundings(SLURM)
    assert schedulers.find_job() == JobProcess("SLURM", address, 5, 3, (1,))
    # Two tasks share the node's 8.
    surroundings({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert schedulers.find_job() == JobProcess("SLURM", address, 5, 3, (4, 5, 6, 7))
    # Each was given one.
    surroundings({"CUDA_VISIBLE_DEVICES": "1"})
    assert schedulers.find_job().gpus is None
    # The last node has one task, which takes all 8 (JAX would take the first).
    last = {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    surroundings(last | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert schedulers.find_job() == JobProcess("SLURM", address, 5, 4, None)


def test_open_mpi(surroundings):
    surroundings(MPI)
    job = schedulers.find_job()
    assert (job.source, job.count, job.process) == ("Open MPI", 4, 3)
    assert job.address.startswith("10.96.0.1:")
    assert job.gpus == (1,)


def test_gke_tells_the_hosts_of_a_slice_and_of_several(surroundings, metadata):
    texts, address = metadata  # Asked whether there are other slices.
    texts["tpu-env"] = ""
    surroundings(GKE | {"GCE_METADATA_IP": address, "no_proxy": "*"}, tpu=True)
    source = "GKE's TPU variables"
    assert schedulers.find_job() == JobProcess(source, "localhost:8482", 3, 1)
    surroundings(SLICES, tpu=True)
    assert schedulers.find_job() == JobProcess(source, "localhost:8482", 6, 4)
    surroundings(GKE | {"MEGASCALE_NUM_SLICES": "1"}, tpu=True)
    assert schedulers.find_job().count == 3


def test_a_tpu_vm_is_source_its_metadata(surroundings, metadata):
    texts, address = metadata
    texts["agent-worker-number"] = "1"
    texts["worker-network-endpoints"] = "a:0:127.0.0.1,b:1:127.0.0.2"
    texts["tpu-env"] = "ACCELERATOR_TYPE: 'v5litepod-16'"
    surroundings({"GCE_METADATA_IP": address, "no_proxy": "*"}, tpu=True)
    source = "the metadata of this TPU VM"
    assert schedulers.find_job() == JobProcess(source, "127.0.0.1:8482", 2, 1)
    texts["tpu-env"] = (
        "MEGASCALE_NUM_SLICES: '3'\nMEGASCALE_SLICE_ID: '2'\n"
        "MEGASCALE_COORDINATOR_ADDRESS: '127.0.0.3:8080'"
    )
    assert schedulers.find_job() == JobProcess(source, "127.0.0.3:8482", 6, 5)


def test_metadata_that_cannot_be_understood_are_named(surroundings, metadata):
    texts, address = metadata
    texts |= {"agent-worker-number": "first", "worker-network-endpoints": "a,b"}
    texts["tpu-env"] = ""
    surroundings({"GCE_METADATA_IP": address, "no_proxy": "*"}, tpu=True)
    with pytest.raises(UserError, match=r"metadata of this TPU VM \(.*'first'\)"):
        schedulers.find_job()


def test_chips_without_their_library_are_named(surroundings, monkeypatch):
    surroundings({})
    found = types.SimpleNamespace(num_available_tpu_chips_and_device_id=lambda: (4, 0))
    monkeypatch.setattr(schedulers, "hardware_utils", found)
    with pytest.raises(UserError, match=r"4 TPU chips but not libtpu: pip install"):
        schedulers.find_job()


HOST_LIST = {"VIT_JAX_HOSTS": "198.51.100.1,198.51.100.2"}
WRONG = [
    (
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "0"},
        "not JAX_NUM_PROCESSES",
    ),
    (STATED | {"JAX_PROCESS_ID": "3"}, "JAX_PROCESS_ID='3'"),
    (STATED | {"JAX_COORDINATOR_ADDRESS": "host0"}, "'host0'.*COORDINATOR_ADDRESS"),
    (
        STATED | {"JAX_COORDINATOR_ADDRESS": "a:99999"},
        "'a:99999'.* from JAX_COORDINATOR",
    ),
    (STATED | {"VIT_JAX_HOSTS": "a,b"}, "VIT_JAX_HOSTS and JAX_.* both set"),
    ({"VIT_JAX_HOSTS": "a,,b"}, "VIT_JAX_HOSTS='a,,b': list the hosts"),
    ({"VIT_JAX_HOSTS": "localhost:x,b"}, "'localhost:x'.* from VIT_JAX_HOSTS"),
    ({"VIT_JAX_HOSTS": "localhost:0,x"}, "'localhost:0'.* from VIT_JAX_HOSTS"),
    (HOST_LIST, r"this host \(.*\) is not among them"),
    (HOST_LIST | {"JAX_PROCESS_ID": "2"}, "PROCESS_ID='2': .* 0 to 1; .*HOSTS=198"),
    ({"SLURM_NNODES": "2"}, "SLURM_NNODES=2 .*srun"),
    (SLURM | {"JAX_COORDINATOR_PORT": "abc"}, "'node07:abc'.* from SLURM"),
    (SLURM | {"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4 .*contradict"),
    (SLURM | {"SLURM_PROCID": "5"}, "'5': .* 0 to 4; SLURM_STEP_NUM_TASKS=5"),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS='x'"),
    (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "2 processes on this node and 3 GPUs"),
    (
        SLURM | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"},
        "2 processes on this node and 1 GPUs",
    ),
    (
        {name: value for name, value in SLURM.items() if not name.endswith("NODELIST")},
        "not SLURM_STEP_NODELIST: .*srun",
    ),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "SIZE=2: with Open MPI 5 JAX needs mpi4py"),
    (POD, "JOB_COMPLETION_INDEX=2.*JAX_COORDINATOR_ADDRESS"),
]


@pytest.mark.parametrize(("variables", "message"), WRONG)
def test_what_is_missing_or_contradictory_is_named(
    surroundings, monkeypatch, variables, message
):
    for name in ("mpi4py", "kubernetes"):  # Not installed.
        monkeypatch.delitem(sys.modules, name, raising=False)
    surroundings(variables)
    with pytest.raises(UserError, match=message):
        schedulers.find_job()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"TPU_WORKER_ID": "3"}, "TPU_WORKER_ID='3': .* 0 to 2"),
        ({"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID='x': .* 0 to 2"),
        ({"MEGASCALE_SLICE_ID": "2"}, "SLICE_ID='2': .* 0 to 1; .*NUM_SLICES=2"),
    ],
)
def test_wrong_variables_of_a_slice_are_named(surroundings, change, message):
    surroundings(SLICES | change, tpu=True)
    with pytest.raises(UserError, match=message):
        schedulers.find_job()


def test_a_coordinator_of_unknown_name_is_named(surroundings):
    far = {"MEGASCALE_COORDINATOR_ADDRESS": "no.such.invalid"}
    surroundings(SLICES | far, tpu=True)
    with pytest.raises(UserError, match=r"coordinator address no\.such\.invalid"):
        schedulers.find_job(wait_seconds=0)

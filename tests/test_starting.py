"""Starting as one of several: what goes wrong ends with one line, what is right trains.

Every case is a process; those of schedulers are started as they start them.
"""

import re
import socket
import time

import hosts
import pytest

pytestmark = pytest.mark.slow

DIGITS = ("--config=configs/digits.py:quick",)
SLURM = {
    "SLURM_JOB_ID": "4321",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    # As for one process a GPU: of no meaning here, but it goes the same way.
    "CUDA_VISIBLE_DEVICES": "0,1",
}
RECIPE = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 4, 12
    c.data = dict(name="synthetic", num_classes=5, num_examples=37, image_size=(8, 12))
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.1)
    c.log_every_steps = 1
    return c
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "tiny.py"
    path.write_text(RECIPE)
    return f"--config={path}"


def slurm(host):
    rank = {"SLURM_PROCID": str(host), "SLURM_LOCALID": str(host)}
    return SLURM | rank | {"JAX_COORDINATOR_PORT": slurm.port}


def listed(host):
    names = f"127.0.0.1:{listed.port},localhost"
    return {"VIT_JAX_HOSTS": names, "JAX_PROCESS_ID": str(host)}


def gke(host):
    # JAX takes this machine for a TPU VM; its computations stay on the CPU.
    return {
        "JAX_FORCE_TPU_INIT": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": str(host),
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
        "JAX_COORDINATOR_PORT": gke.port,
    }


@pytest.mark.parametrize("scheduler", [slurm, listed, gke])
def test_two_processes_find_each_other(recipe, tmp_path, scheduler):
    scheduler.port = str(hosts.free_port())
    words = (recipe, f"--workdir={tmp_path / 'run'}")
    processes = hosts.start(words, 2, scheduler, fork=scheduler is listed)
    try:
        line = hosts.wait_for(processes[0], "steps of 12 on")
        assert "on 2 x cpu" in line
        codes, errors = hosts.ends(processes)
        assert codes == [0, 0], errors
    finally:
        hosts.kill(processes)


WRONG = {
    "some of three": (
        {"JAX_NUM_PROCESSES": "2"},
        "set but not .*JAX_COORDINATOR_ADDRESS",
    ),
    "no srun": ({"SLURM_NNODES": "2"}, "SLURM_NNODES=2 .*srun"),
    "hosts": ({"VIT_JAX_HOSTS": "198.51.100.1,198.51.100.2"}, "is not among them"),
    "seconds": ({"VIT_JAX_START_SECONDS": "5s"}, "VIT_JAX_START_SECONDS='5s': "),
    "nobody there": (
        {
            "JAX_COORDINATOR_ADDRESS": "localhost:9",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "1",
            "VIT_JAX_START_SECONDS": "2",
        },
        r"process 1 of 2 \(.*\) cannot reach process 0 at localhost:9 \(Connection re",
    ),
    "no such host": (
        {"VIT_JAX_HOSTS": "no.such.invalid,localhost", "VIT_JAX_START_SECONDS": "2"},
        r"process 0 at no\.such\.invalid:8476 \(.*; tried for 2 s; from VIT_JAX_HO",
    ),
}


def test_what_is_wrong_ends_every_process_with_one_line():
    processes = hosts.start(DIGITS, len(WRONG), lambda i: [*WRONG.values()][i][0])
    codes, errors = hosts.ends(processes)
    # Process 0 may come at the next start.
    assert codes == [75 if name == "nobody there" else 2 for name in WRONG], errors
    for (_, message), error in zip(WRONG.values(), errors, strict=True):
        (line,) = error.splitlines()
        assert re.match(f"error: .*{message}", line)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        names = {"VIT_JAX_HOSTS": f"localhost:{port},198.51.100.1"}
        (code,), (error,) = hosts.ends(hosts.start(DIGITS, 1, lambda _: names))
    assert code == 2
    assert f"error: port {port} of this host ({socket.gethostname()}) is taken" in error


def test_too_few_processes_do_not_wait_for_ever(recipe, tmp_path):
    environment = hosts.variables(3, VIT_JAX_START_SECONDS="8")
    words = (recipe, f"--workdir={tmp_path / 'run'}")
    processes = hosts.start(words, 2, environment)
    began = time.monotonic()
    codes, errors = hosts.ends(processes)
    assert time.monotonic() - began < 60
    assert codes == [75, 75], errors
    for host, error in enumerate(errors):
        last = error.splitlines()[-1]
        assert last.startswith(
            f"error: process {host} of 3 ({socket.gethostname()}) did"
        )
        assert "start 3 processes" in last
    assert not (tmp_path / "run").exists()


def test_the_one_of_two_that_does_not_come_is_named(recipe, tmp_path):
    words = (recipe, f"--workdir={tmp_path / 'run'}")
    processes = hosts.start(words, 1, hosts.variables(2, VIT_JAX_START_SECONDS="4"))
    (code,), (error,) = hosts.ends(processes)
    assert code == 75, error
    assert "did not come together with process 1 of 2 at " in error.splitlines()[-1]


def test_several_processes_need_a_workdir(recipe):
    codes, errors = hosts.ends(hosts.start((recipe,), 2, hosts.variables(2)))
    assert codes == [2, 2], errors
    assert all("several processes need the same --workdir" in text for text in errors)

"""Starting as one of several: what goes wrong or differs ends with one line, else it trains.

Every case is a process; those of schedulers are started as they start them.
"""

import re
import socket
import time

import hosts
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from PIL import Image

from vit_jax.distributed import agreement
from vit_jax.training import config as configuration
from vit_jax.training import resume_check

DIGITS = ("--config=configs/digits.py:quick",)
FOLDER = (
    'c.data = dict(name="folder", num_classes=2, image_size=(12, 12))',
    'c.data.train_transform = c.data.eval_transform = "resize"',
)
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


@pytest.fixture
def words(tmp_path):
    recipe = hosts.write_recipe(tmp_path / "tiny.py")
    return f"--config={recipe}", f"--workdir={tmp_path / 'run'}"


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


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [slurm, listed, gke])
def test_two_processes_find_each_other(words, scheduler):
    scheduler.port = str(hosts.free_port())
    processes = hosts.start(words, 2, scheduler, fork=scheduler is listed)
    assert "on 2 x cpu" in hosts.wait_for(processes[0], "steps of 12 on")
    hosts.ends(processes, 0)


WRONG = [  # Variables, exit code and message.
    ({"JAX_NUM_PROCESSES": "2"}, 2, "set but not .*JAX_COORDINATOR_ADDRESS"),
    ({"SLURM_NNODES": "2"}, 2, "SLURM_NNODES=2 .*srun"),
    ({"VIT_JAX_HOSTS": "198.51.100.1,198.51.100.2"}, 2, "is not among them"),
    ({"VIT_JAX_START_SECONDS": "5s"}, 2, "VIT_JAX_START_SECONDS='5s': "),
    (
        {
            "JAX_COORDINATOR_ADDRESS": "localhost:9",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "1",
            "VIT_JAX_START_SECONDS": "2",
        },
        75,  # Process 0 may come at the next start.
        r"process 1 of 2 \(.*\) cannot reach process 0 at localhost:9 \(Connection re",
    ),
    (
        {"VIT_JAX_HOSTS": "no.such.invalid,localhost", "VIT_JAX_START_SECONDS": "2"},
        2,
        r"process 0 at no\.such\.invalid:8476 \(.*; tried for 2 s; from VIT_JAX_HO",
    ),
]


@pytest.mark.slow
def test_what_is_wrong_ends_every_process_with_one_line():
    processes = hosts.start(DIGITS, len(WRONG), lambda i: WRONG[i][0])
    errors = hosts.ends(processes, *(code for _, code, _ in WRONG))
    for (_, _, message), error in zip(WRONG, errors, strict=True):
        (line,) = error.splitlines()
        assert re.match(f"error: .*{message}", line)


@pytest.mark.slow
def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        names = {"VIT_JAX_HOSTS": f"localhost:{port},198.51.100.1"}
        (error,) = hosts.ends(hosts.start(DIGITS, 1, lambda _: names), 2)
    assert f"error: port {port} of this host ({socket.gethostname()}) is taken" in error


@pytest.mark.slow
def test_too_few_processes_do_not_wait_for_ever(words, tmp_path):
    began = time.monotonic()
    environment = hosts.variables(3, VIT_JAX_START_SECONDS="8")
    errors = hosts.ends(hosts.start(words, 2, environment), 75)
    assert time.monotonic() - began < 60
    for host, error in enumerate(errors):
        last = error.splitlines()[-1]
        who = f"error: process {host} of 3 ({socket.gethostname()}) did"
        assert last.startswith(who)
        assert "start 3 processes" in last
    environment = hosts.variables(2, VIT_JAX_START_SECONDS="4")
    (error,) = hosts.ends(hosts.start(words, 1, environment), 75)
    assert "did not come together with process 1 of 2 at " in error.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_several_processes_need_a_workdir(words):
    errors = hosts.ends(hosts.start(words[:1], 2), 2)
    assert all("several processes need the same --workdir" in text for text in errors)


@pytest.fixture
def differing(tmp_path):
    """Starts two hosts, each with its words; checks that both name both; returns the lines."""
    recipe = hosts.write_recipe(tmp_path / "pair.py", *FOLDER)
    for host in range(2):
        for i in range(6):
            path = tmp_path / f"host{host}" / "train" / f"c{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 8), (i, 40 * i, 9)).save(path)

    def start(*words):
        def own(host):
            place = f"--config.data.data_dir={tmp_path / f'host{host}'}"
            files = f"--config={recipe}", f"--workdir={tmp_path / 'run'}"
            return [*files, place, *words[host]]

        processes = hosts.start(own, 2)
        errors = hosts.ends(processes, 2, seconds=100)
        assert not any("Traceback" in text for text in errors), errors
        assert not list(tmp_path.glob("run/checkpoints/*"))
        lines = [text.splitlines()[-1] for text in errors]
        for line in lines:
            for host, process in enumerate(processes):
                here = f"({socket.gethostname()}, pid {process.pid})"
                assert f"process {host} of 2 {here}" in line
        return lines

    return start


@pytest.mark.slow
def test_another_config_or_workdir_is_named_before_anything_is_compiled(
    differing, tmp_path
):
    # How fast a host reads is its own matter.
    own = ("data.num_workers=1", "mesh.fsdp=2", "optim.learning_rate=0.2")
    for line in differing((), [f"--config.{key}" for key in own]):
        assert "the hosts differ in config: mesh.fsdp is 1 on process 0" in line
        assert "optim.learning_rate is 0.1 on process 0" in line
        assert "data." not in line
    for line in differing((), (f"--workdir={tmp_path / 'other'}",)):
        assert f'--workdir is "{tmp_path / "run"}" on process 0' in line
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_other_weights_images_and_captions_are_named(differing, tmp_path):
    model = configuration.load(str(tmp_path / "pair.py"), {}).build_model()
    shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0)), sep="/")
    words = []
    for host in range(2):
        rng, path = np.random.default_rng(host), tmp_path / f"{host}.npz"
        np.savez(path, **{k: rng.normal(size=x.shape) for k, x in shapes.items()})
        words.append([f"--config.init={path}", "--config.init.head=keep"])
    for line in differing(*words):
        assert "the hosts differ in weights: sha256 is " in line

    for path in tmp_path.glob("host*/train/*/*.png"):
        path.with_suffix(".txt").write_text(f"picture {path.stem}")
    path.with_suffix(".txt").write_text("picture x")
    keys = ["task.name=contrastive", "data.caption_key=txt", "data.tokenizer=bytes"]
    keys += ["data.num_tokens=16", "task.text.width=12", "task.text.num_heads=3"]
    keys += ["task.text.depth=1", "task.text.mlp_dim=20"]
    for line in differing(*2 * [[f"--config.{key}" for key in keys]]):
        assert "the hosts differ in data: train " in line

    path = tmp_path / "host1" / "train" / "c1" / "5.png"
    path.rename(path.with_name("6.png"))
    for line in differing((), ()):
        assert "the hosts differ in data: train " in line
        assert "train names_sha256 is " in line


def test_what_is_compared_is_what_decides_the_program(tmp_path, monkeypatch):
    recipe = str(hosts.write_recipe(tmp_path / "pair.py", *FOLDER))
    seen = {}
    monkeypatch.setattr(agreement, "check_agreement", seen.update)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    resume_check.check_hosts(configuration.load(recipe, {}))
    keys = set(seen["config"])
    assert {"mesh.fsdp", "model.scan", "eval_every_steps", "debug_nans"} <= keys
    own = {"init.checkpoint", "data.data_dir", "data.num_workers"}
    assert not (own | {"compilation_cache_dir"}) & keys
    assert seen["devices"] == {"count": 8, "kind": "cpu"}
    assert seen["code"]["jax"] == jax.__version__
    own = {"data.data_dir": "/elsewhere", "local_checkpoint.dir": "/d"}
    before = dict(seen)
    own |= {"data.num_threads": 9}
    resume_check.check_hosts(configuration.load(recipe, own))
    assert seen == before

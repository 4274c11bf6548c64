"""Two hosts that save on their own disks: killed, one disk lost, and started again."""

import json
import re
import shutil
import subprocess

import hosts
import pytest

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 24, 12
    c.data = dict(name="synthetic", num_classes=8, num_examples=37, image_size=(8, 12))
    c.data.train_transform = "random_crop | flip | mixup(0.3)"
    c.model = dict(variant="Ti/4", width=24, depth=1, num_heads=3, mlp_dim=40)
    c.model.dropout = 0.1
    c.optim = dict(learning_rate=0.01)
    c.sharding = dict(min_size=1)
    c.evals = dict(val="val")
    c.log_every_steps = 1; c.checkpoint_every_steps = 12
    c.local_checkpoint = dict(dir="$OWN_DISK/checkpoints", every_steps=3)
    return c
"""
MESHES = {"data": ("--config.mesh.fsdp=1",), "fsdp": ("--config.mesh.fsdp=-1",)}
MESHES["fsdp"] += ("--config.mesh.data=1",)


@pytest.fixture
def start(tmp_path):
    """Starts two hosts, each with its disk."""
    (tmp_path / "own.py").write_text(CONFIG)
    processes = []

    def start(workdir, *words):
        for host in range(2):
            (tmp_path / f"disk{host}").mkdir(exist_ok=True)
        known = hosts.variables(2, XLA_FLAGS=hosts.xla_flags(2))
        words = *words, f"--config={tmp_path / 'own.py'}", f"--workdir={workdir}"
        pair = hosts.start(
            words,
            2,
            lambda host: known(host) | {"OWN_DISK": str(tmp_path / f"disk{host}")},
            stderr=subprocess.STDOUT,
        )
        processes.extend(pair)
        return pair

    yield start
    hosts.kill(processes)


def kill_after(pair, part):
    hosts.wait_for(pair[0], part)
    hosts.kill(pair)


def finish(pair):
    outs = [process.communicate(timeout=200)[0] for process in pair]
    assert [p.returncode for p in pair] == [0, 0], outs
    return outs


def sha256_of(workdir):
    return json.loads((workdir / "report.json").read_text())["params_sha256"]


@pytest.mark.slow
def test_a_host_that_lost_its_disk_is_given_its_parts_by_the_other(start, tmp_path):
    finish(start(tmp_path / "undisturbed", *MESHES["data"]))
    assert not list(tmp_path.glob("disk*/checkpoints/*/*/*"))  # Done: all is removed.

    workdir = tmp_path / "run"
    kill_after(start(workdir, *MESHES["data"]), "step 10/24")
    assert not (workdir / "checkpoints" / "12").exists()
    # The step of the kill, or the one before: the other's write may have been cut off.
    shutil.rmtree(tmp_path / "disk0")
    first, _ = finish(start(workdir, *MESHES["data"]))
    assert re.search("resume: step [69] of local disks", first)
    assert (
        "process 0 had nothing on its disk: received its parts from the others" in first
    )
    assert sha256_of(workdir) == sha256_of(tmp_path / "undisturbed")


@pytest.mark.slow
def test_parts_that_nobody_else_holds_send_the_job_back_to_the_workdir(start, tmp_path):
    finish(start(tmp_path / "undisturbed", *MESHES["fsdp"]))
    workdir = tmp_path / "run"
    kill_after(start(workdir, *MESHES["fsdp"]), "step 20/24")
    # Each disk has half of the parameters.
    shutil.rmtree(tmp_path / "disk1")
    first, _ = finish(start(workdir, *MESHES["fsdp"]))
    assert re.search(
        r"step (15|18) is on local disks, but not the parts of process 1", first
    )
    assert "resume: step 12 of" in first
    assert sha256_of(workdir) == sha256_of(tmp_path / "undisturbed")

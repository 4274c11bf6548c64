"""Two processes that train together, as two hosts do."""

import json
import signal
import subprocess
import time

import hosts
import jax
import numpy as np
import pytest

from vit_jax.weights import workdir as workdirs

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 8, 12
    c.data = dict(name="synthetic", num_classes=5, num_examples=37, image_size=(8, 12))
    c.data.train_transform = "random_crop | flip | mixup(0.3)"
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    # Not Adam: it blows up the rounding of gradients that are 0 but for it (the bias
    # of the keys, which the softmax cancels).
    c.optim = dict(name="sgd", learning_rate=0.1, grad_accum_steps=2)
    c.evals = dict(val="val")
    c.log_every_steps = 1; c.eval_every_steps = 4; c.checkpoint_every_steps = 4
    return c
"""


def start(config, workdir, count, devices, *words, fork=True):
    words = f"--config={config}", f"--workdir={workdir}", *words
    environment = hosts.variables(count, XLA_FLAGS=hosts.xla_flags(devices))
    return hosts.start(words, count, environment, fork=fork, stderr=subprocess.STDOUT)


def finish(processes, code=0):
    outs = [process.communicate(timeout=200)[0] for process in processes]
    assert [p.returncode for p in processes] == [code] * len(processes), outs
    return outs


def report(workdir):
    return json.loads((workdir / "report.json").read_text())


def assert_same(one, two):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        workdirs.load(one, use_ema=False).params,
        workdirs.load(two, use_ema=False).params,
    )
    a, b = report(one)["final"]["val"]["params"], report(two)["final"]["val"]["params"]
    assert a["examples"] == b["examples"] == 37
    assert abs(a["loss"] - b["loss"]) < 1e-5


@pytest.mark.slow
def test_two_hosts_train_to_the_parameters_of_one(tmp_path):
    config = tmp_path / "pair.py"
    config.write_text(CONFIG)
    finish(start(config, tmp_path / "one", 1, 1))
    # Ended after the evaluation of step 4, and gone on from the checkpoint there.
    part = start(config, tmp_path / "two", 2, 3)
    hosts.wait_for(part[0], "step 5/8")
    hosts.kill(part)
    # New interpreters, whose sets of strings have different orders.
    two = start(config, tmp_path / "two", 2, 3, fork=False)
    first, second = finish(two)
    assert "resume: step 4 of" in first
    assert report(tmp_path / "two")["devices"] == 6
    assert_same(tmp_path / "one", tmp_path / "two")
    # Only the first process prints and writes.
    assert "step 8/8" in first
    assert "step" not in second
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]


@pytest.mark.slow
def test_hosts_that_split_parameters_and_layers_train_as_one(tmp_path):
    config = tmp_path / "pair.py"
    config.write_text(CONFIG.replace("mlp_dim=20", "mlp_dim=21"))
    words = ("--config.sharding.min_size=10", "--config.mesh.data=1")
    finish(start(config, tmp_path / "one", 1, 1, *words))
    split = ("--config.mesh.fsdp=2", "--config.mesh.model=3")
    # Every parameter is on both hosts in part, every layer on three devices of each.
    finish(start(config, tmp_path / "two", 2, 3, *words, *split))
    assert_same(tmp_path / "one", tmp_path / "two")
    # Every layer is on three hosts in part, which load the same images.
    finish(start(config, tmp_path / "three", 3, 1, *words, split[1]))
    assert_same(tmp_path / "one", tmp_path / "three")


@pytest.mark.slow
def test_sigterm_to_one_host_ends_both_at_the_same_step_and_they_resume(tmp_path):
    config = tmp_path / "pair.py"
    config.write_text(CONFIG.replace("3, 8, 12", "3, 20_000, 12"))
    words = ("--config.log_every_steps=100", "--config.eval_every_steps=0")
    words += ("--config.checkpoint_every_steps=100000",)
    processes = start(config, tmp_path / "two", 2, 1, *words)
    hosts.wait_for(processes[0], "step 100/")
    processes[1].send_signal(signal.SIGTERM)
    asked = time.monotonic()
    outs = finish(processes, code=75)
    assert time.monotonic() - asked < 60
    (step,) = {out.split("SIGTERM: step ")[1].split()[0] for out in outs}
    resumed = start(config, tmp_path / "two", 2, 1, *words)
    hosts.wait_for(resumed[0], f"resume: step {step} of")
    hosts.kill(resumed)

"""Hosts that were started with different things end at once, with what differs."""

import hosts
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from PIL import Image

from vit_jax import models
from vit_jax.config import fields
from vit_jax.distributed import multihost
from vit_jax.training import config as configuration
from vit_jax.training import resume_check

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 8, 12
    c.data = dict(name="folder", num_classes=2, image_size=(12, 12), eval_transform="resize")
    c.data.train_transform = "resize"
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.1)
    return c
"""


@pytest.fixture
def job(tmp_path):
    """Starts two hosts, each with its words; returns the last line of each."""
    (tmp_path / "pair.py").write_text(CONFIG)
    for host in range(2):
        for i in range(6):
            path = tmp_path / f"host{host}" / "train" / f"c{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 8), (i, 40 * i, 9)).save(path)
    started = []

    def start(*words):
        environment = hosts.variables(2)
        for host in range(2):
            own = [f"--config={tmp_path / 'pair.py'}", f"--workdir={tmp_path / 'run'}"]
            own += [f"--config.data.data_dir={tmp_path / f'host{host}'}", *words[host]]
            started.extend(hosts.start(own, 1, lambda _, host=host: environment(host)))
        codes, errors = hosts.ends(started[-2:], seconds=100)
        assert codes == [2, 2], errors
        assert not any("Traceback" in text for text in errors), errors
        assert not list(tmp_path.glob("run/checkpoints/*"))
        return [text.splitlines()[-1] for text in errors], started[-2:]

    yield start
    hosts.kill(started)


def assert_names_both(lines, processes):
    for line in lines:
        for host, process in enumerate(processes):
            assert f"process {host} of 2 ({hosts.socket.gethostname()}, pid" in line
            assert f"pid {process.pid})" in line


@pytest.mark.slow
def test_another_config_is_named_by_its_keys_before_anything_is_compiled(job):
    # How fast a host reads is its own matter.
    own = (
        "--config.data.num_workers=1",
        "--config.mesh.fsdp=2",
        "--config.optim.learning_rate=0.2",
    )
    lines, processes = job((), own)
    assert_names_both(lines, processes)
    for line in lines:
        assert "the hosts differ in config: mesh.fsdp is 1 on process 0" in line
        assert "optim.learning_rate is 0.1 on process 0" in line
        assert "data." not in line


@pytest.mark.slow
def test_other_images_and_other_weights_are_named(job, tmp_path):
    config = configuration.load(str(tmp_path / "pair.py"), {})
    data = config.data
    model = models.create(
        **fields.to_dict(config.model),
        num_classes=2,
        image_size=data.image_size,
        channels=3,
    )
    shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0)), sep="/")
    words = []
    for host in range(2):
        rng, path = np.random.default_rng(host), tmp_path / f"{host}.npz"
        np.savez(path, **{k: rng.normal(size=x.shape) for k, x in shapes.items()})
        words.append([f"--config.init={path}", "--config.init.head=keep"])
    lines, processes = job(*words)
    assert_names_both(lines, processes)
    assert all("the hosts differ in weights: sha256 is " in line for line in lines)

    path = tmp_path / "host1" / "train" / "c1" / "5.png"
    path.rename(path.with_name("6.png"))
    lines, processes = job((), ())
    assert_names_both(lines, processes)
    assert all("the hosts differ in data: train " in line for line in lines)
    assert all("train names_sha256 is " in line for line in lines)


@pytest.mark.slow
def test_other_captions_are_named(job, tmp_path):
    for path in tmp_path.glob("host*/train/*/*.png"):
        path.with_suffix(".txt").write_text(f"picture {path.stem}")
    path.with_suffix(".txt").write_text("picture x")
    words = ["--config.task.name=contrastive", "--config.data.caption_key=txt"]
    words += ["--config.data.tokenizer=bytes", "--config.data.num_tokens=16"]
    words += [f"--config.task.text.{key}" for key in ("width=12", "num_heads=3")]
    words += ["--config.task.text.depth=1", "--config.task.text.mlp_dim=20"]
    lines, processes = job(words, words)
    assert_names_both(lines, processes)
    assert all("the hosts differ in data: train " in line for line in lines)


@pytest.mark.slow
def test_another_workdir_is_named(job, tmp_path):
    lines, processes = job((), (f"--workdir={tmp_path / 'other'}",))
    assert_names_both(lines, processes)
    for line in lines:
        assert f'--workdir is "{tmp_path / "run"}" on process 0' in line
    assert not (tmp_path / "other").exists()


def test_what_is_compared_is_what_decides_the_program(tmp_path, monkeypatch):
    (tmp_path / "pair.py").write_text(CONFIG)
    seen = {}
    monkeypatch.setattr(multihost, "check_agreement", seen.update)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = configuration.load(str(tmp_path / "pair.py"), {})
    resume_check.check_hosts(config)
    keys = set(seen["config"])
    assert {"mesh.fsdp", "model.scan", "eval_every_steps", "debug_nans"} <= keys
    assert (
        not {
            "init.checkpoint",
            "data.data_dir",
            "data.num_workers",
            "compilation_cache_dir",
        }
        & keys
    )
    assert seen["devices"] == {"count": 8, "kind": "cpu"}
    assert seen["code"]["jax"] == jax.__version__
    own = {
        "data.data_dir": "/elsewhere",
        "local_checkpoint.dir": "/d",
        "data.num_threads": 9,
    }
    before = dict(seen)
    resume_check.check_hosts(configuration.load(str(tmp_path / "pair.py"), own))
    assert seen == before

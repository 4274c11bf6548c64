"""What tests share: recipes, a complete config, an image, what is done with a finished run."""

import ast
import collections
import contextlib
import json
import math
import os
import pathlib
import re
import resource
import shlex
import shutil
import struct
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.__main__ import load
from vit_jax.command_line import cli
from vit_jax.config import fields
from vit_jax.data import pipeline
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.models import stacking
from vit_jax.training import config as configuration
from vit_jax.training import loop, metric_writer, step, sweep, train_setup, train_state
from vit_jax.training.checkpoint import Checkpointer
from vit_jax.weights import Pretrained, export

ROOT = pathlib.Path(__file__).parent.parent
RECIPES = sorted(
    path.stem
    for path in (ROOT / "configs").glob("*.py")
    if path.stem not in ("__init__", "common")
)

# Recipes whose step has the task, network and optimiser of another's, with that one: only
# numbers differ. tests/tools/planning/test_exchanges.py holds that.
ALIKE = {
    "b16_i1k": "digits",
    "deit3": "vit5",
    "digits_finetune": "transfer",
    "digits_names": "siglip_lit_coco",
    "dinov3_7b": "dinov3",
    "flowers": "deit",
    "flowers_finetune": "transfer",
    "jft": "b16_i21k",
    "vtab": "transfer",
}

# The commands of the site run the quick version of these, and the stages that go on from it.
ON_SITE = ("dinov2", "dinov3", "mae")


def slow_but(fast, cases):
    """Returns the cases of a parametrised test, slow but for those in `fast`.

    A case of several values is a tuple.
    """
    cases = [*cases]
    assert all(case in cases for case in fast), f"{fast} are not among the cases"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in fast else pytest.mark.slow,
        )
        for case in cases
    ]


def commands_of(path):
    """Returns the words of each command in a config's docstring, without "python -m"."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    lines = re.findall(r"python -m (vit_jax\..*)", text.replace("\\\n", " "))
    # A sentence may go on behind a command.
    commands = (re.split(r"(?<=\w)[,.] | [(\[]", line)[0] for line in lines)
    return [shlex.split(command) for command in commands]


# Sizes of a network whose program compiles soon.
TINY = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 20}

_EVALUATION = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict({"batch_size": 8, "evals": {"val": "val"}})
    c.data = {"name": "synthetic", "num_examples": 20}
    return c
"""


def tiny_config(**sections):
    """Returns the config of a small model on made data; sections update those here."""
    raw = {
        "name": "tiny",
        "seed": 3,
        "total_steps": 6,
        "batch_size": 8,
        "data": {"name": "synthetic", "num_classes": 5, "num_examples": 20},
        "model": {"variant": "Ti/4", **TINY},
        "optim": {"learning_rate": 0.01},
        "evals": {"val": "val"},
        "log_every_steps": 2,
        "checkpoint_every_steps": 3,
    }
    raw["data"] |= {"image_size": (8, 12), "channels": 3}
    for name, value in sections.items():
        if isinstance(value, dict) and name != "evals":
            raw[name] = raw.get(name, {}) | value
        else:
            raw[name] = value
    return configuration.complete(raw)


def draw_params(model, seed=0):
    """Returns parameters as after training, none of them 0: what `init` compiles takes seconds.

    Kernels leave activations at about 1, scales are near 1, all others near 0.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(jnp.asarray, _drawn(shapes, seed))


def _drawn(shapes, seed=0):
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        noise = rng.normal(size=shape.shape).astype(shape.dtype)
        if path[-1].key == "kernel":
            return (noise / math.sqrt(math.prod(shape.shape[:-1]))).astype(shape.dtype)
        return (0.3 * noise + (path[-1].key == "scale")).astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def first_state(setup):
    """Returns a first state with parameters as of `draw_params`, the same on any mesh.

    It is for optimisers and tasks whose own state begins with zeros.
    """
    shapes = setup.layout.shapes
    zeros = lambda tree: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
    separate = _drawn(jax.eval_shape(stacking.separate, shapes.params))
    params = jax.device_get(stacking.join(separate, shapes.params))
    average = None if shapes.average is None else jax.tree.map(np.copy, params)
    state = train_state.TrainState(
        step=np.zeros([], np.int32),
        params=params,
        opt_state=zeros(shapes.opt_state),
        average=average,
        extra=zeros(shapes.extra),
        key=train_state.run_key(3),
    )
    return jax.device_put(state, setup.layout.shardings)


def write_workdir(config, workdir):
    """Leaves the checkpoint of a run with parameters as of `draw_params`, without its steps."""
    setup = loop.build_setup(config, workdir)
    with open_checkpoints(workdir, config, setup) as checkpoints:
        state = first_state(setup)
        state = state.replace(step=state.step + config.total_steps)
        checkpoints.save(config.total_steps, state, seconds=1.0)


def open_checkpoints(workdir, config, setup, source=None):
    """Opens the checkpoints of a run, as the loop does."""
    source = source or setup.source
    return Checkpointer(workdir, config, source, setup.metadata, setup.layout.disk)


def random_weights(model, source="made", seed=1, **fields):
    """Returns weights of a network, all of them normal random numbers."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(seed)
    leaves = [rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    params = jax.tree.unflatten(tree, leaves)
    return Pretrained(params, model.options, "vit_jax", source, **fields)


def write_weights(path, class_names=(), preprocess=None, **options):
    """Writes a small network with parameters of `draw_params` as a safetensors file."""
    model = models.create(**TINY | {"channels": 3} | options)
    params = jax.device_get(draw_params(model))
    how = preprocess, tuple(class_names)
    found = Pretrained(params, model.options, "vit_jax", "made", *how)
    export.export(found, "safetensors", path)


_setups = collections.OrderedDict()


def train(config, workdir, **more):
    """Trains; a run soon after another with the same step takes its compiled step."""
    step = [[path, v] for path, about, v in fields.walk(config) if about.in_step]
    setups = _setups.pop(key := json.dumps(step), None) or sweep.SweepSetups()
    _setups[key] = setups
    if len(_setups) > 6:
        _setups.popitem(last=False)
    return loop.train(config, workdir, setup=setups.build(config, workdir), **more)


def trained_on(config, num_devices):
    """Trains on a mesh of so many devices; returns losses and weights."""
    mesh = meshes.create(config.mesh, jax.devices()[:num_devices])
    source = open_source(config.data, "train")
    setup = train_setup.build(config, mesh, len(source))
    state, found = setup.initial_state(), []
    batches = pipeline.train_batches(
        source,
        config.data,
        batch_size=config.batch_size,
        seed=config.seed,
        start=0,
        stop=config.total_steps,
    )
    with batches:
        for batch in batches:
            batch = {name: batch[name] for name in setup.layout.batch}
            state, metrics = setup.train_step(state, meshes.to_devices(batch, mesh))
            found.append(float(metrics["loss"]))
    state = jax.device_get(setup.layout.disk.to_disk(state))
    return found, setup.task.backbone(state.params, state.extra)


def assert_same_training(found, expected):
    """Checks that two results of `trained_on` differ by rounding only."""
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    assert jax.tree.structure(found[1]) == jax.tree.structure(expected[1])
    # Adam's first steps have the length of the rate, whatever rounding left of a
    # gradient that is 0 in exact numbers, as those of the keys' biases.
    differ = jax.tree.map(lambda a, b: np.abs(a - b).max(), found[1], expected[1])
    far = [
        jax.tree_util.keystr(k)
        for k, v in jax.tree.leaves_with_path(differ)
        if v > 1e-4
    ]
    assert all("'key']['bias']" in path for path in far)


def begin(config, workdir):
    """Returns the setup of a run, its first state, and what it loaded.

    It is `loop.train` up to the first step, whose program is not compiled.
    """
    setup = loop.build_setup(config, workdir)
    with open_checkpoints(workdir, config, setup) as checkpoints:
        begun = loop.restore_or_init(config, setup, checkpoints)
    return setup, jax.device_get(begun.state), begun.notes


def assert_took_three_steps(workdir):
    """Checks what a recipe's quick version has to leave."""
    report = json.loads((workdir / "report.json").read_text())
    assert report["steps"] == 3
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 3 and np.isfinite(losses).all()
    for kinds in report["final"].values():
        assert np.isfinite(list(kinds["params"].values())).all()


def kill_after(step, workdir):
    """Leaves a finished run as if it had been killed after a step."""
    for path in (workdir / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    (workdir / "report.json").unlink()


def without_times(node):
    """Returns a report without what depends on the time that its runs took."""
    timed = ("seconds", "start_seconds", "device_days")
    if isinstance(node, list):
        return [without_times(item) for item in node]
    if isinstance(node, dict):
        return {k: without_times(v) for k, v in node.items() if k not in timed}
    return node


def events(folder):
    """Reads TensorBoard's record files: length, its checksum, event, checksum."""
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield metric_writer.event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def run_command(name, words):
    """Runs a command in this process; returns its exit code, None is 0.

    It waits for steps that a failed run of an earlier test still compiles: a command that
    ends meanwhile would end this process.
    """
    for thread in threading.enumerate():
        if thread.name.startswith(step._COMPILING):
            thread.join()
    module = load(name)
    return module.main(cli.parse(module.parser(), list(map(str, words))))


def evaluated(workdir, folder, capsys):
    """Returns the scores of a run of `tiny_config`, as the command `evaluate` gives them."""
    recipe = folder / "recipe.py"
    recipe.write_text(_EVALUATION)
    capsys.readouterr()
    words = [f"--config={recipe}", f"--model={workdir}", "--json"]
    assert not run_command("evaluate", words)
    return json.loads(capsys.readouterr().out.splitlines()[-1])["val"]


@contextlib.contextmanager
def full_disk(most):
    """Has files of this process end at so many bytes, as on a disk that is full then."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def run_python(*words, cwd=ROOT, **environment):
    """Runs Python in a new process; returns its exit code and what it printed."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )


def photograph(height, width):
    """Returns smooth shapes with edges and noise."""
    rng = np.random.default_rng(height)
    y, x = np.mgrid[:height, :width]
    smooth = 90 * np.sin(y[..., None] / (9, 23, 5) + x[..., None] / (31, 7, 11))
    edges = 60 * ((y // 17 + x // 23) % 2)[..., None]
    noise = rng.normal(0, 9, (height, width, 3))
    return (smooth + edges + noise + 110).clip(0, 255).astype(np.uint8)

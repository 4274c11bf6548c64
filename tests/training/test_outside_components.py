"""Components in a module of the user's: named in a config, trained, resumed, refused."""

import json
import math
import pathlib
import sys

import jax
import numpy as np
import pytest
from helpers import kill_after, open_checkpoints, tiny_config, train
from orbax.checkpoint import v1 as ocp

import vit_jax
from vit_jax.config import fields
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.training import config as configuration
from vit_jax.training import train_setup

ROOT = pathlib.Path(__file__).parents[2]

EXAMPLES = ROOT / "docs/examples"  # As docs/extending.md shows them.
OPTIMIZER = (EXAMPLES / "lion.py").read_text()
EVALUATOR = (EXAMPLES / "top_k.py").read_text()


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Writes modules of the user's where Python finds them."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.mark.slow
def test_an_optimiser_and_an_evaluator_of_ones_own_train_and_resume(outside, tmp_path):
    outside(my_lion=OPTIMIZER, top_k=EVALUATOR)
    sections = {
        "optim": {"name": "my_lion:LionConfig", "learning_rate": 1e-3, "b2": 0.95},
        "evals": {"val": "val", "top": {"kind": "top_k:TopKConfig", "k": 5}},
    }
    config = tiny_config(total_steps=4, **sections)
    assert (type(config.optim).__name__, config.optim.b2) == ("LionConfig", 0.95)
    first = train(config, tmp_path / "run")
    assert first["final"]["top"]["ema"] == {"top5": 1.0}
    stored = fields.to_json(config)
    assert stored["optim"]["name"] == "my_lion:LionConfig"
    again = train(config, tmp_path / "run")
    assert again["params_sha256"] == first["params_sha256"]
    changed = fields.replace(config, {"optim.b2": 0.9})
    with pytest.raises(UserError, match=r"another config \(optim.b2: 0.95 -> 0.9\)"):
        train(changed, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["top/ema/top5"] == 1.0


@pytest.mark.slow
def test_a_schedule_of_ones_own_is_followed(outside, tmp_path):
    outside(polynomial=(EXAMPLES / "polynomial.py").read_text())
    schedule = {"name": "polynomial:PolynomialConfig", "power": 2.0}
    optim = {"learning_rate": 0.1, "warmup_steps": 2, "schedule": schedule}
    config = tiny_config(total_steps=6, log_every_steps=1, evals={}, optim=optim)
    train(config, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    name = "train/learning_rate"
    rates = [json.loads(line)[name] for line in lines if name in line]
    wanted = [0, 0.05, *(0.1 * (1 - step / 4) ** 2 for step in range(4))]
    assert rates == pytest.approx(wanted)
    schedule["power"] = -1
    with pytest.raises(UserError, match=r"optim.schedule.power=-1.0 must be above 0"):
        tiny_config(optim=optim)


@pytest.mark.slow
def test_a_task_of_ones_own_keeps_its_state_in_checkpoints(outside, tmp_path):
    outside(center_loss=(EXAMPLES / "center_loss.py").read_text())
    task = {"name": "center_loss:CenterLossConfig", "weight": 0.1, "decay": 0.5}
    keys = {"task": task, "evals": {}, "batch_size": 16}
    keys["optim"] = {"grad_accum_steps": 2}
    workdir, config = tmp_path / "run", tiny_config(**keys, checkpoint_every_steps=2)
    whole = train(config, workdir)
    folder = workdir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    target = {"extra": {"centers": np.empty((5, 12), np.float32)}}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        centers = ocp.load(folder / "4", target)["extra"]["centers"]
    assert (np.abs(centers).sum(axis=1) > 0).all()  # Of every class there were images.
    kill_after(4, workdir)
    resumed = train(config, workdir)
    assert resumed["params_sha256"] == whole["params_sha256"]
    with pytest.raises(UserError, match=r"task.decay: 0.5 -> 0.25"):
        train(tiny_config(**keys | {"task": task | {"decay": 0.25}}), workdir)


def test_a_task_of_ones_own_applies_the_device_transforms_or_is_refused(outside):
    text = (EXAMPLES / "brightness.py").read_text()
    prepare = """    def prepare(self, batch, rng):
        return {"image": batch["image"] / 255.0}

"""
    ignoring = text.replace("    def loss(", f"{prepare}    def loss(")
    outside(brightness=text, ignoring=ignoring)

    def config_of(task, transform):
        data = {"train_transform": transform, "num_classes": 0}
        task = {"name": f"{task}:BrightnessConfig"}
        return tiny_config(data=data, evals={}, total_steps=2, task=task)

    for transform in ("color_jitter(0.4)", "mixup(0.5)"):
        vit_jax.train_setup(config_of("brightness", transform), 20)
        with pytest.raises(UserError, match=r"train_transform=.*ignoring:"):
            vit_jax.train_setup(config_of("ignoring", transform), 20)


NETWORK = {"variant": "conv_net:ConvNetConfig", "width": 16, "depth": 1, "dropout": 0.2}
KNN = {"kind": "knn", "k": 3, "train": "train", "test": "val"}


def network_config(**sections):
    """Returns a config of the network of the docs; `model` has none of the ViT's keys."""
    config = fields.to_dict(tiny_config(**sections))
    return configuration.complete(config | {"model": NETWORK})


@pytest.mark.slow
def test_a_network_of_ones_own_trains_is_evaluated_and_resumes(outside, tmp_path):
    outside(conv_net=(EXAMPLES / "conv_net.py").read_text())
    keys = {"evals": {"val": "val", "knn": KNN}}
    keys |= {"checkpoint_every_steps": 2, "optim": {"learning_rate": 0.05}}
    config = network_config(**keys)
    workdir = tmp_path / "run"
    whole = train(config, workdir)
    assert set(whole["final"]) == {"val", "knn"}
    assert 0 <= whole["final"]["knn"]["ema"]["top1"] <= 1
    assert whole["variant"] == "conv_net:ConvNetConfig"
    assert whole["compute"]["exaflops"] > 0
    kill_after(4, workdir)
    resumed = train(config, workdir)
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["final"] == whole["final"]
    other = fields.replace(config, {"model.dropout": 0.1})
    with pytest.raises(UserError, match=r"model.dropout: 0.2 -> 0.1"):
        train(other, workdir)
    # Fine-tuning takes the features and a new head.
    tuned = network_config(init=str(workdir), data={"num_classes": 3}, evals={})
    report = train(tuned, tmp_path / "tuned")
    assert report["params_sha256"] != whole["params_sha256"]


def test_a_network_of_ones_own_is_split_and_restored_on_another_mesh(outside, tmp_path):
    outside(conv_net=(EXAMPLES / "conv_net.py").read_text())

    def build(**sizes):
        config = network_config(mesh=sizes, sharding={"min_size": 100}, evals={})
        devices = jax.devices()[: math.prod(sizes.values())]
        mesh = meshes.create(config.mesh, devices)
        return config, train_setup.build(config, mesh, num_examples=20)

    config, split = build(data=2, fsdp=4, model=1)
    kernel = split.layout.shardings.params["channels_0"]["kernel"]
    assert kernel.spec == jax.sharding.PartitionSpec("fsdp", None)
    source = open_source(config.data, "train")
    state = split.initial_state()
    with open_checkpoints(tmp_path, config, split, source) as saved:
        saved.save(0, state, seconds=1.0)
    config, alone = build(data=1, fsdp=1, model=1)
    with open_checkpoints(tmp_path, config, alone, source) as saved:
        found = saved.restore()
    params = jax.device_get((state.params, found.state.params))
    jax.tree.map(np.testing.assert_array_equal, *params)
    with pytest.raises(UserError, match="mesh.model=2 splits attention heads and MLPs"):
        build(data=1, fsdp=1, model=2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"variant": "absent:Conv"}, "model.variant='absent:Conv': no module 'absent'"),
        ({"variant": "conv_net:Conv"}, "conv_net.py has no 'Conv'"),
        ({"variant": "conv_net:ConvNet"}, "derived from vit_jax.models.network:Netw"),
        ({"widht": 3}, "unknown config key model.widht; .* is model.width"),
        ({"width": 0}, "model.width=0 must be at least 1"),
        ({"dropout": 1.0}, "model.dropout=1.0 must be below 1"),
        ({"width": "x"}, "model.width='x' is str, but it takes int"),
    ],
)
def test_keys_of_a_network_of_ones_own_are_checked(outside, model, message):
    outside(conv_net=(EXAMPLES / "conv_net.py").read_text())
    raw = fields.to_dict(tiny_config()) | {"model": NETWORK | model}
    with pytest.raises(UserError, match=message):
        configuration.complete(raw)


def test_an_evaluation_of_features_needs_a_network_that_returns_them(outside, tmp_path):
    text = (EXAMPLES / "conv_net.py").read_text()
    last = "return classify(features, self.num_classes, c.head_bias_init)"
    only = 'return {"logits": classify(features, self.num_classes, 0.0)["logits"]}'
    assert last in text
    outside(conv_net=text.replace(last, only))
    with pytest.raises(UserError, match="evals.knn is an evaluation of features"):
        train(network_config(evals={"knn": KNN}), tmp_path / "run")
    report = train(network_config(total_steps=2), tmp_path / "other")
    assert set(report["final"]) == {"val"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent:Lion", "", "optim.name='absent:Lion': no module 'absent'"),
        ("mine:Lion", "", "optim.name='mine:Lion': .*mine.py has no 'Lion'"),
        ("mine:Lion", "1 / 0", "runs the code of that module, which raised ZeroDiv"),
        ("mine:Lion", "Lion = 3", "is 3: it must be a frozen dataclass of config fie"),
        ("mine:LionConfig", OPTIMIZER, "unknown config key optim.b33; .* is optim.b"),
    ],
)
def test_what_is_no_component_is_refused_with_its_key(outside, name, text, message):
    outside(mine=text)
    with pytest.raises(UserError, match=message):
        tiny_config(optim={"name": name, "learning_rate": 0.1, "b33": 0.5})
    if text == OPTIMIZER:
        with pytest.raises(UserError, match=r"optim.b1=1.0 must be below 1"):
            tiny_config(optim={"name": name, "learning_rate": 0.1, "b1": 1})

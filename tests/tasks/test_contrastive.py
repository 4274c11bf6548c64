"""Images and captions told apart: losses, devices, runs, and weights of two towers."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import begin, first_state, kill_after, tiny_config, train
from jax.sharding import NamedSharding, PartitionSpec

import vit_jax
from vit_jax import weights
from vit_jax.config.lengths import RunLength
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.models import cost, text
from vit_jax.tasks import contrastive, similarities
from vit_jax.training import loop, train_setup
from vit_jax.weights.formats import native
from vit_jax.weights.text_tower import text_tower

B, E = 24, 7
TEXT = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 20}


def embeddings(seed):
    x = np.random.default_rng(seed).normal(size=(B, E))
    return jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), jnp.float32)


def plainly(name, images, texts, scale, bias):
    """The losses by their definition, in float64."""
    x = float(scale) * np.float64(images) @ np.float64(texts).T + float(bias)
    if name == "sigmoid":
        signs = 2 * np.eye(len(x)) - 1
        return np.log1p(np.exp(-signs * x)).sum(1).mean()
    rows, columns = (
        np.log(np.exp(y).sum(1)) - np.diagonal(y) for y in (x, np.transpose(x))
    )
    return (rows + columns).mean() / 2


@pytest.mark.parametrize("name", similarities.LOSSES)
def test_losses_in_chunks_are_those_of_the_definition(name):
    arguments = embeddings(0), embeddings(1), jnp.float32(3), jnp.float32(-1)

    def value_and_gradients(chunk):
        loss = lambda *a: similarities.LOSSES[name](*a, chunk=chunk)[0]
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments)

    whole, gradients = value_and_gradients(B)
    np.testing.assert_allclose(whole, plainly(name, *arguments), rtol=1e-6)
    for chunk in (1, 5, 100):  # 4 is the largest divisor of B up to 5.
        found = value_and_gradients(chunk)
        np.testing.assert_allclose(found[0], whole, rtol=1e-6)
        for one, other in zip(found[1], gradients, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("name", similarities.LOSSES)
def test_losses_on_8_devices_are_those_on_1_without_all_similarities(name):
    mesh = meshes.create(MeshConfig(data=8))
    loss = lambda *a, **how: similarities.LOSSES[name](*a, **how)[0]

    def step(images, texts):
        with sharding.activations(mesh):
            return loss(images, texts, jnp.float32(9), jnp.float32(-2), chunk=4)

    rows = NamedSharding(mesh, PartitionSpec(meshes.BATCH_AXES))
    both = jax.jit(jax.value_and_grad(step, (0, 1)), in_shardings=(rows, rows))
    arguments = jax.device_put((embeddings(0), embeddings(1)), rows)
    value, gradients = both(*arguments)
    whole = lambda *a: loss(*a, jnp.float32(9), jnp.float32(-2), chunk=B)
    alone = jax.jit(jax.value_and_grad(whole, (0, 1)))
    wanted, wanted_gradients = alone(embeddings(0), embeddings(1))
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    program = both.lower(*arguments).compile().as_text()
    # No device has all similarities, or the embeddings of the whole batch.
    assert f"f32[{B},{B}]" not in program and f"f32[{B},{E}]" not in program
    assert "all-gather" not in program and "collective-permute" in program


# With an image projection.
SOFTMAX = {"loss": "softmax", "projection": "plain", "embed_dim": 10}
SOFTMAX["text"] = TEXT | {"causal": True, "pool": "eos", "projection": "plain"}


def config(**keys):
    task = {"name": "contrastive", "text": TEXT} | keys.pop("task", {})
    data = {"tokenizer": "bytes", "num_tokens": 9, "name": "digits"}
    data |= {"num_classes": 10, "channels": 1, "image_size": (8, 8), "split": "train"}
    data |= {"prompts": ("{}", "a {}"), "num_examples": 1_442} | keys.pop("data", {})
    evals = {"test": {"kind": "zero_shot", "split": "test", "prompts": ("a {}",)}}
    sections = {"data": data, "task": task, "evals": evals, "total_steps": 4}
    sections["checkpoint_every_steps"] = 2
    return tiny_config(**sections | keys)


@pytest.mark.slow
def test_a_step_on_8_devices_is_that_on_1():
    # Adam would blow up the noise of gradients that are 0, as those of keys' biases.
    complete = config(batch_size=16, optim={"name": "sgd", "learning_rate": 0.1})
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (16, 8, 8, 1)).astype(np.uint8),
        "text": rng.integers(0, 258, (16, 9)).astype(np.int32),
        "index": np.arange(16, dtype=np.uint32),
    }
    found = []
    for count in (1, 8):
        mesh = meshes.create(MeshConfig(), jax.devices()[:count])
        setup = train_setup.build(complete, mesh, 1_442)
        batch = jax.device_put(batch, meshes.batched(mesh))
        state, metrics = setup.train_step(first_state(setup), batch)
        found.append(jax.device_get((state.params, metrics)))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)
    assert {"loss", "top1", "temperature"} <= found[0][1].keys()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps, and its report."""
    workdir = tmp_path_factory.mktemp("contrastive") / "run"
    return workdir, train(config(task=SOFTMAX), workdir)


def test_a_resumed_run_sees_the_same_captions(run, tmp_path):
    workdir, report = run
    shutil.copytree(workdir, tmp_path / "run")
    kill_after(2, tmp_path / "run")
    again = train(config(task=SOFTMAX), tmp_path / "run")
    assert again["params_sha256"] == report["params_sha256"]


def test_a_run_is_evaluated_and_its_workdir_compares_texts(run):
    workdir, report = run
    assert 0 <= report["final"]["test"]["params"]["top1"] <= 1
    pretrained = weights.open_pretrained(workdir, with_task=True)
    assert pretrained.options["num_classes"] == 0
    assert pretrained.tokenizer == "bytes" and pretrained.loss == "softmax"
    tower = text_tower(pretrained)
    many = [f"text {i}" for i in range(70)]  # More than pass at once.
    found = tower.embed(many)
    assert found.shape == (70, 10)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(found[65], tower.embed(["text 65"])[0], atol=1e-6)
    means = tower.classes(["x", "yy"], ["{}", "a {}"])
    one = tower.embed(["yy", "a yy"]).mean(0)
    np.testing.assert_allclose(means[1], one / np.linalg.norm(one), atol=1e-6)


def test_a_file_of_ours_has_the_text_tower(run, tmp_path):
    workdir, _ = run
    pretrained = weights.open_pretrained(workdir, with_task=True)
    native.write(pretrained, tmp_path / "towers.safetensors")
    again = weights.open_pretrained(tmp_path / "towers.safetensors")
    found, wanted = (
        text_tower(one).classes(["3"], ["{}", "a {}"]) for one in (again, pretrained)
    )
    np.testing.assert_array_equal(found, wanted)
    assert again.tokenizer == "bytes" and again.options["num_classes"] == 0
    for one in (pretrained, again):
        jax.tree.map(np.testing.assert_array_equal, one.params, pretrained.params)


@pytest.mark.slow
def test_a_run_begins_with_both_towers_of_another_and_one_may_be_locked(run, tmp_path):
    workdir, _ = run
    init = {"checkpoint": str(workdir), "use_ema": False}
    optim = {"name": "adam", "learning_rate": 1e-3, "weight_decay": 0.0}
    optim["freeze"] = (r"^network/",)
    keys = {"init": init, "optim": optim, "total_steps": 1, "evals": {}}
    loop.train(config(task=SOFTMAX, **keys), tmp_path / "again")
    given, found = (
        weights.open_pretrained(path, with_task=True, use_ema=False)
        for path in (workdir, tmp_path / "again")
    )
    jax.tree.map(np.testing.assert_array_equal, found.params, given.params)
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), found.task_params, given.task_params
    )
    assert moved[text.LOGIT_SCALE] > 5e-4
    assert max(jax.tree.leaves(moved)) < 1.1e-3
    deeper = SOFTMAX | {"text": SOFTMAX["text"] | {"depth": 2}}
    with pytest.raises(UserError, match="config.init: .*text/encoderblock_1/"):
        begin(config(task=deeper, **keys), tmp_path / "wrong")


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
def test_a_run_with_another_loss_begins_with_both_towers(run, tmp_path, loss):
    other = weights.open_pretrained(run[0], with_task=True)
    path = run[0]
    if loss == "softmax":  # From a run with a sigmoid.
        path = tmp_path / "sigmoid.safetensors"
        bias = {text.LOGIT_BIAS: np.full(1, 3, np.float32)}
        more = {"loss": "sigmoid"}
        sigmoid = dataclasses.replace(
            other, task_params=other.task_params | bias, task=other.task | more
        )
        native.write(sigmoid, path)
    keys = {"init": {"checkpoint": str(path)}, "total_steps": 1, "evals": {}}
    _, state, notes = begin(
        config(task=SOFTMAX | {"loss": loss, "bias_init": -7.0}, **keys)
        if loss == "sigmoid"
        else config(task=SOFTMAX, **keys),
        tmp_path / "run",
    )
    np.testing.assert_array_equal(
        state.params[text.TEXT]["embedding"], other.task_params[text.TEXT]["embedding"]
    )
    action = "initialised" if loss == "sigmoid" else "left out"
    assert any(line.startswith(f"logit_bias of the task: {action}") for line in notes)
    if loss == "sigmoid":
        assert state.params[text.LOGIT_BIAS] == -7
    else:
        assert text.LOGIT_BIAS not in state.params


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": {"tokenizer": ""}}, "data.tokenizer='' .* set it to 'bytes'"),
        (
            {"data": {"num_classes": 0}, "task": {"text": TEXT}},
            "no class names to make captions from",
        ),
        ({"data": {"prompts": ("a digit",)}}, "give texts with {} for the name"),
        (
            {"task": {"text": TEXT | {"num_heads": 5}}},
            "task.text.num_heads=5 does not divide task.text.width=12",
        ),
    ],
)
def test_bad_input_is_named(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        loop.train(config(evals={}, **keys), tmp_path / "run")


def build(made):
    return made.task.build(made.build_model(), made.data, RunLength(4, 1.0))


def test_a_vocabulary_below_that_of_the_tokenizer_is_refused():
    task = build(config(task={"text": TEXT | {"vocab_size": 9}}))
    with pytest.raises(UserError, match="vocab_size=9, .*'bytes' has 258 tokens"):
        task.load()


def test_a_similarity_has_a_largest_factor():
    task = build(config(task={"loss": "softmax", "max_temperature": 2.0}))
    batch = {
        "image": jnp.zeros((2, 8, 8, 1)),
        "text": jnp.asarray([[2] * 9, [3] * 9], jnp.int32),
    }

    @jax.jit
    def temperature(key):
        params, extra = task.init(key)
        return task.loss(params, extra, batch, key)[1][0]["temperature"]

    assert temperature(jax.random.key(0)) == 2.0


def test_beyond_the_largest_factor_the_gradient_leads_back_alone():
    slope = jax.grad(lambda x, down: (1 if down else -1) * contrastive._at_most(x, 2.0))
    assert [float(slope(x, False)) for x in (1.0, 2.0, 3.0)] == [-1, 0, 0]
    assert [float(slope(x, True)) for x in (1.0, 2.0, 3.0)] == [1, 1, 1]


def test_floating_point_operations_count_both_towers():
    task = build(config())
    assert task.training_flops() > cost.training_flops(task.model)


@pytest.mark.parametrize(
    ("optim", "passes"),
    [
        ({}, {"network": 3, "text": 3}),
        ({"freeze": ("^network/",)}, {"network": 1, "text": 3}),  # LiT.
        ({"freeze": ("^network/", "^text/")}, {"network": 1, "text": 1}),
        # Some of it is trained, later or at once.
        ({"freeze": ("^network/",), "freeze_steps": 2}, {"network": 3, "text": 3}),
        ({"freeze": ("^network/embedding",)}, {"network": 3, "text": 3}),
    ],
)
def test_a_locked_tower_has_no_backward_pass(optim, passes):
    setup = vit_jax.train_setup(config(optim=optim), 24)
    towers = setup.task.tower_flops()
    assert setup.training_flops == sum(n * towers[name] for name, n in passes.items())

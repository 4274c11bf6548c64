"""Every optimiser of optax by its name, in the training step of a run."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import kill_after, open_checkpoints, slow_but, tiny_config, train

from vit_jax.config import fields, reference
from vit_jax.config.lengths import RunLength
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.tasks.classification import Classification
from vit_jax.training import checkpoint, optim, train_setup, train_state
from vit_jax.training.config import TrainConfig
from vit_jax.training.layout import DiskLayout
from vit_jax.training.optim import OPTIMIZERS
from vit_jax.weights import workdir as layout

B, RUN = 16, RunLength(100, 7.0)
TESTED_BY_RUNS = ("adam", "adamw", "sgd")
NAMES = [name for name in OPTIMIZERS if name not in TESTED_BY_RUNS]
# Elements of a parameter know nothing of each other, wherever they lie.
BY_ELEMENT = (
    *("acprop", "adabelief", "adadelta", "adagrad", "adamax", "adamaxw", "adan"),
    *("ademamix", "adopt", "amsgrad", "cocob", "lion", "madgrad", "nadam", "nadamw"),
    *("optimistic_adam", "optimistic_adam_v2", "optimistic_gradient_descent", "radam"),
    *("rmsprop", "rprop", "sign_sgd", "signum", "simplified_ademamix", "yogi"),
)
# A matrix, a vector, and one that is frozen: a leaf of each kind is enough.
KEPT = "Dense_0/|cls"
EVERYTHING = {
    "weight_decay": 0.1,
    "weight_decay_end": 0.2,
    "grad_clip_norm": 5.0,
    "grad_accum_steps": 2,
    "layer_decay": 0.7,
    "freeze": ("cls",),
}
RATES = {"prodigy": 1.0}  # A factor of its estimate.
pytestmark = pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")


@pytest.fixture
def quick(monkeypatch):
    """Puts few parameters and a function of them in the place of a network and its loss."""
    init = Classification.init

    def few(task, rng):
        params, extra = init(task, rng)
        return _few(params), extra

    def loss(task, params, extra, batch, rng):
        x = batch["image"].mean() / 100
        leaves = enumerate(jax.tree.leaves(stacking.separate(params)))
        value = sum(jnp.mean(jnp.sin(3 * p + x + i) * (2 + p)) for i, p in leaves)
        return value, ({"loss": value}, None)

    monkeypatch.setattr(Classification, "init", few)
    monkeypatch.setattr(Classification, "loss", loss)


def _few(tree, path=""):
    if not isinstance(tree, dict):
        return tree if re.search(KEPT, path) else None
    inner = {name: _few(value, f"{path}/{name}") for name, value in tree.items()}
    return {name: value for name, value in inner.items() if value is not None} or None


def build(name, fsdp=1, scan=False, depth=1, **keys):
    """Returns config, mesh and setup of a network."""
    layers = {"depth": depth, "scan": scan}
    config = tiny_config(
        batch_size=B,
        optim={"name": name, "learning_rate": 0.01, "warmup_steps": 1, **keys},
        model={"num_heads": 4, "width": 16, "mlp_dim": 32} | layers,
        sharding={"min_size": 64},
        mesh={"data": 1, "fsdp": fsdp},
        evals={},
    )
    mesh = meshes.create(config.mesh, jax.devices()[:fsdp])
    return config, mesh, train_setup.build(config, mesh, num_examples=20)


@functools.cache
def drawn(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def draw(shapes):
    """Returns the same parameters in any layout."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(stacking.separate, shapes))
    params = jax.tree.unflatten(tree, [drawn(x.shape, i) for i, x in enumerate(leaves)])
    return stacking.join(params, shapes)


def start(setup):
    """Returns the first state."""
    params = draw(setup.layout.shapes.params)
    create = jax.jit(setup.first.create, out_shardings=setup.layout.shardings)
    return create(jax.device_put(params, setup.layout.shardings.params), None)


def steps(setup, mesh, state, count):
    """Takes steps with a batch for each, by their number."""
    for _ in range(count):
        jax.block_until_ready(state)  # Or two programs wait for the same threads.
        pixels = 100 + 20 * int(state.step)
        batch = {
            "image": np.full((B, 8, 12, 3), pixels, np.uint8),
            "label": np.zeros(B, np.int32),
            "index": np.arange(B, dtype=np.uint32),
        }
        state, _ = setup.train_step(state, meshes.to_devices(batch, mesh))
    return jax.block_until_ready(state)


def plain(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.device_get(
        jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    )


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, plain(one), plain(other))


def assert_near(one, other, atol=2e-5):
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=atol)
    jax.tree.map(near, plain(one), plain(other))


class Together(NamedTuple):
    """Several optimisers, which one program steps.

    Attributes:
      begin: returns the first state, whose parameters and moments are dicts by name.
      shapes: state with the shape of each array.
      shardings: state with the sharding of each array.
      step: jitted function from a state to the next.
    """

    begin: Callable
    shapes: train_state.TrainState
    shardings: train_state.TrainState
    step: Callable

    def after(self, count, state=None):
        state = state or self.begin()
        for _ in range(count):
            state = jax.block_until_ready(self.step(state))
        return state


def together(names, keys, **network):
    """Returns the chains of a run with each name, of the same first parameters."""
    _, mesh, setup = build("adam", **network)
    shapes, places = setup.layout.shapes.params, setup.layout.shardings.params
    chains = {}
    for name in names:
        optim_keys = {"learning_rate": RATES.get(name, 0.01), "warmup_steps": 1, **keys}
        config = tiny_config(optim={"name": name, **optim_keys}).optim
        rate = optim.learning_rate(config, config.learning_rate, RUN)
        how = rate, RUN, setup.model.config
        chains[name] = optim.optimizer(config, shapes, *how)

    def begin(params):
        key, zero = train_state.run_key(3), jnp.zeros([], jnp.int32)
        inner = {name: chain.init(params) for name, chain in chains.items()}
        params = dict.fromkeys(names, params)
        return train_state.TrainState(zero, params, inner, None, None, key)

    def step(state):
        shift = state.step / 5
        loss = lambda params: optax.tree.sum(
            jax.tree.map(lambda x: jnp.mean(jnp.sin(x + shift)), params)
        )
        params, inner = {}, {}
        for name, chain in chains.items():
            old = state.params[name]
            grads = jax.tree.map(lambda x: jnp.cos(x + shift) / x.size, old)
            more = {"step": state.step, "value": loss(old), "value_fn": loss}
            updates, inner[name] = chain.update(
                grads, state.opt_state[name], old, **more
            )
            params[name] = optax.apply_updates(old, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=inner)

    params = draw(shapes)
    begun = jax.eval_shape(begin, params)
    shardings = jax.tree.map(lambda _: meshes.replicated(mesh), begun).replace(
        params=dict.fromkeys(names, places),
        opt_state={
            name: sharding.like(state, (shapes, places))
            for name, state in begun.opt_state.items()
        },
    )
    begin = functools.partial(jax.jit(begin, out_shardings=shardings), params)
    step = jax.jit(step, in_shardings=(shardings,), out_shardings=shardings)
    return Together(begin, begun, shardings, step)


@pytest.mark.slow
def test_all_take_three_steps_are_saved_and_use_eight_devices(tmp_path, quick):
    keys = {"weight_decay": 0.1, "freeze": ("cls",)}
    alone = together(NAMES, keys)
    begun = plain(alone.begin())
    two = alone.after(2)
    three = alone.after(1, two)
    for name in NAMES:
        moved = jax.tree.map(
            lambda a, b: np.abs(a - b).max(),
            *(begun.params[name], plain(three.params[name])),
        )
        assert moved.pop("cls") == 0, name
        assert 0 < sum(jax.tree.leaves(moved)) < 3, name  # It is a number.

    split = together(NAMES, keys, fsdp=8)
    config = tiny_config()
    source = open_source(config.data, "train")
    disk = DiskLayout(split.shapes, split.shardings)
    with checkpoint.Checkpointer(tmp_path, config, source, {}, disk) as saved:
        saved.save(2, jax.device_put(two, split.shardings), seconds=1.0)
        saved.wait()
        found = saved.load(2)
    assert_equal(found, two)
    again = jax.device_put(found, alone.shardings)
    assert_equal(alone.after(1, again), three)

    coupled = together([x for x in NAMES if x not in BY_ELEMENT], keys, fsdp=8)
    for name, params in coupled.after(3).params.items():
        assert_near(params, three.params[name])


# Of the loss and its function, of all parameters at once, of a mean of parameters.
@pytest.mark.parametrize(
    "name",
    slow_but(
        ("muon", "schedule_free_sgd"),
        ("sophia", "muon", "momo", "schedule_free_sgd"),
    ),
)
def test_three_steps_a_kill_and_eight_devices(name, tmp_path, quick):
    config, mesh, setup = build(name, fsdp=8, **EVERYTHING)
    first = start(setup)
    two = steps(setup, mesh, first, 2)
    source = open_source(config.data, "train")
    with open_checkpoints(tmp_path, config, setup, source) as saved:
        saved.save(2, two, seconds=1.0)
        saved.wait()
        three = steps(setup, mesh, two, 1)
        found = saved.load(2)
    assert_equal(steps(setup, mesh, found, 1), three)
    for a, b in zip(*map(jax.tree.leaves, (three, setup.layout.shapes)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)

    _, mesh, alone = build(name, **EVERYTHING)
    one = steps(alone, mesh, start(alone), 3)
    assert_near(one.params, three.params)
    assert_near(one.average, three.average)


@pytest.mark.slow
def test_stacked_blocks_are_trained_as_separate_ones(quick):
    # Of parameters as a whole: stacked ones must not count as one.
    names = ("adafactor", "fromage", "novograd", "muon", "prodigy")
    how = names, {"weight_decay": 0.1}
    one, stacked = together(*how, depth=2), together(*how, depth=2, scan=True)
    found = stacked.after(3).params
    for name, expected in one.after(3).params.items():
        assert "encoderblock" in found[name]["Transformer"]
        assert_near(stacking.separate(found[name]), expected)


def test_a_run_with_stacked_blocks_goes_on_from_separate_ones(quick):
    keys = {"depth": 2, "weight_decay": 0.1}
    _, mesh, setup = build("muon", **keys)
    one = steps(setup, mesh, start(setup), 3)
    _, mesh, scan = build("muon", scan=True, **keys)
    stacked = steps(scan, mesh, start(scan), 3)
    # Either goes on where the other was saved.
    assert_near(scan.layout.disk.to_disk(stacked), setup.layout.disk.to_disk(one))
    back = scan.layout.disk.from_disk(setup.layout.disk.to_disk(one))
    assert_near(steps(scan, mesh, back, 1).params, steps(scan, mesh, stacked, 1).params)


PARAMS = {
    "head": {"kernel": jnp.full((3, 5), 2.0), "bias": jnp.full(5, 2.0)},
    "cls": jnp.full((1, 1, 3), 2.0),
}


def move(name, rate=0.01, count=2, params=PARAMS, **keys):
    """Returns the last of several updates of parameters that stay as they are."""
    config = tiny_config(optim={"name": name, "learning_rate": rate, **keys})
    schedule = lambda step: rate
    tx = optim.optimizer(config.optim, params, schedule, RUN, config.model)
    state, grads = tx.init(params), jax.tree.map(lambda p: jnp.sin(p) + 0.1, params)
    value_fn = lambda p: optax.tree.sum(jax.tree.map(jnp.sin, p))
    for _ in range(count):
        updates, state = jax.jit(
            lambda g, s: tx.update(g, s, params, value=1.0, value_fn=value_fn)
        )(grads, state)
    return updates, state


def decayed(name, rate=0.01, **keys):
    """Returns how much more the parameters moved by their weight decay."""
    with_decay, _ = move(name, rate, weight_decay=0.5, **keys)
    without, _ = move(name, rate, weight_decay=0.0, **keys)
    return jax.tree.map(lambda a, b: float((a - b).ravel()[0]), with_decay, without)


@pytest.mark.parametrize(
    "name",
    [
        "lion",
        "novograd",
        "adafactor",
        "muon",
        pytest.param("sophia", marks=pytest.mark.slow),
    ],
)
def test_weight_decay_is_ours_times_the_rate(name):
    found = decayed(name)
    assert found["head"]["kernel"] == pytest.approx(-0.01 * 0.5 * 2, rel=1e-3)
    assert found["head"]["bias"] == found["cls"] == 0


@pytest.mark.parametrize("name", ["prodigy", "dadapt_adamw"])
def test_optimisers_that_estimate_their_rate_decay_by_the_estimate(name):
    found = decayed(name, rate=1.0, estim_lr0=1e-3)
    assert -1.0 < found["head"]["kernel"] < 0
    _, state = move(name, 1.0, count=1, estim_lr0=1e-3)
    scale = np.sqrt(1 - 0.999**2) / (1 - 0.9**2)
    assert found["head"]["kernel"] == pytest.approx(
        -0.5 * 2 * scale * float(state[0].inner.estim_lr), rel=0.01
    )
    assert found["head"]["bias"] == found["cls"] == 0


def test_weight_decay_that_optax_masks_itself_is_masked_as_ours():
    updates, _ = move("dog", 1.0, weight_decay=0.5)
    first = lambda leaf: float(leaf.ravel()[0])
    head, one = updates["head"], first(updates["cls"])
    gradient = np.sin(2.0) + 0.1  # All updates have the factor of the step in common.
    assert first(head["kernel"]) / one == pytest.approx((gradient + 1) / gradient)
    assert first(head["bias"]) / one == pytest.approx(1)


@pytest.mark.parametrize(("name", "power"), [("polyak_sgd", 1), ("madgrad", 1 / 3)])
def test_weight_decay_joins_the_gradient_where_no_rate_scales_the_step(name, power):
    updates, _ = move(name, 1.0, count=1, weight_decay=0.5)
    kernel, bias = (float(updates["head"][k].ravel()[0]) for k in ("kernel", "bias"))
    gradient = np.sin(2.0) + 0.1
    assert kernel / bias == pytest.approx(
        ((gradient + 1) / gradient) ** power, rel=1e-3
    )


@pytest.mark.parametrize("name", ["dog", "polyak_sgd"])
def test_the_decay_of_frozen_parameters_leaves_the_steps_of_others_alone(name):
    keys = {"freeze": ("head/kernel",), "count": 1}
    with_decay, _ = move(name, 1.0, weight_decay=0.5, **keys)
    assert_equal(with_decay, move(name, 1.0, weight_decay=0.0, **keys)[0])


def test_the_rate_follows_the_schedule_and_a_warmup_from_zero():
    half, whole = move("lion", 0.005), move("lion", 0.01)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-5), half[0], whole[0]
    )
    for name in ("prodigy", "dadapt_adamw", "momo", "cocob"):
        updates, _ = move(name, rate=1e-30)  # 0 in float32, when it is multiplied.
        assert np.isfinite(float(optax.tree.norm(updates))), name


def test_sophia_sees_the_curvature_of_the_loss():
    _, state = move("sophia", count=1)
    sophia = state[0].inner[0]
    # Of sin at 2, by signs whose squares are 1; the mean begins at 0.
    for leaf in jax.tree.leaves(sophia.nu):
        np.testing.assert_allclose(leaf, 0.01 * -np.sin(2.0), rtol=1e-5)


def test_schedule_free_parameters_are_evaluated_at_their_mean(tmp_path, quick):
    keys = {"name": "schedule_free_adamw", "freeze": ("cls",), "weight_decay": 0.1}
    config, mesh, setup = build(**keys)
    config = fields.replace(config, {"ema.decay": 0.0})
    setup = train_setup.build(config, mesh, 20)
    state = steps(setup, mesh, start(setup), 3)
    inner = state.opt_state[0]
    mean = optax.contrib.schedule_free_eval_params(inner, state.params)
    assert_near(state.average, mean)
    # The mean of what does not move is the parameter itself, to the bit.
    assert_equal(state.average["cls"], state.params["cls"])
    assert float(optax.tree.norm(optax.tree.sub(state.params, mean))) > 1e-4
    source = open_source(config.data, "train")
    with open_checkpoints(tmp_path, config, setup, source) as saved:
        saved.save(3, state, seconds=1.0)
    found = layout.load(tmp_path)
    assert found.kind == "ema"
    assert_near(found.params, mean)


@pytest.mark.slow
def test_a_network_beside_the_parameters_has_the_mean_of_schedule_free():
    keys = {"name": "schedule_free_adamw", "learning_rate": 0.01}
    sections = {"optim": keys, "task": {"name": "lora"}, "ema": {"decay": 0.0}}
    config = tiny_config(batch_size=B, evals={}, **sections)
    mesh = meshes.create(config.mesh, jax.devices()[:1])
    setup = train_setup.build(config, mesh, num_examples=20)
    create = jax.jit(
        lambda: setup.first.create(*setup.first.init()),
        out_shardings=setup.layout.shardings,
    )
    state = steps(setup, mesh, create(), 3)
    mean, network = state.average["head"]["head"], state.extra["network"]["head"]
    assert_equal(network, mean)
    assert np.abs(network["kernel"] - state.params["head"]["head"]["kernel"]).max() > 0


def test_schedule_free_steps_are_those_of_optax():
    keys = {"weight_decay": 0.1, "weight_decay_mask": (".",), "b1": 0.8}
    config = tiny_config(
        optim={"name": "schedule_free_adamw", "learning_rate": 0.1, **keys}
    )
    ours = optim.optimizer(config.optim, PARAMS, lambda step: 0.1, RUN, config.model)
    theirs = optax.contrib.schedule_free_adamw(0.1, b1=0.8, weight_decay=0.1)
    found = []
    for tx in (ours, theirs):
        params, state = PARAMS, tx.init(PARAMS)
        for _ in range(3):
            grads = jax.tree.map(jnp.sin, params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        found.append(params)
    assert_near(*found, atol=1e-6)


def test_the_mean_of_schedule_free_weighs_a_step_by_the_rate_that_it_took():
    config = tiny_config(optim={"name": "schedule_free_sgd", "learning_rate": 0.1})
    rates = jnp.array([0.1, 0.3, 0.7, 0.9])
    how = lambda step: rates[step], RUN, config.model
    tx = optim.optimizer(config.optim, PARAMS, *how)
    params, state = PARAMS, tx.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    mean = config.optim.evaluated(state, params)
    # Of 2 - 0.1 and 2 - 0.1 - 0.3, weighted by the squares of the rates.
    expected = 1.9 - 0.3 * 0.3**2 / (0.1**2 + 0.3**2)
    np.testing.assert_allclose(mean["head"]["kernel"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "lionn"}, "optim.name='lionn' is not one of adam, .*lion"),
        ({"name": "lion", "b3": 0.9}, "b3 is read only with optim.name=.*adan"),
        ({"name": "lion", "b22": 0.9}, "b22; the nearest known key is optim.b2"),
        ({"name": "lion", "b1": "x"}, "optim.b1='x' is str, but it takes float"),
        ({"name": "lion", "b1": 1.0}, "optim.b1=1.0 must be below 1"),
        ({"name": "muon", "preconditioning": "x"}, "is not one of frobenius, spec"),
        ({"name": "prodigy", "betas": (0.9,)}, r"optim.betas=\(0.9,\): .* 2 numbers"),
        ({"name": "prodigy", "mu_dtype": "bfloat16"}, "mu_dtype='bfloat16'.*float32"),
        ({"name": "dpsgd"}, "optim.name='dpsgd': .*gradient of each image"),
        ({"name": "lbfgs"}, "optim.name='lbfgs': .*loss of one batch"),
        ({"name": "schedule_free"}, "needs base_optimizer"),
    ],
)
def test_wrong_names_and_keys_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        tiny_config(optim={"learning_rate": 0.1, **keys})


def test_a_default_rate_gives_way_to_one_for_256_images():
    cls = OPTIMIZERS["schedule_free_adamw"]
    assert cls().peak_learning_rate(512) == 0.0025
    assert cls(base_learning_rate=0.1).peak_learning_rate(512) == 0.2
    with pytest.raises(UserError, match="rate=0.0025 and .*base_learning_rate=0.1"):
        cls(learning_rate=0.0025, base_learning_rate=0.1)


def test_what_optax_refuses_is_one_line():
    with pytest.raises(UserError, match="optim.name='polyak_sgd': .*variant"):
        move("polyak_sgd", variant="x")


def test_keys_have_the_defaults_and_meanings_of_optax():
    assert OPTIMIZERS["prodigy"](learning_rate=1.0).betas == (0.9, 0.999)
    assert tiny_config(optim={"name": "lion"}).optim.weight_decay == 1e-3
    both = ("/kernel$", "/cls$")
    for name in ("muon", "lion"):
        config = tiny_config(optim={"name": name, "weight_decay_mask": both})
        assert config.optim.weight_decay_mask == both
    config = tiny_config(optim={"name": "prodigy", "learning_rate": 1.0, "beta3": 0.5})
    assert config.optim.beta3 == 0.5
    assert fields.to_dict(config.optim)["estim_lr0"] == 1e-6
    text = reference.text(TrainConfig)
    assert "optim, name=adopt" in text
    assert "optim.update_interval=10" in text
    about = fields.fields(OPTIMIZERS["adopt"])["use_clipping"]
    assert about.help == "Whether to apply clipping to improve stability."


def test_a_moment_can_be_bfloat16():
    _, state = move("lion", mu_dtype="bfloat16")
    mu = state[0].inner[0].mu
    assert {x.dtype for x in jax.tree.leaves(mu)} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule_free_adamw", "sophia"])
def test_a_run_with_a_network_goes_on_after_a_kill_to_the_bit(name, tmp_path):
    keys = {"name": name, "learning_rate": 0.01, "grad_accum_steps": 2, "sam_rho": 0.1}
    config = tiny_config(optim=keys, ema={"decay": 0.0})
    whole = train(config, tmp_path)
    kill_after(3, tmp_path)
    resumed = train(config, tmp_path)
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["final"] == whole["final"]
    assert ("ema" in whole["final"]["val"]) == (name == "schedule_free_adamw")

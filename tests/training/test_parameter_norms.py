"""What depends on the norm of each parameter: LARS, LAMB, and clipping one by one."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import kill_after, tiny_config, train

from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.training import optim
from vit_jax.training.schedules import RunLength

# Of facebookresearch/mae and timm; tests/golden/README.md.
GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "optimisers.npz")
NAMES = ("kernel", "bias", "zero")
MATRICES = ("kernel$", "zero$")
RUN = RunLength(100, 7.0)


def transformation(params, rate=0.5, **options):
    config = tiny_config(optim=options)
    return optim.optimizer(config.optim, params, lambda step: rate, RUN, config.model)


def golden(part):
    return {name: GOLDEN[f"{part}/{name}"].astype(np.float32) for name in NAMES}


def steps(**options):
    """Yields the parameters of the golden case after each of its steps."""
    params = golden("start")
    tx = transformation(params, **{"weight_decay_mask": MATRICES} | options)
    state, step = tx.init(params), take(tx)
    for i in range(3):
        params, state = step(golden(f"gradient_{i}"), state, params)
        yield params


def take(tx):
    """Returns the jitted step of an optimiser: parameters and state after it."""

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


# In timm's run weight decay touched the bias as well.
LAMB = {"name": "lamb", "rate": 0.01, "grad_clip_norm": 1.0}
LAMB["weight_decay_mask"] = (".",)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("lars_wd0", {"name": "lars"}),
        ("lars_wd0.1", {"name": "lars", "weight_decay": 0.1}),
        ("lamb_wd0", LAMB),
        ("lamb_wd0.05", LAMB | {"weight_decay": 0.05}),
    ],
)
def test_steps_are_those_of_mae_and_timm(case, options):
    for step, params in enumerate(steps(**options)):
        for name in NAMES:
            expected = GOLDEN[f"{case}/step{step}/{name}"]
            np.testing.assert_allclose(params[name], expected, atol=1e-6)


def encoder(rng, depth=3):
    """Parameters of some blocks, and what stands beside them."""
    projection = {"kernel": (6, 2, 3), "bias": (2, 3)}
    shapes = dict.fromkeys(("query", "key", "value"), projection)
    shapes["out"] = {"kernel": (2, 3, 6), "bias": (6,)}
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)
    is_shape = lambda x: isinstance(x, tuple)
    blocks = {
        f"encoderblock_{i}": {
            "attention": jax.tree.map(draw, shapes, is_leaf=is_shape),
            "scale": np.float32(i + 1) * draw((6,)),
        }
        for i in range(depth)
    }
    head = {"kernel": draw((6, 5)), "bias": draw((5,))}
    return {"Transformer": blocks, "head": head}


def test_query_key_and_value_share_a_norm_and_others_have_their_own():
    tree = encoder(np.random.default_rng(0))
    norms = jax.jit(optim.parameter_norms)(tree)
    block, of_block = (t["Transformer"]["encoderblock_1"] for t in (tree, norms))
    for name in ("kernel", "bias"):
        three = [block["attention"][k][name] for k in ("query", "key", "value")]
        whole = np.linalg.norm([np.linalg.norm(x) for x in three])
        for k in ("query", "key", "value"):
            np.testing.assert_allclose(of_block["attention"][k][name], whole, 1e-6)
    own = [(block["scale"], of_block["scale"])]
    own += [(tree["head"][k], norms["head"][k]) for k in ("kernel", "bias")]
    for leaf, norm in own:
        np.testing.assert_allclose(norm, np.linalg.norm(leaf), 1e-6)
        assert norm.ndim == leaf.ndim


@pytest.mark.parametrize(
    "options",
    [
        {"name": "sgd", "momentum": 0.9, "grad_clip_norm_per_parameter": 1.5},
        {"name": "lars", "weight_decay_mask": ("_1/.*kernel$", "head/kernel")},
        pytest.param({"name": "lamb", "weight_decay": 0.1}, marks=pytest.mark.slow),
        {"name": "adam", "weight_decay": 0.1, "weight_decay_end": 0.4},
    ],
    ids=str,
)
def test_stacked_blocks_move_as_those_one_by_one(options):
    rng = np.random.default_rng(1)
    params, grads = encoder(rng), [encoder(rng) for _ in range(3)]

    def train(params, convert):
        tx = transformation(params, **options)
        state, step = tx.init(params), take(tx)
        for grad in grads:
            params, state = step(convert(grad), state, params)
        return params

    plain = train(params, lambda tree: tree)
    stacked = train(stacking.stack(params), stacking.stack)
    assert "encoderblock" in stacked["Transformer"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6),
        stacking.unstack(stacked),
        plain,
    )


def test_each_gradient_is_clipped_by_itself():
    params = {"a": {"kernel": jnp.zeros((3, 2))}, "b": {"kernel": jnp.zeros(4)}}
    grads = {"a": {"kernel": jnp.full((3, 2), 3.0)}, "b": {"kernel": jnp.full(4, 0.1)}}
    sgd = {"name": "sgd", "momentum": 0.0, "grad_clip_norm_per_parameter": 0.3}
    tx = transformation(params, **sgd)
    updates, _ = tx.update(grads, tx.init(params), params)
    norm = 3 * np.sqrt(6)
    expected = -0.5 * 3 * 0.3 / (norm + 1e-6)
    np.testing.assert_allclose(updates["a"]["kernel"], expected, rtol=1e-6)
    np.testing.assert_allclose(updates["b"]["kernel"], -0.05, rtol=1e-6)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    updates, _ = tx.update(zeros, tx.init(params), params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))


@pytest.mark.slow
def test_a_run_with_stacked_blocks_resumes_with_its_optimiser(tmp_path):
    optim = {"name": "lamb", "learning_rate": 0.01, "weight_decay": 0.05}
    optim |= {"weight_decay_end": 0.2, "grad_clip_norm_per_parameter": 0.5}
    model = {"depth": 2, "scan": True}
    config = tiny_config(optim=optim, model=model, evals={})
    whole = train(config, tmp_path)
    kill_after(3, tmp_path)
    resumed = train(config, tmp_path)
    assert resumed["params_sha256"] == whole["params_sha256"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "lars", "trust_coefficient": 0.0}, "coefficient=0.0 must be above 0"),
        ({"name": "lars", "momentum": 1.0}, "momentum=1.0 must be below 1"),
        ({"name": "lars", "b1": 0.9}, "optim.b1"),
        ({"weight_decay_end": -0.1}, "weight_decay_end=-0.1 must be at least 0"),
        ({"grad_clip_norm_per_parameter": -1.0}, "must be at least 0"),
        ({"name": "lars", "weight_decay_mask": ("^none",)}, "matches none of the"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(UserError, match=message):
        transformation(golden("start"), **options)

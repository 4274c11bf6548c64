"""SAM and GSAM against reference steps, and in the training step."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import first_state, kill_after, tiny_config, train

from vit_jax.config.lengths import RunLength
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.training import optim, train_setup
from vit_jax.training.optim import sharpness
from vit_jax.training.train_state import TrainState

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = dict(np.load(GOLDEN / "sam.npz"))
NUMBERS = {
    "lr": 0.05,
    "rho": 0.1,
    "momentum": 0.9,
    "gsam_lrs": (0.05, 0.035, 0.02),
    "rho_max": 0.3,
    "rho_min": 0.05,
    "alpha": 0.4,
    "lr_max": 0.05,
    "lr_min": 0.01,
}
B = 16


def part(name):
    return {key: jnp.asarray(CASES[f"{name}/{key}"], jnp.float32) for key in "ab"}


def loss(params, extra, batch, key):
    """The mean over functions with minima of their own, which stand for images."""

    def one(minimum):
        return sum(
            jnp.sum(part("h")[k] * (params[k] - minimum[k]) ** 2) / 2
            + jnp.sum(params[k] ** 4) / 4
            for k in "ab"
        )

    return sum(map(one, batch)) / len(batch), None


def images(batch):
    """Returns the minima of a batch of indices."""
    return [part(("m", "m2")[i]) for i in batch]


def steps(gradients, momentum=0.0, rates=(NUMBERS["lr"],) * 3):
    """Yields the gradient and the parameters after each step."""
    params, velocity = part("start"), None
    for i, rate in enumerate(rates):
        found = gradients(params, i)
        velocity = jax.tree.map(
            lambda v, g: momentum * v + g,
            velocity or jax.tree.map(jnp.zeros_like, found),
            found,
        )
        params = jax.tree.map(lambda p, v, rate=rate: p - rate * v, params, velocity)
        yield found, params


def climbed(rho, batch=(0,), **keys):
    config = optim.SgdConfig(learning_rate=0.1, sam_rho=1.0, **keys)

    def grad_fn(state, batch, key):
        return jax.grad(loss, has_aux=True)(state.params, state.extra, batch, key)

    def gradients(params, step):
        function = sharpness.climb(
            grad_fn, config, lambda i: rho[i] if isinstance(rho, list) else rho
        )
        state = TrainState(step, params, None, None, None, None)
        return function(state, images(batch), None)[0]

    return gradients


def falling():
    """GSAM's radius at its three rates."""
    low, high = NUMBERS["rho_min"], NUMBERS["rho_max"]
    first, last = NUMBERS["lr_max"], NUMBERS["lr_min"]
    return [
        low + (high - low) * (rate - last) / (first - last)
        for rate in NUMBERS["gsam_lrs"]
    ]


ALPHA = {"gsam_alpha": NUMBERS["alpha"]}


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("sam", {}),
        ("sam_momentum", {}),
        ("sam_asam", {"sam_adaptive": "asam"}),
        ("sam_big_vision_adaptive", {"sam_adaptive": "scaled"}),
        ("gsam", ALPHA),
        ("gsam_momentum", ALPHA),
        ("gsam_clean", ALPHA | {"gsam_minimize": "clean"}),
        ("gsam_big_vision_adaptive", ALPHA | {"sam_adaptive": "scaled"}),
    ],
)
def test_steps_are_the_golden_ones(case, keys):
    gsam = case.startswith("gsam")
    rho = falling() if gsam else NUMBERS["rho"]
    momentum = NUMBERS["momentum"] if case.endswith(("momentum", "asam")) else 0.0
    rates = NUMBERS["gsam_lrs"] if gsam else (NUMBERS["lr"],) * 3
    for i, found in enumerate(steps(climbed(rho, **keys), momentum, rates)):
        for name, tree in zip(("gradient", "weight"), found, strict=True):
            assert apart(tree, part(f"{case}/step{i}/{name}")) < 1e-5


def test_groups_that_go_uphill_alone_are_the_golden_workers():
    rho = NUMBERS["rho"]
    together = steps(climbed(rho, batch=(0, 1)))

    def alone(params, step):
        found = [climbed(rho, batch=(i,))(params, step) for i in (0, 1)]
        return jax.tree.map(lambda a, b: (a + b) / 2, *found)

    cases = ("sam_two_halves_together", together), ("sam_two_workers", steps(alone))
    for case, run in cases:
        for i, (_, params) in enumerate(run):
            assert apart(params, part(f"{case}/step{i}/weight")) < 1e-5


def test_the_radius_falls_with_the_rate():
    falls = {"warmup_steps": 4, "sam_rho": 0.6, "sam_rho_end": 0.1}
    config = optim.SgdConfig(learning_rate=0.4, **falls)
    run = RunLength(12, 1.0)
    rate = optim.learning_rate(config, 0.4, run)
    rho = sharpness.radius(config, rate, 0.4, run)
    assert [float(rho(step)) for step in (4, 8, 12)] == pytest.approx([0.6, 0.35, 0.1])
    assert float(rho(0)) == pytest.approx(0.1)
    flat = optim.SgdConfig(learning_rate=0.4, sam_rho=0.6)
    assert sharpness.radius(flat, rate, 0.4, run)(7) == 0.6


@functools.cache
def run(devices=1, fsdp=1, **keys):
    """Takes two steps of a network with dropout; returns the setup and the state."""
    config = tiny_config(
        batch_size=B,
        data={"train_transform": "flip"},
        optim={"learning_rate": 0.01, "name": "sgd", "schedule": "constant", **keys},
        model={"dropout": 0.1 if not keys.get("grad_accum_steps") else 0.0},
        sharding={"min_size": 64},
    )
    count = devices * fsdp
    mesh = meshes.create(MeshConfig(data=devices, fsdp=fsdp), jax.devices()[:count])
    program = train_setup.build(config, mesh, num_examples=20)
    state = first_state(program)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (B, 8, 12, 3), np.uint8),
        "label": rng.integers(0, 5, B).astype(np.int32),
        "index": np.arange(B, dtype=np.uint32),
    }
    for _ in range(2):
        state, _ = program.train_step(state, meshes.to_devices(batch, mesh))
    return program, jax.device_get(state.params)


def apart(a, b):
    by_leaf = jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b)
    return np.max(jax.tree.leaves(by_leaf))  # NaN if there is one.


@pytest.mark.slow
def test_images_that_go_uphill_together_are_the_same_on_any_number_of_devices():
    _, one = run(sam_rho=0.5, sam_batch_size=8)
    split, both = run(devices=2, fsdp=2, sam_rho=0.5, sam_batch_size=8)
    specs = {str(s.spec) for s in jax.tree.leaves(split.layout.shardings.params)}
    assert any("fsdp" in spec for spec in specs)
    assert apart(one, both) < 1e-6


@pytest.mark.slow
def test_groups_that_go_uphill_alone_give_other_steps():
    _, one = run(sam_rho=0.5, sam_batch_size=8)
    program, whole = run(sam_rho=0.5)
    plain_program, plain = run()
    assert apart(one, whole) > 1e-5
    assert apart(whole, plain) > 1e-5
    assert program.training_flops == 2 * plain_program.training_flops


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(tmp_path):
    keys = {"sam_rho": 0.5, "gsam_alpha": 0.4, "sam_rho_end": 0.1}
    config = tiny_config(optim={"learning_rate": 0.01, **keys}, evals={})
    whole = train(config, tmp_path)
    kill_after(3, tmp_path)
    resumed = train(config, tmp_path)
    assert resumed["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
def test_microbatches_of_a_group_change_nothing():
    _, two = run(sam_rho=0.5, sam_batch_size=8, grad_accum_steps=1)
    _, four = run(sam_rho=0.5, sam_batch_size=8, grad_accum_steps=4)
    assert apart(two, four) < 1e-6


@pytest.mark.slow
def test_what_is_frozen_for_now_has_no_part_in_the_step_uphill():
    keys = {"name": "sgd", "momentum": 0.0, "sam_rho": 0.5, "gsam_alpha": 0.4}
    keys |= {"freeze": ("^(?!head/)",)}
    _, for_ever = run(**keys)
    _, for_now = run(**keys, freeze_steps=5)
    assert apart(for_ever, for_now) < 1e-7


@pytest.mark.parametrize(
    ("devices", "size", "message"),
    [
        (1, 5, "optim.sam_batch_size=5: must divide batch_size=16"),
        (4, 2, "multiple of the 4 devices.*: set it to 4, or to 0"),
    ],
)
def test_groups_that_cannot_be_are_refused(devices, size, message):
    mesh = meshes.create(MeshConfig(data=devices), jax.devices()[:devices])
    config = optim.SgdConfig(learning_rate=0.1, sam_rho=0.1, sam_batch_size=size)
    with pytest.raises(UserError, match=message):
        config.microbatches(B, mesh)

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config

from vit_jax.config.lengths import RunLength, depends_on_epochs
from vit_jax.errors import UserError
from vit_jax.training import optim
from vit_jax.training.optim.transforms import clip_by_part_norm

# Of facebookresearch/dino 7c446df; tests/golden/README.md.
DINO = np.load(pathlib.Path(__file__).parents[1] / "golden" / "dino_schedules.npz")
TOTAL, WARMUP, PEAK = 100, 10, 0.5
PARAMS = {
    "embedding": {"kernel": jnp.full((3, 2), 2.0), "bias": jnp.full(2, 2.0)},
    "head": {"kernel": jnp.full((2, 5), 2.0)},
}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
ONES = jax.tree.map(jnp.ones_like, PARAMS)


def rates(schedule="cosine", steps_per_epoch=7.0, total=TOTAL, warmup=None, **keys):
    warmup = warmup or {"warmup_steps": WARMUP}
    schedule = {"name": schedule} | keys
    config = tiny_config(optim={"learning_rate": PEAK, "schedule": schedule} | warmup)
    rate = optim.learning_rate(config.optim, PEAK, RunLength(total, steps_per_epoch))
    return lambda step: float(rate(jnp.int32(step)))


@pytest.mark.parametrize("name", ["linear", "cosine", "rsqrt", "constant"])
def test_warmup_is_linear_from_zero_to_the_peak(name):
    rate = rates(name)
    assert rate(0) == 0
    assert rate(WARMUP // 2) == pytest.approx(PEAK / 2)
    assert rate(WARMUP) == pytest.approx(PEAK)


QUARTER = WARMUP + (TOTAL - WARMUP) // 3
STAIRS = {"boundaries": (30, 70), "decay_rate": 0.2}


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("linear", {}, {QUARTER: PEAK * 2 / 3, 55: PEAK / 2, TOTAL: 0}),
        ("cosine", {}, {QUARTER: PEAK * 0.75, 55: PEAK / 2, TOTAL: 0}),
        ("linear", {"end_learning_rate": 0.1}, {55: (PEAK + 0.1) / 2, TOTAL: 0.1}),
        ("cosine", {"end_learning_rate": 0.1}, {55: (PEAK + 0.1) / 2, TOTAL: 0.1}),
        ("constant", {}, {TOTAL: PEAK}),
        (
            "rsqrt",
            {"timescale": 20, "cooldown_steps": 30},
            {
                WARMUP + 60: PEAK / 2,  # 1 + 60 / 20 = 2 ** 2
                TOTAL - 15: PEAK / np.sqrt(1 + 75 / 20) / 2,
                TOTAL: 0,
            },
        ),
        (
            "cosine",
            {"end_learning_rate": 0.1, "cooldown_fraction": 0.3},
            {40: (PEAK + 0.1) / 2, 70: 0.1, TOTAL - 10: 0.1 / 3, TOTAL: 0},
        ),
        (
            "wsd",
            {"cooldown_steps": 20},
            {TOTAL - 20: PEAK, TOTAL - 5: PEAK / 4, TOTAL: 0},
        ),
        (
            "wsd",
            {"cooldown_steps": 20, "end_learning_rate": 0.1},
            {TOTAL - 20: PEAK, TOTAL - 10: (PEAK + 0.1) / 2, TOTAL: 0.1},
        ),
        (
            "wsd",
            {"cooldown_epochs": 4.0, "cooldown_shape": "1-sqrt"},
            {72: PEAK, 79: PEAK / 2, 100: 0},
        ),
        (
            "wsd",
            {"cooldown_fraction": 0.3, "cooldown_shape": "cosine"},
            {70: PEAK, 80: PEAK * 0.75, 85: PEAK / 2, TOTAL: 0},
        ),
        ("step", STAIRS, {29: PEAK, 30: PEAK / 5, 69: PEAK / 5, 70: PEAK / 25}),
    ],
)
def test_a_schedule_passes_its_points(name, keys, expected):
    rate = rates(name, **keys)
    for step, value in {WARMUP: PEAK, **expected}.items():
        assert rate(step) == pytest.approx(value, abs=1e-7), step


@pytest.mark.parametrize(
    ("name", "epochs", "steps_per_epoch", "warmup_epochs", "end"),
    [("schedule", 100, 10, 10.0, 1e-6), ("train", 3, 2, 1.0, 1e-5)],
)
def test_the_schedules_are_those_of_dino(
    name, epochs, steps_per_epoch, warmup_epochs, end
):
    stated = {"learning_rate": 0.002, "warmup_ends_at_peak": True}
    stated |= {"schedule": {"name": "cosine", "end_learning_rate": end}}
    stated |= {"weight_decay": 0.04, "weight_decay_end": 0.4}
    config = tiny_config(optim=stated | {"warmup_epochs": warmup_epochs})
    run = RunLength(epochs * steps_per_epoch, float(steps_per_epoch))
    steps = jnp.arange(run.total_steps)
    rate = jax.vmap(optim.learning_rate(config.optim, 0.002, run))(steps)
    np.testing.assert_allclose(rate, DINO[f"{name}/lr"], atol=1e-8, rtol=2e-6)
    decay = jax.vmap(optim.weight_decay(config.optim, run))(steps)
    np.testing.assert_allclose(decay, DINO[f"{name}/wd"], atol=1e-6)


def test_the_warmup_reaches_the_peak_in_its_last_step_where_that_is_stated():
    rate = rates(warmup={"warmup_steps": WARMUP, "warmup_ends_at_peak": True})
    assert rate(0) == 0
    assert rate(1) == pytest.approx(PEAK / (WARMUP - 1))
    assert rate(WARMUP - 1) == rate(WARMUP) == pytest.approx(PEAK)
    assert rate(WARMUP + 1) < PEAK
    one = rates(warmup={"warmup_steps": 1, "warmup_ends_at_peak": True})
    assert (one(0), one(1)) == (0, PEAK)


EPOCHS, WARM, START, END = 11, 3, 0.02, 0.1
# DeiT, DeiT III and ViT-5 by epochs; SimMIM, then Swin by steps.
OF_TIMM = {
    "deit": {"includes_warmup": True, "by_epochs": True},
    "simmim": {"includes_warmup": True, "by_epochs": False},
    "swin": {"includes_warmup": False, "by_epochs": False},
}


def as_timm(includes_warmup, by_epochs, steps_per_epoch=7.0):
    """Returns the rates of a run of `EPOCHS` epochs with options of timm's schedule."""
    stated = {"warmup_epochs": WARM, "warmup_learning_rate": START}
    stated["schedule_by_epochs"] = by_epochs
    rate = rates(
        steps_per_epoch=steps_per_epoch,
        total=round(EPOCHS * steps_per_epoch),
        warmup=stated,
        end_learning_rate=END,
        includes_warmup=includes_warmup,
    )
    return [rate(step) for step in range(round(EPOCHS * steps_per_epoch))]


@pytest.mark.parametrize("name", OF_TIMM)
def test_a_cosine_is_that_of_timm(name):
    options = OF_TIMM[name]
    unit = 1 if options["by_epochs"] else 7
    first = 0 if options["includes_warmup"] else WARM * unit
    expected = []
    for step in range(7 * EPOCHS):
        # DeiT calls `lr_scheduler.step(epoch)` when that epoch has ended.
        t = max(step // 7 - 1, 0) if options["by_epochs"] else step
        part = (t - first) / (EPOCHS * unit - first)
        cosine = END + (PEAK - END) * (1 + np.cos(np.pi * part)) / 2
        ramp = START + (PEAK - START) * t / (WARM * unit)
        expected.append(ramp if t < WARM * unit else cosine)
    np.testing.assert_allclose(as_timm(**options), expected, rtol=2e-6)


def test_rates_by_epochs_change_where_epochs_begin():
    found = as_timm(**OF_TIMM["deit"], steps_per_epoch=7.4)
    changes = [step for step in range(1, len(found)) if found[step] != found[step - 1]]
    # A step that is shared by runs depends on it.
    stated = {"learning_rate": PEAK, "schedule_by_epochs": True}
    assert depends_on_epochs(tiny_config(optim=stated).optim)
    # Epochs 0 and 1 have one rate.
    assert changes == [round(7.4 * epoch) for epoch in range(2, EPOCHS)]


@pytest.mark.parity
@pytest.mark.parametrize("name", OF_TIMM)
def test_a_cosine_is_what_timm_itself_computes(name):
    from import_timm import import_timm, torch

    import_timm()
    from timm.scheduler import CosineLRScheduler

    options = OF_TIMM[name]
    by_epochs, prefix = options["by_epochs"], not options["includes_warmup"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    unit = 1 if by_epochs else 7
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=(EPOCHS - WARM * prefix) * unit,
        lr_min=END,
        warmup_lr_init=START,
        warmup_t=WARM * unit,
        warmup_prefix=prefix,
        t_in_epochs=by_epochs,
    )
    expected = []
    for step in range(7 * EPOCHS):
        if not by_epochs:
            scheduler.step_update(step)
        expected.append(optimizer.param_groups[0]["lr"])
        if by_epochs and step % 7 == 6:
            scheduler.step(step // 7)
    np.testing.assert_allclose(as_timm(**options), expected, rtol=2e-6)


@pytest.mark.parametrize("boundaries", [(70, 30), (30, TOTAL), (WARMUP,)])
def test_step_out_of_order_is_an_error(boundaries):
    with pytest.raises(UserError, match=r"must ascend between .* 10\) .* 100\)"):
        rates("step", boundaries=boundaries)


def test_steps_are_set_in_epochs_as_well():
    stairs, epochs = rates("step", **STAIRS), {"boundary_epochs": (30 / 7, 10)}
    in_epochs = rates("step", decay_rate=STAIRS["decay_rate"], **epochs)
    for step in range(TOTAL):
        assert in_epochs(step) == stairs(step)
    with pytest.raises(UserError, match=r"boundaries=\(30,\).*boundary_epochs="):
        rates("step", boundaries=(30,), **epochs)
    with pytest.raises(UserError, match=r"boundary_epochs=\(20\.0,\).*\(140,\)"):
        rates("step", boundary_epochs=(20.0,))


def test_warmup_counts_epochs_or_a_fraction_as_well():
    assert rates("linear", warmup={"warmup_steps": 0})(0) == pytest.approx(PEAK)
    for options in ({"warmup_epochs": 2.0}, {"warmup_fraction": 0.14}):
        rate = rates("constant", warmup=options)
        assert rate(14) == pytest.approx(PEAK)
        assert rate(13) == pytest.approx(PEAK * 13 / 14)


def test_rate_may_be_stated_per_256_images():
    stated = {"learning_rate": 0.0, "base_learning_rate": 0.4}
    config = tiny_config(batch_size=64, optim=stated)
    assert config.optim.peak_learning_rate(config.batch_size) == pytest.approx(0.1)


def test_a_warmup_longer_than_the_run_takes_a_tenth_of_it():
    rate = rates("constant", total=9)
    assert (rate(0), rate(1), rate(8)) == (
        0.0,
        pytest.approx(PEAK),
        pytest.approx(PEAK),
    )
    section = tiny_config(optim={"warmup_epochs": 5.0}).optim
    (note,) = optim.warmup_notes(section, RunLength(70, 20.0))
    assert "optim.warmup_epochs=5.0" in note and "100 steps" in note and "to 7," in note
    assert optim.warmup_notes(section, RunLength(100, 20.0)) == ()


def test_a_warmup_and_a_cooldown_longer_than_the_run_are_refused():
    with pytest.raises(
        UserError, match=r"warmup \(10 steps\) and cooldown \(95 steps\)"
    ):
        rates("rsqrt", cooldown_steps=95)


def test_a_cooldown_that_does_nothing_is_refused():
    with pytest.raises(UserError, match="name='wsd' needs a cooldown"):
        rates("wsd")
    with pytest.raises(UserError, match=r"end_learning_rate=0.0: the cosine"):
        rates("cosine", cooldown_steps=5)


@pytest.mark.parametrize("unit", ["steps", "epochs", "fraction"])
def test_what_is_too_long_is_named_by_the_key_that_states_it(unit):
    long = {f"warmup_{unit}": {"steps": 12, "epochs": 2.0, "fraction": 1.4}[unit]}
    section = tiny_config(optim=long).optim
    (note,) = optim.warmup_notes(section, RunLength(9, 7.0))
    assert f"optim.warmup_{unit}=" in note
    long = {f"cooldown_{unit}": {"steps": 95, "epochs": 14.0, "fraction": 0.95}[unit]}
    with pytest.raises(UserError, match=f"lower optim.schedule.cooldown_{unit} or"):
        rates("rsqrt", **long)


def update(grads, rate=PEAK, params=PARAMS, steps=1, **options):
    config = tiny_config(optim=options)
    run = RunLength(100, 7.0)
    tx = optim.optimizer(config.optim, params, lambda step: rate, run, config.model)
    state = tx.init(params)
    for step in range(steps):
        updates, state = tx.update(grads, state, params, step=step, value=1.0)
    return updates


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_kernel_of_zeros_under_a_trust_ratio_is_named(name):
    zero = PARAMS | {"head": {"kernel": jnp.zeros((2, 5))}}
    keys = {"name": name, "weight_decay": 0.1}
    chosen = tiny_config(optim=keys).optim
    note = chosen.note(zero)
    assert f"optim.name={name!r}: head/kernel is init" in note and "\n" not in note
    assert not chosen.note(PARAMS)
    frozen = tiny_config(optim=keys | {"freeze": ("^head/",)}).optim
    assert not frozen.note(zero)
    assert not tiny_config(optim=keys | {"name": "adam"}).optim.note(zero)


def test_weight_decay_is_times_the_scheduled_rate_and_on_kernels_only():
    updates = update(ZEROS, weight_decay=0.1)
    assert updates["embedding"]["kernel"] == pytest.approx(-PEAK * 0.1 * 2.0)
    assert updates["head"]["kernel"] == pytest.approx(-PEAK * 0.1 * 2.0)
    assert not updates["embedding"]["bias"].any()


def test_weight_decay_mask_is_a_regular_expression():
    updates = update(ZEROS, weight_decay=0.1, weight_decay_mask=("^head/",))
    assert not updates["embedding"]["kernel"].any()
    assert updates["head"]["kernel"].all()


def test_weight_decay_changes_from_step_to_step():
    keys = {"weight_decay": 0.1, "weight_decay_end": 0.5}
    for steps, expected in ((1, 0.1), (51, 0.3), (76, 0.5 - 0.2 * (1 - np.sqrt(0.5)))):
        updates = update(ZEROS, steps=steps, **keys)
        assert updates["head"]["kernel"] == pytest.approx(-PEAK * expected * 2.0)
        assert not updates["embedding"]["bias"].any()
    rising = update(ZEROS, steps=51, weight_decay_end=0.5)  # From 0.
    assert rising["head"]["kernel"] == pytest.approx(-PEAK * 0.25 * 2.0)


def test_weight_decay_has_a_length_of_its_own():
    keys = {"weight_decay": 0.1, "weight_decay_end": 0.5, "weight_decay_steps": 20}
    for steps, expected in ((1, 0.1), (11, 0.3), (21, 0.5), (60, 0.5)):
        updates = update(ZEROS, steps=steps, **keys)
        assert updates["head"]["kernel"] == pytest.approx(-PEAK * expected * 2.0)


def test_rates_have_factors():
    rules = ("embedding/ -> 0.5", "embedding/kernel$ -> 0.2")
    plain = {"name": "sgd", "momentum": 0.0}
    found = update(ONES, **plain, learning_rate_factors=rules)
    assert found["embedding"]["kernel"] == pytest.approx(-PEAK * 0.1)
    assert found["embedding"]["bias"] == pytest.approx(-PEAK * 0.5)
    assert found["head"]["kernel"] == pytest.approx(-PEAK)
    for rule in ("embedding", "-> 2", "head -> fast"):
        with pytest.raises(
            UserError, match=f"factors: '{rule}' is not of the form 'REGEX -> F"
        ):
            update(ONES, learning_rate_factors=(rule,))
    with pytest.raises(UserError, match="factors: 'kernal' matches none"):
        update(ONES, learning_rate_factors=("kernal -> 2",))


def test_gradients_are_clipped_part_by_part():
    plain = {"name": "sgd", "momentum": 0.0}
    found = update(ONES, **plain, grad_clip_norm_per_part=2.0)
    assert found["embedding"]["bias"] == pytest.approx(-PEAK * 2.0 / np.sqrt(8))
    assert found["head"]["kernel"] == pytest.approx(-PEAK * 2.0 / np.sqrt(10))


def test_single_arrays_are_clipped_with_the_network():
    grads = {"network": {"a": jnp.full(3, 2.0)}, "token": jnp.full(2, 1.0)}
    grads["head"] = {"b": jnp.full(4, 3.0)}
    clip = clip_by_part_norm(0.5)
    found, _ = clip.update(grads, clip.init(grads))
    of_network = 0.5 / np.sqrt(3 * 4 + 2)
    np.testing.assert_allclose(found["network"]["a"], 2 * of_network, rtol=1e-6)
    np.testing.assert_allclose(found["token"], of_network, rtol=1e-6)
    np.testing.assert_allclose(found["head"]["b"], 0.25, rtol=1e-6)


@pytest.mark.parametrize("key", ["weight_decay_mask", "freeze"])
def test_an_expression_that_matches_nothing_is_an_error(key):
    with pytest.raises(UserError, match=f"optim.{key}: 'kernal' matches none of the 3"):
        update(ZEROS, weight_decay=0.1, **{key: ("head", "kernal")})
    with pytest.raises(UserError, match=r"'\(' is not a regular expression"):
        update(ZEROS, weight_decay=0.1, **{key: ("(",)})


def test_adam_first_step_is_the_rate_whatever_the_gradient():
    grads = jax.tree.map(lambda x: 1e-3 * x, ONES)
    assert update(grads)["head"]["kernel"] == pytest.approx(-PEAK, rel=1e-4)


def test_momentum_adds_up():
    updates = update(ONES, name="sgd", momentum=0.9, steps=3)
    assert updates["head"]["kernel"] == pytest.approx(-PEAK * (1 + 0.9 + 0.81))
    plain = update(ONES, name="sgd", momentum=0.0, steps=3)
    assert plain["head"]["kernel"] == pytest.approx(-PEAK)


def test_gradients_are_clipped_at_their_global_norm():
    norm = np.sqrt(6 + 2 + 10)
    updates = update(ONES, name="sgd", momentum=0.0, grad_clip_norm=1.5)
    assert updates["head"]["kernel"] == pytest.approx(-PEAK * 1.5 / norm)
    loose = update(ONES, name="sgd", momentum=0.0, grad_clip_norm=norm + 1)
    assert loose["head"]["kernel"] == pytest.approx(-PEAK)


def test_frozen_parameters_stay_and_do_not_count_for_clipping():
    options = {"name": "sgd", "grad_clip_norm": 1.0, "weight_decay": 0.1}
    options |= {"freeze": ("^embedding",), "weight_decay_mask": ("kernel",)}
    updates = update(ONES, **options)
    assert not updates["embedding"]["kernel"].any()
    assert not updates["embedding"]["bias"].any()
    expected = -PEAK * (1 / np.sqrt(10) + 0.1 * 2.0)
    assert updates["head"]["kernel"] == pytest.approx(expected)


def test_what_is_frozen_for_now_does_not_count_for_clipping():
    clipped = {"name": "sgd", "momentum": 0.0, "grad_clip_norm": 1.0}
    options = clipped | {"freeze": ("^embedding",), "freeze_steps": 2}
    frozen = update(ONES, steps=2, **options)
    assert not frozen["embedding"]["kernel"].any()
    assert frozen["head"]["kernel"] == pytest.approx(-PEAK / np.sqrt(10))
    thawed = update(ONES, steps=3, **options)
    jax.tree.map(np.testing.assert_array_equal, thawed, update(ONES, **clipped))


@pytest.mark.parametrize("name", ["prodigy", "dog", "momo_adam"])
def test_what_is_frozen_for_now_does_not_count_for_the_size_of_steps(name):
    options = {"name": name, "learning_rate": 1.0, "freeze": ("^embedding",)}
    for_now = update(ONES, steps=3, **options, freeze_steps=5)
    for_ever = update(ONES, steps=3, **options)
    assert for_ever["head"]["kernel"].all()
    jax.tree.map(np.testing.assert_array_equal, for_now, for_ever)


def test_what_never_moves_gets_no_gradient():
    def loss(params, **options):
        config = tiny_config(optim={"name": "sgd"} | options)
        total = lambda params: sum(x.sum() for x in jax.tree.leaves(params))
        return optim.without_frozen(total, config.optim)(params)

    grads = jax.grad(loss)(PARAMS)
    assert all(g.all() for g in jax.tree.leaves(grads))
    grads = jax.grad(lambda p: loss(p, freeze=("^embedding",)))(PARAMS)
    assert not grads["embedding"]["kernel"].any()
    assert grads["head"]["kernel"].all()
    # What moves later keeps its gradients, which warm its moments.
    for length in ("freeze_steps", "freeze_epochs", "freeze_fraction"):
        stated = {"freeze": ("^embedding",), length: 1}
        grads = jax.grad(lambda p, s=stated: loss(p, **s))(PARAMS)
        assert grads["embedding"]["kernel"].all()


def test_what_thaws_under_adam_starts_at_the_rate():
    options = {"name": "adam", "freeze": ("bias",), "freeze_steps": 200}
    update_ = update(ONES, steps=201, **options)["embedding"]["bias"]
    assert update_ == pytest.approx(-PEAK, rel=1e-3)


@pytest.mark.parametrize(("key", "steps"), [("steps", 2), ("epochs", 7)])
def test_freezing_ends_after_its_steps_or_epochs(key, steps):
    length = {f"freeze_{key}": 2 if key == "steps" else 1.0}
    options = {"name": "sgd", "momentum": 0.0, "freeze": ("bias",), **length}
    for taken, moved in ((steps, False), (steps + 1, True)):
        bias = update(ONES, steps=taken, **options)["embedding"]["bias"]
        assert bool(bias.any()) == moved


def test_adamw_is_adam_with_its_decoupled_weight_decay():
    stated = {"learning_rate": 0.1, "weight_decay": 0.3, "b2": 0.95}
    one, other = (tiny_config(optim=stated | {"name": n}) for n in ("adam", "adamw"))
    assert dataclasses.replace(other.optim, name="adam") == one.optim

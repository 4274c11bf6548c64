import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.training import train_state
from vit_jax.training.config import EmaConfig


def averages(values, decay, warmup=True):
    average = {"a": jnp.float32(100.0)}  # A start far away.
    for step, value in enumerate(values, 1):
        average = train_state.update_average(
            average,
            {"a": jnp.float32(value)},
            jnp.int32(step),
            EmaConfig(decay=decay, warmup=warmup),
        )
    return float(average["a"])


def test_average_of_a_short_run_forgets_its_start():
    assert averages([1.0] * 50, 0.9999) == pytest.approx(1.0, abs=1e-3)


def test_average_of_a_long_run_uses_the_decay():
    zero, one = ({"a": jnp.float32(x)} for x in (0, 1))
    ema = EmaConfig(decay=0.999)
    one = train_state.update_average(zero, one, jnp.int32(10**6), ema)
    assert float(one["a"]) == pytest.approx(0.001, rel=1e-3)


def test_average_follows_the_closed_form_of_the_first_steps():
    decays = [(1 + t) / (10 + t) for t in (1, 2)]
    expected = decays[1] * (decays[0] * 100 + (1 - decays[0]) * 3) + (1 - decays[1]) * 7
    assert averages([3.0, 7.0], 0.9999) == pytest.approx(expected, rel=1e-5)


def test_average_without_a_warmup_has_the_decay_of_timm_from_the_first_step():
    expected = 0.9 * (0.9 * 100 + 0.1 * 3) + 0.1 * 7
    assert averages([3.0, 7.0], 0.9, warmup=False) == pytest.approx(expected, rel=1e-6)


def test_average_stays_exactly_at_equal_parameters():
    params = {"a": jax.random.normal(jax.random.key(0), (11,))}
    ema = EmaConfig(decay=0.9)
    same = train_state.update_average(params, params, jnp.int32(4), ema)
    np.testing.assert_array_equal(same["a"], params["a"])

"""The range test of learning rates: the schedule, the judgement and a run."""

import csv

import numpy as np
import pytest
from helpers import tiny_config

from vit_jax.config import fields
from vit_jax.config.lengths import RunLength
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import rate_range
from vit_jax.training import schedules


def test_the_rate_rises_by_the_same_factor_at_each_step():
    schedule = schedules.ExponentialConfig(start_fraction=1e-4)
    rate = schedule.build(2.0, 0, RunLength(81, 1.0))
    rates = np.array([float(rate(step)) for step in range(81)])
    assert rates[0] == pytest.approx(2e-4) and rates[-1] == pytest.approx(2.0)
    np.testing.assert_allclose(rates[1:] / rates[:-1], 1e4 ** (1 / 80), rtol=1e-4)


def test_the_steepest_fall_is_suggested_and_a_divergence_ends_the_test():
    rates = np.geomspace(1e-5, 10, 121)
    # Falls around 0.01, and explodes from 1 on.
    losses = 2.3 - 2 / (1 + np.exp(-3 * np.log(rates / 0.01))) + (rates / 1.5) ** 6
    found = rate_range.judge(list(zip(rates.tolist(), losses.tolist(), strict=True)))
    # The average trails behind by some steps.
    assert 0.01 <= found.suggestion <= 0.04
    assert len(found.rates) == len(found.losses) == len(found.smoothed) < 121
    with pytest.raises(UserError, match="the loss did not fall"):
        rate_range.judge([(float(rate), float(rate)) for rate in rates])


@pytest.mark.slow
def test_a_run_is_tested_and_drawn(tmp_path):
    keys = {"name": "sgd", "learning_rate": 0.05, "warmup_steps": 2}
    said = []
    config = fields.to_json(tiny_config(optim=keys))
    found = rate_range.run(config, 60, said.append)
    assert said == ["range test: 60 steps with rates from 5e-05 to 5"]
    assert found.rates[0] == pytest.approx(5e-5, rel=1e-3)
    assert 1e-3 < found.suggestion < 5
    table, *figure = rate_range.write(found, tmp_path)
    with open(table) as file:
        rows = list(csv.DictReader(file))
    assert sum(row["series"] == "steps" for row in rows) == len(found.rates)
    for path in figure:  # With matplotlib.
        with open(path, "rb") as file:
            assert file.read(4) == b"\x89PNG"

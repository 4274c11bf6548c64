"""Goodput: the simulation beside the closed form, and what asynchronous writes change."""

import dataclasses
import math

import numpy as np
import pytest

from vit_jax.tools.planning import goodput
from vit_jax.tools.planning.goodput import Job

JOB = Job(work=4e4, stall=20.0, write=20.0, restart=60.0, mean_time=4e3)


def expected(job, interval):
    """Returns the expected share of the time that is work, if `write` is `stall`.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", FGCS 22(3), 2006.
    """
    part = math.expm1((interval + job.stall) / job.mean_time)
    return interval / (job.mean_time * math.exp(job.restart / job.mean_time) * part)


@pytest.mark.parametrize("interval", [100.0, 400.0, 2e3])
def test_the_simulation_agrees_with_the_closed_form(interval):
    found = 1 / goodput.simulate(JOB, interval, runs=400)
    error = found.std() / np.sqrt(len(found))
    # The closed form has a restart before the very first step too, a failed one at most
    # 0.3 % of the run.
    assert abs(found.mean() - 1 / expected(JOB, interval)) < 3 * error + 0.004


def test_youngs_interval_is_near_the_best():
    best = goodput.young(JOB)
    assert best == 400
    around = [expected(JOB, best * factor) for factor in (0.3, 1, 3)]
    assert around[1] > max(around[0], around[2])
    finest = max(expected(JOB, x) for x in np.linspace(100, 1_000, 200).tolist())
    assert around[1] > finest - 0.002


def test_without_failures_only_the_checkpoints_cost():
    job = dataclasses.replace(JOB, mean_time=1e12, write=50.0)
    # Ten stalls, and the last checkpoint's end is waited for.
    expected = 40_000 / (40_000 + 10 * 20 + 30)
    np.testing.assert_allclose(goodput.simulate(job, 4e3, runs=3), expected)


def test_a_checkpoint_counts_once_it_is_written():
    """Writing for as long as an interval loses up to another interval."""
    slow = dataclasses.replace(JOB, write=420.0)
    prompt, late = (goodput.simulate(job, 400.0).mean() for job in (JOB, slow))
    # A tenth of the time between failures more is lost at each.
    assert 0.05 < prompt - late < 0.12


def test_a_job_that_fails_more_often_than_it_restarts_goes_on():
    job = Job(work=100.0, stall=1.0, write=1.0, restart=50.0, mean_time=40.0)
    found = 1 / goodput.simulate(job, 10.0, runs=300)
    assert found.mean() == pytest.approx(1 / expected(job, 10.0), rel=0.1)

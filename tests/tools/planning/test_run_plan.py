"""The plan of a run: what follows from a step's costs and the assumptions."""

import dataclasses

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.tools.planning import goodput, run_plan
from vit_jax.tools.planning.analysis import Analysis, Roofline

FOUND = Analysis(
    settings={"batch_size": 1_000},
    parameters=10**9,
    params_bytes=0,
    moments_bytes=0,
    average_bytes=0,
    batch_bytes=0,
    flops=2e12,
    counted="",
    model_flops=1e12,
    limit_bytes=None,
    state_bytes=12 * 10**9,
    collectives=({"slices": False, "sent": 3e8}, {"slices": True, "sent": 2e7}),
    fits=True,
    roofline=Roofline(0.02, 0.01, 0.0, 0.0),
)


def plan_of(found=FOUND, stated=500, **assumed):
    given = run_plan.Assumptions(**assumed)
    return run_plan.make(found, 64, 16, 2_000_000, stated, 1e14, given), given


def test_what_a_run_needs():
    plan, assumed = plan_of(mfu=0.5, store=0.25, stall=1.0)
    # 1 TFLOP at half of 100 a second is as long as the floor; with less it is longer.
    assert plan.step_seconds == 0.02
    assert plan_of(mfu=0.1)[0].step_seconds == pytest.approx(0.1)
    assert plan.job.write == pytest.approx(12 / (16 * 0.25))
    assert plan.job.mean_time == pytest.approx(365 * 86_400 / 16)
    assert plan.young == round(goodput.young(plan.job) / 0.02)
    assert {500, plan.young} < set(plan.shares) and len(plan.shares) == 6
    # A checkpoint of a second every ten seconds.
    assert plan.shares[500].mean() == pytest.approx(10 / 11, abs=0.005)
    lines = {
        line[2:26].strip(): line[26:].split()[0]
        for line in run_plan.text(plan, dataclasses.replace(assumed, price=2.0))
        if line.startswith("  ") and line[26:].split()
    }
    assert lines["a step, ms"] == "20.0"
    assert lines["MB a chip sends, slice"] == "300.0"
    assert lines["MB a chip sends, slices"] == "20.0"
    # 50,000 images a second on 16 hosts.
    assert lines["images/s a host"] == "3,125"
    assert lines["CPUs a host"] == f"{3125 / 776:.1f}"
    assert lines["GB/s read, all hosts"] == "5.50"
    assert lines["GB of a checkpoint"] == "12.00"
    hours = float(lines["chip-hours"].replace(",", ""))
    best = max(found.mean() for found in plan.shares.values())
    assert hours == pytest.approx(2_000_000 * 0.02 / 3_600 * 64 / best, abs=1)
    row = run_plan.to_json(plan, assumed)
    assert row["shares"][500] == plan.shares[500].mean()
    assert row["assumed"]["store"] == 0.25


def test_a_run_shorter_than_an_interval():
    plan, _ = plan_of(
        dataclasses.replace(FOUND, roofline=Roofline(50.0, 0.0, 0.0, 0.0)), 0
    )
    assert plan.young < 500 and plan.stated == 0
    short = run_plan.make(FOUND, 4, 1, 10, 0, 1e14, run_plan.Assumptions())
    assert set(short.shares) == {10}
    np.testing.assert_allclose(short.shares[10], 0.25 / (0.25 + 24), rtol=0.02)


def test_assumptions_are_read_and_refused():
    assert run_plan.parse("") == run_plan.Assumptions()
    assert run_plan.parse("mfu=0.55,price=0") == run_plan.Assumptions(mfu=0.55)
    for text, message in (
        ("speed=3", "'speed' is no assumption; they are cpu_images, host_days"),
        ("mfu=fast", "'mfu=fast' is not a positive number"),
        ("mfu=0", "'mfu=0' is not a positive number"),
        ("store=inf", "'store=inf' is not"),
    ):
        with pytest.raises(UserError, match=message) as error:
            run_plan.parse(text)
        assert "\n" not in str(error.value)

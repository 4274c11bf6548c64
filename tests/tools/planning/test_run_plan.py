"""The plan of a run: what follows from a step's costs and the assumptions."""

import argparse
import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from benchmarks.compile import scale
from vit_jax import compile
from vit_jax.errors import UserError
from vit_jax.tools.planning import goodput, run_plan
from vit_jax.tools.planning.analysis import Analysis, Roofline
from vit_jax.training import config as configuration

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
    host_state_bytes=3 * 10**9,
    collectives=(
        {"slices": False, "sent": 3e8, "network": 0},
        {"slices": True, "sent": 2e7, "network": 0},
    ),
    fits=True,
    roofline=Roofline(0.02, 0.01, 0.0, 0.0),
)


def plan_of(found=FOUND, stated=(500, 0), **assumed):
    given = run_plan.Assumptions(**assumed)
    return run_plan.make(found, 64, 16, 2_000_000, stated, 1e14, given), given


def lines_of(plan, assumed):
    """Returns the name of each line of the report to its number; the first of a name."""
    found = {}
    for line in run_plan.text(plan, assumed):
        if line.startswith("  ") and line[26:].split():
            found.setdefault(line[2:26].strip(), line[26:].split()[0])
    return found


def test_hosts_of_gpus_send_at_the_rate_of_the_floor_and_not_at_that_of_slices():
    sent = {"slices": False, "sent": 3e8, "network": 1e8}
    plan, _ = plan_of(dataclasses.replace(FOUND, collectives=(sent,)), dcn=1e-6)
    assert (plan.sent_bytes, plan.bound) == ((3e8, 1e8), "mfu")


def test_a_size_of_the_data_that_is_assumed_stands_among_the_assumptions():
    plan, assumed = plan_of()
    assert (
        "--examples=303"
        in "\n".join(run_plan.text(plan, assumed, 303)).split("assumed").pop()
    )
    assert "--examples" not in "\n".join(run_plan.text(plan, assumed))
    assert run_plan.to_json(plan, assumed, 303)["assumed"]["examples"] == 303


def test_imagenet21k_is_counted_by_the_catalogue():
    config = configuration.load("b16_i21k", {})
    flags = argparse.Namespace(examples=0)
    examples, source = compile._examples(flags, config)
    assert (examples, source) == (14_145_922, "the catalogue")
    assert config.num_steps(examples) == pytest.approx(14_145_922 * 90 / 4096, abs=1)


def test_what_a_run_needs():
    plan, assumed = plan_of(mfu=0.5)
    # 1 TFLOP at half of 100 a second is as long as the floor; with less it is longer.
    assert plan.step_seconds == 0.02
    assert plan_of(mfu=0.1)[0].step_seconds == pytest.approx(0.1)
    # 20 MB between slices.
    slow, _ = plan_of(mfu=0.5, dcn=0.1)
    assert (slow.bound, slow.step_seconds) == ("dcn", pytest.approx(0.2))
    lines = lines_of(plan, dataclasses.replace(assumed, price=2.0))
    assert lines["ms per step"] == "20.0"
    assert lines["MB sent/chip, links"] == "300.0"
    assert lines["MB sent/chip, network"] == "20.0"
    # 50,000 images a second on 16 hosts.
    assert lines["images/s per host"] == "3,125"
    assert lines["CPUs per host"] == f"{3125 / 776:.1f}"
    assert lines["hosts needed"] == "1"
    assert plan.input_hosts(dataclasses.replace(assumed, host_cpus=5.0)) == 13
    assert lines["GB/s read, all hosts"] == "5.50"
    assert lines["GB per checkpoint"] == "12.00"
    hours = float(lines["chip-hours"].replace(",", ""))
    best = max(one.goodput for one in plan.checkpoints)
    assert hours == pytest.approx(2_000_000 * 0.02 / 3_600 * 64 / best, abs=1)


def test_checkpoints_on_disks_and_on_the_storage():
    plan, assumed = plan_of(
        mfu=0.5, copy=3.0, disk_write=1.5, disk_read=2.0, store=0.25, replace=100.0
    )
    local, storage = plan.checkpoints
    # 3 GB are on each host; together they write 12 GB to the storage.
    assert (local.host_bytes, storage.host_bytes) == (3e9, 12e9 / 16)
    assert local.job.stall == storage.job.stall == pytest.approx(1.0)
    assert local.job.write == pytest.approx(1 + 3 / 1.5)
    assert storage.job.write == pytest.approx(1 + 12 / (16 * 0.25))
    gone = assumed.notice + 100 + assumed.start
    assert local.job.restart == pytest.approx(gone + 3 / 2)
    assert storage.job.restart == pytest.approx(gone + 3 / 0.25)
    assert local.job.mean_time == pytest.approx(365 * 86_400 / 16)
    assert local.young == round(goodput.young(local.job) / 0.02)
    assert {500, local.young} < set(local.shares) and len(local.shares) == 6
    assert len(storage.shares) == 5 and storage.stated == 0
    # A stall of a second every ten seconds.
    assert local.shares[500].mean() == pytest.approx(10 / 11, abs=0.005)
    assert local.goodput == max(found.mean() for found in local.shares.values())
    row = run_plan.to_json(plan, assumed)
    assert row["checkpoints"][0]["shares"][500] == local.shares[500].mean()
    assert row["assumed"]["store"] == 0.25
    assert json.dumps(row)


def test_a_run_that_hosts_do_not_let_end_is_told():
    with pytest.raises(
        UserError, match="host_days=0.001 one of 16 hosts fails every 5.4 "
    ):
        plan_of(host_days=0.001)


def test_the_report_says_whose_word_an_input_is():
    plan, assumed = plan_of(mfu=0.5, store=0.25)
    words = {
        line.split(":")[0].split(" (")[0].split(",")[0].strip(): line
        for line in list(run_plan.text(plan, assumed))[-4:]
    }
    assert "cpu_images=776" in words["measured by us"]
    assert "host_cpus=112" in words["published"]
    assert "host_days=365" in words["assumed"] and "mfu" not in words["assumed"]
    assert words["set by --plan"] == "  set by --plan: mfu=0.5, store=0.25"


def test_a_run_shorter_than_an_interval():
    slow = dataclasses.replace(FOUND, roofline=Roofline(50.0, 0.0, 0.0, 0.0))
    local = plan_of(slow, (0, 0))[0].checkpoints[0]
    assert local.young < 500 and local.stated == 0
    given = run_plan.Assumptions()
    short = run_plan.make(FOUND, 4, 1, 10, (0, 0), 1e14, given).checkpoints[0]
    assert set(short.shares) == {10}
    # Ten steps, and the copy and the writing of 3 GB.
    held = 3 / given.copy + 3 / given.disk_write
    np.testing.assert_allclose(short.shares[10], 0.25 / (0.25 + held), rtol=0.02)


def test_tables_of_runs_are_made_from_their_rows(tmp_path, monkeypatch, capsys):
    """With inputs that differ from those of the rows."""
    found = dataclasses.replace(FOUND, peak_bytes=3 * 2**30)
    plan, assumed = plan_of(found)
    row = found.to_json() | {"plan": run_plan.to_json(plan, assumed)}
    rows = [row | {"name": "B/16 64"}, row | {"name": "G/14 64", "fits": False}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"--out={path}", "--table", "--plan=price=2,host_days=30"]
    monkeypatch.setattr("sys.argv", ["scale", *words])
    scale.main()
    out = capsys.readouterr().out
    assert "G/14 64 does not fit" in out
    step, feed, failures = (
        line.strip("| \n").split(" | ")
        for line in out.splitlines()
        if line.startswith("| B/16 64 ")
    )
    # The peak of v5e is twice that of this test.
    assert step[1:] == ["3.00", "20.0", "20.0", "floor", "300", "20.0"]
    assert feed[1:4] == ["50,000", "16", "1"]
    others = run_plan.parse("price=2,host_days=30")
    again = run_plan.make(found, 64, 16, 2_000_000, (500, 0), 197e12, others)
    assert failures[1:4] == [
        f"{again.days_of_steps:.2f}",
        f"{again.days_of_steps * 16 / 30:.1f}",
        f"{again.checkpoints[0].young:,}",
    ]
    assert failures[-1] == f"{2 * again.chip_hours:,.0f}"


def test_the_documentation_lists_the_defaults():
    text = (pathlib.Path(__file__).parents[3] / "docs" / "compile.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| ([\d., ]+) \|", text, re.MULTILINE)
    listed = {
        name: float(number.replace(",", ""))
        for names, numbers in rows
        for name, number in zip(
            re.findall(r"\w+", names), numbers.split(", "), strict=True
        )
    }
    assert listed == dataclasses.asdict(run_plan.Assumptions())


def test_assumptions_are_read_and_refused():
    assert run_plan.parse("") == run_plan.Assumptions()
    assert run_plan.parse("mfu=0.55,price=0") == run_plan.Assumptions(mfu=0.55)
    for text, message in (
        ("speed=3", "'speed' is not one of copy, cpu_images, dcn"),
        ("mfu=fast", "'mfu=fast' is not a positive number"),
        ("mfu=0", "'mfu=0' is not a positive number"),
        ("mfu=1.5", "'mfu=1.5' is not a positive number of at most 1: set one"),
        ("store=inf", "'store=inf' is not a positive number: set one"),
    ):
        with pytest.raises(UserError, match=message) as error:
            run_plan.parse(text)
        assert "\n" not in str(error.value)

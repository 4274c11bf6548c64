"""The compile verb with the real compiler for TPUs, on small models."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: pip install -e '.[tpu]' in the clone",
    ),
]
# A ViT of 3 blocks, large enough for the compiler to find work beside its exchanges.
SMALL = (
    "--config=configs/b16_i21k.py",
    "--config.model.width=512",
    "--config.model.num_heads=8",
    "--config.model.mlp_dim=2048",
    "--config.model.depth=3",
    "--config.model.dropout=0",
    "--config.data.num_classes=1000",
    "--config.batch_size=512",
)


def run(*words):
    done = subprocess.run(
        [sys.executable, "-m", "vit_jax.compile", *words],
        capture_output=True,
        text=True,
        timeout=1_200,
        check=False,
        # The verb itself says what the compiler must know.
        env={k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_"))},
    )
    assert done.returncode in (0, 3), done.stderr
    return done


@pytest.fixture(scope="module")
def sharded():
    done = run(
        *SMALL,
        "--topology=v5e:4x4",
        "--config.model.scan=true",
        "--config.model.remat_policy=full",
        "--config.mesh.fsdp=4",
        "--plan=mfu=0.5",
        "--json",
    )
    return json.loads(done.stdout)


def test_replicas_of_sharded_parameters_reduce_scatter_and_gather_beside_work(sharded):
    assert sharded["settings"]["mesh"] == {"data": 4, "fsdp": 4, "model": 1}
    rows = {(r["kind"], r["overlapped"]) for r in sharded["collectives"]}
    assert "reduce-scatter" in {kind for kind, _ in rows}
    assert ("all-gather", True) in rows
    purposes = {row["purpose"] for row in sharded["collectives"]}
    assert {"parameters", "gradients"} <= purposes
    assert purposes <= {"parameters", "gradients", "scalars"}


def test_sharded_parameters_and_moments_take_a_part_of_each_chip(sharded):
    whole = 4 * sharded["parameters"]
    assert whole / 4 < sharded["params_bytes"] < 1.1 * whole / 4
    assert 2 * whole / 4 < sharded["moments_bytes"] < 1.1 * 2 * whole / 4
    asked = sum(sharded[f"{name}_bytes"] for name in ("params", "moments", "batch"))
    assert asked <= sharded["argument_bytes"] < 1.5 * asked
    assert sharded["argument_bytes"] < sharded["peak_bytes"] < sharded["limit_bytes"]


def test_the_compilers_limit_is_that_of_the_chip(sharded):
    assert sharded["limit_bytes"] == 15.75 * 2**30


def test_a_plan_is_of_all_hosts_and_the_whole_state(sharded):
    plan = sharded["plan"]
    assert (plan["chips"], plan["hosts"]) == (16, 4)
    assert plan["assumed"]["mfu"] == 0.5
    # Parameters and Adam's moments in float32, and some counters.
    assert 0 <= plan["state_bytes"] - 12 * sharded["parameters"] < 1_000
    # The 4 chips of a host hold 2 of 4 parts, and all of what is not split.
    assert 0.5 < sharded["host_state_bytes"] / plan["state_bytes"] < 0.52
    local, storage = plan["checkpoints"]
    assert local["host_bytes"] == sharded["host_state_bytes"]
    assert storage["host_bytes"] == plan["state_bytes"] / 4
    slowest = max(sharded["roofline"]["floor"], sharded["model_flops"] / 0.5 / 197e12)
    assert plan["step_seconds"] == pytest.approx(slowest)


def test_floors_are_positive_and_the_products_are_counted(sharded):
    assert 1.1 < sharded["flops"] / sharded["model_flops"] < 4 / 3
    bounds = sharded["roofline"]
    assert bounds["compute"] == pytest.approx(sharded["flops"] / 197e12)
    assert bounds["floor"] >= max(bounds["compute"], bounds["memory"]) > 0


def test_products_of_the_compiled_program_are_those_of_the_trace(sharded):
    # Nothing is repeated where "model" splits nothing, so that the trace is exact.
    assert sharded["counted"] == "counted in the compiled program"
    assert sharded["unread_loops"] == 0
    assert sharded["flops"] == 476_809_003_008


def test_what_goes_between_slices_is_found():
    done = run(
        "--config=configs/b16_i21k.py:quick",
        "--config.data.num_classes=50",
        "--topology=v5e:2x2",
        "--slices=2",
        "--json",
    )
    rows = json.loads(done.stdout)["collectives"]
    between = [row for row in rows if row["slices"]]
    assert {row["kind"] for row in between} == {"all-reduce"}
    assert all(row["overlapped"] and row["sent"] > 0 for row in between)
    # Sums are scattered within a slice, summed across, and gathered.
    purposes = {row["purpose"] for row in rows}
    assert purposes <= {"gradients", "parameters", "scalars"}


def test_what_is_too_large_exits_with_3_and_offers_nothing_that_does_not_fit():
    done = run(
        "--config=configs/b16_i21k.py:quick",
        "--config.data.num_classes=21843",
        "--config.batch_size=400000",
        "--topology=v5e:1x1",
    )
    assert done.returncode == 3
    verdict, _, last = done.stdout.splitlines()[-3:]
    assert verdict.startswith("does not fit: needs ")
    assert verdict.endswith(" more than the limit of 15.75")
    assert last.startswith("no single change makes it fit; the smallest needs ")
    assert " GiB, with --config.optim.grad_accum_steps=400000; " in last


def test_strategies_are_compared_and_one_is_recommended(tmp_path):
    done = run(
        "--config=configs/b16_i21k.py:quick",
        "--config.data.num_classes=50",
        "--config.model.scan=true",
        "--topology=v5e:2x2",
        "--strategies",
        "--meshes=data=-1,fsdp=3",
        "--remat=none,full",
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert [line.split()[:2] for line in lines[2:4]] == [
        ["4x1x1", "none"],
        ["4x1x1", "full"],
    ]
    assert "does not compile: mesh.data=-1 x mesh.fsdp=3" in lines[4]
    assert lines[-1].startswith("the fastest that fits (lowest minimum time): --")


def test_the_step_is_kept_as_stablehlo(tmp_path):
    file = tmp_path / "step.mlirbc"
    done = run(
        "--config=configs/b16_i21k.py:quick",
        "--config.model.scan=true",
        "--topology=v4:2x2x1",
        f"--export={file}",
    )
    assert done.returncode == 0
    assert "4 x TPU v4 (1 x v4:2x2x1)" in done.stdout  # Both cores as one device.
    assert file.read_bytes().startswith(b"ML\xefR")
    assert f"StableHLO of the step: {file}" in done.stdout

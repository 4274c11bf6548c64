"""GPUs by name; and programs for them, where their compiler is installed."""

import json
import os
import subprocess
import sys

import pytest

from vit_jax import compile
from vit_jax.distributed import chips
from vit_jax.errors import UserError
from vit_jax.tools.planning import gpus, topology
from vit_jax.training import config as configuration


def test_gpus_are_a_kind_and_their_number_in_one_or_more_hosts():
    assert topology.parse("h100:8") == gpus.Gpus("h100", 1, 8)
    several = topology.parse("a100-40:4x8")
    assert several == gpus.Gpus("a100-40", 4, 8)
    assert (several.name, several.text) == ("a100-40:4x8", "a100-40:4x8")
    with pytest.raises(UserError, match="--slices=2 is for TPUs: .* h100:4x8"):
        topology.parse("h100:8", slices=2)


@pytest.mark.parametrize("name", ["v100", "a100", "a100-40", "h100", "h200", "b200"])
def test_what_xla_says_of_a_gpu_is_near_what_its_maker_says(name):
    gpu = gpus.GPUS[name]
    chip = chips.find(gpu.kind)
    assert gpu.memory == pytest.approx(chip.memory_bytes, rel=0.08)
    assert gpu.bandwidth == pytest.approx(chip.memory_bandwidth, rel=0.01)


def test_jax_leaves_a_part_of_the_memory_free(monkeypatch):
    place = topology.parse("h100:8")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert place.usable_memory(None) == int(0.75 * 84_942_979_072)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert place.usable_memory(None) == int(0.9 * 84_942_979_072)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 of 79.11 GiB" in place.memory_source


@pytest.mark.parametrize(
    ("place", "scan", "attention_impl"),
    [
        ("v5e:16x16", True, "auto"),
        ("h100:8", False, "auto"),
        ("v100:8", False, "einsum"),
    ],
)
def test_a_config_is_completed_as_on_the_devices(place, scan, attention_impl):
    config = configuration.load("b16_i21k")
    model = compile._placed(config, topology.parse(place)).model
    assert (model.scan, model.attention_impl) == (scan, attention_impl)


def test_blocks_that_are_recomputed_run_in_a_scan_on_a_gpu_too():
    config = configuration.load("b16_i21k", {"model.remat_policy": "full"})
    assert compile._placed(config, topology.parse("h100:8")).model.scan


def compile_step(*words):
    command = [sys.executable, "-m", "vit_jax.compile", *words]
    return subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=600
    )


@pytest.mark.skipif(gpus.has_compiler(), reason="the compiler for GPUs is installed")
def test_without_the_compiler_the_error_says_how_to_get_it():
    done = compile_step("--config=configs/b16_i21k.py:quick", "--topology=h100:8")
    assert done.returncode == 2
    assert "--topology=h100:8" in done.stderr
    assert "pip install -e '.[cuda]'" in done.stderr
    assert done.stderr.count("\n") == 1


PACKED = (
    "model.depth=2",
    "batch_size=16",
    "model.pool=gap",
    "data.train_transform=naflex(784, patch=16, pack=4)",
)


@pytest.mark.slow
@pytest.mark.skipif(not gpus.has_compiler(), reason="needs the extra cuda")
@pytest.mark.parametrize(
    ("recipe", "topology", "words"),
    [
        ("b16_i21k.py", "h100:1", PACKED),
        ("b16_i21k.py", "h100:1", ["model.depth=2", "batch_size=16"]),
        ("mae.py", "h100:1", ["model.depth=2", "batch_size=16"]),
        ("dino.py", "h100:2x2", ["model.depth=1", "batch_size=8"]),
    ],
)
def test_recipes_compile_with_the_attention_of_cudnn(recipe, topology, words, tmp_path):
    out = tmp_path / "step"
    done = compile_step(
        f"--config=configs/{recipe}",
        f"--topology={topology}",
        "--json",
        f"--out={out}",
        *(f"--config.{word}" for word in words),
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["fits"]
    kernels = row["kernels"]
    attention = "fmhaScaleBiasSoftmax" if words is PACKED else "fmhaSoftmax"
    assert kernels[f"__cudnn${attention}"] >= 2
    assert kernels[f"__cudnn${attention}Backward"] >= 2
    assert row["flops"] == pytest.approx(row["model_flops"], rel=0.3)
    hosts = {one["hosts"] for one in row["collectives"]}
    assert hosts == (set() if topology == "h100:1" else {2})
    assert {one["purpose"] for one in row["collectives"]} <= {"gradients", "scalars"}
    header = json.loads(out.read_bytes().partition(b"\n")[0])
    assert header["devices"].endswith("x NVIDIA H100 80GB HBM3")
    assert os.path.getsize(out) > 10_000


@pytest.mark.slow
@pytest.mark.skipif(not gpus.has_compiler(), reason="needs the extra cuda")
def test_parameters_are_gathered_within_a_host_and_gradients_summed_across():
    words = ["mesh.data=-1", "mesh.fsdp=4", "model.depth=2", "batch_size=16"]
    words += ["data.num_classes=1000"]
    done = compile_step(
        "--config=configs/b16_i21k.py",
        "--topology=h100:2x4",
        "--json",
        *(f"--config.{word}" for word in words),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["collectives"]
    gathered = [one for one in rows if one["purpose"] == "parameters"]
    assert {one["kind"] for one in gathered} == {"all-gather"}
    assert {(one["hosts"], one["network"]) for one in gathered} == {(1, 0)}
    assert {one["hosts"] for one in rows if one["kind"] == "all-reduce"} >= {2}
    assert {one["purpose"] for one in rows} <= {"parameters", "gradients", "scalars"}


@pytest.mark.slow
@pytest.mark.skipif(not gpus.has_compiler(), reason="needs the extra cuda")
def test_a_resnet_of_odd_sizes_compiles():
    # XLA's tiles for products in Triton end the process here: "45 vs. 18".
    sizes = ["model.stage_depths=(1,1,1)", "model.stem_width=32", "batch_size=2"]
    sizes += ["data.image_size=(40,70)", "model.variant=R50x1"]
    done = compile_step(
        "--config=configs/bit_hyperrule.py",
        "--topology=h100:1",
        *(f"--config.{word}" for word in sizes),
    )
    assert done.returncode == 0, done.stderr

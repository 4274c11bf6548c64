"""Names of TPU slices, and what the compiler says of memory."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from helpers import run_command
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit_jax.distributed import chips
from vit_jax.errors import UserError
from vit_jax.tools.planning import analysis, topology


def test_a_topology_is_a_generation_and_the_sides_of_its_torus():
    found = topology.parse("v5p:4x4x8", slices=3)
    assert found == topology.Slices("v5p", (4, 4, 8), 3)
    assert found.name == "v5p:4x4x8"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("v9:4x4", r"no TPU or GPU 'v9' is known; known are.* v5e:16x16.* h100:8"),
        ("h100", "'' is not a number of GPUs: write it as h100:8, .* as h100:4x8"),
        ("h100:2x2x2", "'2x2x2' is not a number of GPUs"),
        ("h100:0", "'0' is not a number of GPUs"),
        ("v5e", "'' is not a shape of v5e, which has 2 axes: write it as v5e:16x16"),
        ("v5e:16", "'16' is not a shape of v5e"),
        ("v5e:4x4x4", "'4x4x4' is not a shape of v5e"),
        ("v4:4x4", "'4x4' is not a shape of v4, which has 3 axes"),
        ("v5e:0x4", "'0x4' is not a shape"),
        ("v5e:4xx4", "'4xx4' is not a shape"),
        ("v5e:3x4", "a side of 3 chips does not divide into hosts of 2 x 2"),
    ],
)
def test_a_topology_that_is_not_there_is_refused_with_one_that_is(text, match):
    with pytest.raises(UserError, match=match):
        topology.parse(text)


def test_without_libtpu_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[tpu\]' in the clone"):
        topology.parse("v5e:4x4").devices()


@pytest.mark.parametrize(
    ("message", "wanted", "limit"),
    [
        (
            "Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeds",
            20.5,
            15.75,
        ),
        (
            "required for HLO temporaries (804.00G) exceeds available HBM (30.75G).",
            804,
            30.75,
        ),
    ],
)
def test_the_compilers_words_about_memory_become_numbers(message, wanted, limit):
    found = topology.parse_shortage(message)
    assert (found.wanted, found.limit) == (wanted * 2**30, limit * 2**30)


def test_another_error_is_no_shortage_of_memory():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.5M"
    assert topology.parse_shortage(message) is None


def test_bytes_of_a_device_are_those_of_its_part():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    shapes = {
        "whole": jax.ShapeDtypeStruct((3, 5), jnp.float32),
        "split": jax.ShapeDtypeStruct((12, 6), jnp.bfloat16),
        "key": jax.eval_shape(jax.random.key, 0),
    }
    places = {
        "whole": NamedSharding(mesh, PartitionSpec()),
        "split": NamedSharding(mesh, PartitionSpec("a", "b")),
        "key": NamedSharding(mesh, PartitionSpec()),
    }
    assert analysis.bytes_per_device(shapes, places) == 60 + 3 * 3 * 2 + 8


def test_the_verb_refuses_an_unknown_topology():
    words = ["--config=configs/b16_i21k.py:quick", "--topology=v5x:4x4"]
    with pytest.raises(
        UserError, match="--topology=v5x:4x4: no TPU or GPU 'v5x' is known"
    ):
        run_command("compile", words)


def test_every_generation_is_a_chip_whose_peak_is_known():
    kinds = {
        "v2": "TPU v2",
        "v3": "TPU v3",
        "v4": "TPU v4",
        "v5e": "TPU v5 lite",
        "v5p": "TPU v5",
        "v6e": "TPU v6 lite",
        "tpu7x": "TPU7x",
    }
    assert kinds.keys() == topology.GENERATIONS.keys()
    assert all(chips.find(kind) for kind in kinds.values())

"""What is known of a step before a compiler, and what the verb says of it."""

import dataclasses
import functools
import pathlib
import re

import jax
import pytest

from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tools.planning import analysis, hlo, report, strategies
from vit_jax.tools.planning.analysis import Roofline
from vit_jax.training import config as configuration
from vit_jax.training import train_setup

QUICK = str(pathlib.Path(__file__).parents[3] / "configs/b16_i21k.py") + ":quick"
GIB = 2**30


@functools.cache
def flops(**keys):
    """Counts a step of 3 layers, a device."""
    words = {"model.depth": 3, "data.num_classes": 7, "ema.decay": 0.5, **keys}
    config = configuration.load(QUICK, words)
    mesh = meshes.create(config.mesh, jax.devices())
    program = train_setup.build(config, mesh, 20)
    traced = program.train_step.trace(program.layout.shapes, program.layout.batch)
    found = analysis._before(program, traced, config, mesh, 20, None)
    return found.flops, found.model_flops


@pytest.mark.parametrize(
    "remat", [pytest.param("none", marks=pytest.mark.slow), "full"]
)
def test_layers_under_a_scan_count_as_often_as_they_run(remat):
    unrolled, model = flops(**{"model.remat_policy": remat})
    scanned, same_model = flops(**{"model.remat_policy": remat, "model.scan": True})
    assert scanned == unrolled
    assert model == same_model
    # One image a device: 4 patches of 16 x 16 x 3 numbers, 5 tokens of width 16.
    embedding = 4 * (16 * 16 * 3) * 16
    # Of the images no derivative is taken; a block's last layer is not computed again.
    block = 3 * 5 * 16 * 16 + 2 * 5 * 5 * 16 + 5 * 16 * 16 + 5 * 16 * 32
    again = 3 * block if remat == "full" else 0
    assert unrolled == model - 2 * embedding + 2 * again


@pytest.mark.slow
def test_products_of_a_scan_are_not_what_a_trace_shows_once():
    deep, _ = flops(**{"model.depth": 6, "model.scan": True})
    shallow, _ = flops(**{"model.remat_policy": "none", "model.scan": True})
    layers = 3 * 2 * 3 * 11_040  # 3 more of them, 2 to a product, 3 passes.
    assert deep - shallow == layers


SETTINGS = {
    "mesh": {"data": 256, "fsdp": 1, "model": 1},
    "dcn": {"dcn_data": 1, "dcn_fsdp": 1},
    "variant": "B/16",
    "batch_size": 4096,
    "dtype": "bfloat16",
    "scan": False,
    "remat_policy": "none",
    "attention_impl": "auto",
    "mu_dtype": "float32",
    "grad_accum_steps": 1,
    "average": False,
}
FOUND = analysis.Analysis(
    settings=SETTINGS,
    platform="tpu",
    parameters=100,
    params_bytes=GIB,
    moments_bytes=2 * GIB,
    average_bytes=0,
    batch_bytes=0,
    flops=12e12,
    counted="counted in the trace",
    model_flops=10e12,
    limit_bytes=16 * GIB,
    argument_bytes=4 * GIB,
    peak_bytes=10 * GIB,
    fits=True,
    moved_bytes=5_000_000_000,
    roofline=Roofline(0.06, 0.01, 0.0, 0.02),
)


def test_the_report_says_whose_word_each_number_is():
    text = re.sub(" {2,}", " ", report.text(FOUND, "heading"))
    assert text.startswith("heading\nmesh data 256 x fsdp 1 x model 1; dtype bfloat16")
    assert "peak 10.00 reported by the compiler" in text
    assert "activations, gradients 6.00 the peak without arguments" in text
    assert "fits: 6.00 GiB of 16.00 to spare" in text
    assert "the program computes 1.200 times as much" in text
    assert "not a prediction" in text
    assert "floor 80.00 bound by compute; at most 51,200" in text


def test_what_grows_with_the_batch_is_a_warning_where_parameters_are_copied():
    row = {
        "kind": "all-gather",
        "dtype": "bf16",
        "overlapped": True,
        "slices": False,
        "hosts": 1,
    }
    row |= {"count": 2, "bytes": 616_000_000, "sent": 539_000_000, "network": 0}
    gathered = row | {"purpose": "the batch", "place": "embedding/layout_constraint"}
    expected = row | {"purpose": "contrastive", "place": ""}
    found = dataclasses.replace(FOUND, collectives=(gathered, expected))
    (line,) = (x for x in report.text(found, "").splitlines() if "warning" in x)
    assert "all-gather, 2 x 308.00 MB" in line
    assert line.endswith("embedding/layout_constraint")
    split = SETTINGS | {"mesh": {"data": 2, "fsdp": 1, "model": 128}}
    found = dataclasses.replace(found, settings=split)
    assert "warning" not in report.text(found, "")


def test_what_does_not_fit_says_by_how_much():
    large = dataclasses.replace(FOUND, fits=False, peak_bytes=20 * GIB)
    line = report.verdict(large)
    assert line == "does not fit: needs 20.00 GiB, 4.00 more than the limit of 16.00"
    assert "Collectives" not in report.text(large, "heading")


def test_an_error_that_is_not_about_memory_is_shown():
    found = analysis._refused(FOUND, "INTERNAL: the compiler\nbroke")
    failed = dataclasses.replace(found, peak_bytes=0, fits=False)
    assert report.verdict(failed) == "does not compile: INTERNAL: the compiler broke"


def test_the_fastest_is_of_those_that_fit():
    slow = dataclasses.replace(FOUND, roofline=Roofline(0.2, 0.0, 0.0, 0.0))
    large = dataclasses.replace(FOUND, fits=False, roofline=None)
    assert strategies.fastest([slow, large, FOUND]) is FOUND
    assert strategies.fastest([large]) is None


def test_one_whose_floor_is_too_low_is_not_the_fastest():
    unread = dataclasses.replace(
        FOUND, unread_loops=2, roofline=Roofline(1e-3, 0.0, 0.0, 0.0)
    )
    assert strategies.fastest([unread, FOUND]) is FOUND
    assert strategies.fastest([unread]) is unread
    assert strategies.line(unread).endswith(
        "2 loops are counted once: the floor is too low"
    )
    assert "2 loops are counted once, here and below" in report.text(unread, "")


def test_meshes_are_read_from_words():
    assert strategies.parse_meshes("data=-1,fsdp=4+model=2") == [
        {"data": -1, "fsdp": 1, "model": 1},
        {"data": -1, "fsdp": 4, "model": 2},
    ]
    with pytest.raises(UserError, match="'depth=3' is not an axis with a size"):
        strategies.parse_meshes("fsdp=4,depth=3")


def test_meshes_to_compare_divide_the_devices():
    for devices in (1, 4, 16, 64, 256, 24):
        for sizes in strategies.meshes_for(devices, model=True):
            assert devices % (sizes["fsdp"] * sizes["model"]) == 0


def test_a_mesh_that_does_not_fit_is_a_row_and_the_others_are_compiled(monkeypatch):
    config = configuration.load(QUICK)
    seen = []

    def analyse(trial, mesh, examples, limit):
        seen.append((dict(mesh.shape), trial.model.remat_policy, trial.model.scan))
        return FOUND

    monkeypatch.setattr(analysis, "analyse", analyse)
    sizes = strategies.parse_meshes("data=-1,fsdp=3,fsdp=2")
    rows = strategies.compare(
        config, jax.devices(), 20, None, sizes, ("none", "full"), (False, True)
    )
    errors = [row.error for row in rows]
    assert [bool(e) for e in errors] == [False] * 4 + [True] * 2 + [False] * 4
    assert errors[4].startswith("mesh.data=-1 x mesh.fsdp=3")
    whole = {"data": 8, "fsdp": 1, "model": 1}
    halves = {"data": 4, "fsdp": 2, "model": 1}
    ways = [("none", False), ("full", False), ("none", True), ("full", True)]
    assert seen == [(mesh, *way) for mesh in (whole, halves) for way in ways]


def test_what_a_model_axis_repeats_is_not_hidden():
    split = counted({"mesh.model": 2})
    assert split.endswith(
        "; a lower bound: each of the devices of mesh.model=2 repeats what is not split"
    )
    assert counted({}) == analysis.TRACED
    text = report.text(dataclasses.replace(FOUND, counted=split), "")
    assert "a lower bound: each of the devices of mesh.model=2" in text


def counted(keys):
    """Says how the products of a step are counted before a compiler."""
    config = configuration.load(QUICK, keys)
    mesh = meshes.create(config.mesh)
    program = train_setup.build(config, mesh, 20)
    traced = program.train_step.trace(program.layout.shapes, program.layout.batch)
    return analysis._before(program, traced, config, mesh, 20, None).counted


PROGRAM = """
HloModule m

ENTRY %main (d: bf16[32,512], e: bf16[512,10]) -> bf16[32,10] {
  %d = bf16[32,512]{1,0} parameter(0)
  %e = bf16[512,10]{1,0} parameter(1)
  ROOT %c = bf16[32,10]{1,0} convolution(%d, %e), dim_labels=bf_io->bf
}
"""


@pytest.mark.parametrize(
    ("flops", "counted", "expected"),
    [
        (100.0, analysis.TRACED, (2.0 * 32 * 512 * 10, analysis.COMPILED)),
        # A kernel's are not in the program, nor are those that became something else.
        (
            100.0,
            analysis.KERNEL + "; a lower bound",
            (100.0, analysis.KERNEL + "; a lower bound"),
        ),
        (1e9, analysis.TRACED, (1e9, analysis.TRACED)),
    ],
)
def test_products_are_those_of_the_compiled_program_where_it_shows_them(
    flops, counted, expected
):
    found = dataclasses.replace(FOUND, flops=flops, counted=counted)
    assert analysis._products(found, hlo.parse(PROGRAM)) == expected


@pytest.mark.slow  # It compiles a training step: 20 s and more.
def test_what_a_model_axis_repeats_counts_on_each_device():
    words = {"model.depth": 2, "data.num_classes": 7, "mesh.model": 2}
    config = configuration.load(QUICK, words)
    mesh = meshes.create(config.mesh)
    found = analysis.analyse(config, mesh, 20, None)
    assert found.counted == analysis.COMPILED
    traced, _ = flops(**words, **{"ema.decay": 0.0})
    # Two images a device: patches and, thrice, the representation and the classifier.
    whole = 2 * 2 * (2 * 4 * (16 * 16 * 3) * 16 + 3 * 16 * 16 + 3 * 16 * 7)
    assert found.flops == traced + whole / 2


def test_what_is_traced_counts_as_what_is_called():
    def function(x):
        return x @ x.T

    x = jax.ShapeDtypeStruct((3, 5), "float32")
    traced = jax.jit(function).trace(x)
    assert cost.macs_of(traced.jaxpr.jaxpr) == cost.macs(function, x) == 3 * 5 * 3

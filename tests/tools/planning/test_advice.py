"""Flags that are advised: configs take them, and they are the strategy that was meant."""

import dataclasses
import pathlib

import jax
import pytest

from vit_jax import cli, compile
from vit_jax.config import loading
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.tools.planning import analysis, report, strategies
from vit_jax.training import config as configuration
from vit_jax.training import train_step

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
QUICK = f"{CONFIGS}/b16_i21k.py:quick"
RESNET = f"{CONFIGS}/bit_hyperrule.py:model=R50x1,dataset=cifar100,quick"
EXAMPLES = 20


class Fake:
    """A device of a slice, of which only its place is looked at."""

    platform = device_kind = "fake"

    def __init__(self, number, size):
        self.id, self.process_index, self.slice_index = number, number, number // size


def overrides(words):
    """Reads flags as the command line does."""
    pairs = [word.removeprefix("--config.").partition("=") for word in words.split()]
    return {key: loading.parse_override(value) for key, _, value in pairs}


def settings(spec, keys, devices):
    config = configuration.load(spec, keys)
    shape = meshes.arrange(config.mesh, devices).shape
    rows = config.batch_size // (shape[0] * shape[1])
    assert rows % config.optim.grad_accum_steps == 0
    return analysis.settings(config, dict(zip(meshes.AXES, shape, strict=True)))


def ways(found):
    words = report.advice(found).removeprefix("try ").replace(" or ", ", ")
    return words.split(", ")


@pytest.mark.parametrize(
    ("spec", "keys", "count"),
    [
        (QUICK, {}, 4),
        (QUICK, {"model.variant": "R+Ti/16"}, 4),
        (RESNET, {}, 3),
    ],
    ids=["vit", "hybrid", "resnet"],
)
def test_what_is_advised_is_a_program_that_can_be_built(spec, keys, count):
    small = {"sharding.min_size": 512, "data.num_classes": 16}
    keys = {**keys, **small, "ema.decay": 0.5, "batch_size": 8}
    mesh = meshes.create(configuration.load(spec, keys).mesh)
    found = analysis.settings(configuration.load(spec, keys), dict(mesh.shape))
    advised = ways(found)
    assert len(advised) == count
    assert any("mesh.fsdp" in way for way in advised)
    for way in advised:
        config = configuration.load(spec, {**keys, **overrides(way)})
        mesh = meshes.create(config.mesh)
        train_step.build_train_setup(config, mesh, EXAMPLES)
        assert analysis.settings(config, dict(mesh.shape)) != found


@pytest.mark.parametrize("spec", [QUICK, RESNET], ids=["vit", "resnet"])
@pytest.mark.parametrize(
    ("devices", "keys"),
    [
        (24, {"mesh.data": 24}),
        (10, {}),
        (7, {}),
        (1, {}),
        (24, {"mesh.data": 6, "mesh.fsdp": 4}),
        (24, {"mesh.data": 24, "mesh.dcn_data": 6}),
        (24, {"mesh.data": 2, "mesh.fsdp": 12, "mesh.dcn_fsdp": 6}),
    ],
)
def test_what_is_advised_fits_devices_slices_and_batch(spec, devices, keys):
    fakes = [Fake(n, 4) for n in range(devices)]
    keys = {"optim.grad_accum_steps": 3, "batch_size": 3 * 5 * devices, **keys}
    if devices % 4:
        fakes = [Fake(n, devices) for n in range(devices)]
    found = settings(spec, keys, fakes)
    advised = ways(found)
    assert ("mesh.fsdp" in advised[0]) == (found["mesh"]["fsdp"] == 1 and devices > 7)
    assert "--config.optim.grad_accum_steps=15" in advised
    for way in advised:
        changed = settings(spec, {**keys, **overrides(way)}, fakes)
        assert changed != found
        assert changed["batch_size"] == found["batch_size"]


def test_one_image_a_device_is_not_cut_into_microbatches():
    found = settings(QUICK, {"batch_size": 8}, [Fake(n, 8) for n in range(8)])
    assert "grad_accum_steps" not in report.advice(found)
    nothing = found | {
        "mesh": {"data": 1, "fsdp": 8, "model": 1},
        "remat_policy": None,
        "mu_dtype": "bfloat16",
        "dtype": "bfloat16",
        "average": False,
    }
    assert report.advice(nothing) == "try a larger slice or a smaller batch"


def rows(spec, keys, sizes, devices, monkeypatch, **words):
    """Returns what would be compared, without a compiler."""

    def analyse(trial, mesh, examples, limit):
        return dataclasses.replace(
            strategies.unfit(trial, ""),
            settings=analysis.settings(trial, dict(mesh.shape)),
            fits=True,
        )

    monkeypatch.setattr(analysis, "analyse", analyse)
    config = configuration.load(spec, keys)
    return list(strategies.compare(config, devices, EXAMPLES, None, sizes, **words))


@pytest.mark.parametrize("spec", [QUICK, RESNET], ids=["vit", "resnet"])
@pytest.mark.parametrize(
    "keys", [{}, {"mesh.data": 8}, {"mesh.fsdp": 8, "mesh.data": 1}]
)
def test_flags_of_a_row_make_that_row_again(spec, keys, monkeypatch):
    sizes = strategies.parse_meshes("data=-1,fsdp=4,data=2+fsdp=4,fsdp=-1+data=2")
    found = rows(spec, keys, sizes, jax.devices(), monkeypatch, scans=(False, True))
    assert len(found) == len(sizes) * 2 * len(strategies.REMAT)
    for row in found:
        config = configuration.load(spec, {**keys, **overrides(strategies.flags(row))})
        mesh = meshes.create(config.mesh)
        assert analysis.settings(config, dict(mesh.shape)) == row.settings
        assert len(strategies.line(row)) == len(strategies.line())
    only = "remat" in strategies.flags(found[0])
    assert only == (spec == QUICK)


def test_flags_name_the_slices_where_the_config_does():
    fakes = [Fake(n, 4) for n in range(8)]
    found = settings(QUICK, {"mesh.data": 4, "mesh.fsdp": 2, "mesh.dcn_data": 2}, fakes)
    row = strategies.unfit(configuration.load(QUICK), "")
    words = strategies.flags(dataclasses.replace(row, settings=found))
    assert words == (
        "--config.mesh.data=4 --config.mesh.fsdp=2 --config.mesh.model=1 "
        "--config.mesh.dcn_data=2 --config.mesh.dcn_fsdp=1 "
        "--config.model.remat_policy=none --config.model.scan=True"
    )
    assert settings(QUICK, overrides(words), fakes) == found


def test_all_policies_that_there_are_are_compared(monkeypatch):
    assert set(strategies.REMAT) == stacking.REMAT_POLICIES.keys()
    sizes = strategies.parse_meshes("data=-1")
    found = rows(QUICK, {}, sizes, jax.devices(), monkeypatch)
    assert [row.settings["remat_policy"] for row in found] == list(strategies.REMAT)
    assert "attention" in strategies.REMAT


@pytest.mark.parametrize(
    "text", ["fsdp=--4", "fsdp=4+fsdp=8", "fsdp", "rows=2", "", "-"]
)
def test_meshes_that_cannot_be_read_are_named(text):
    with pytest.raises(UserError, match="--meshes: .* is not an axis with a size"):
        strategies.parse_meshes(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--export=step", "--strategies"], "--export is of one program"),
        (["--plan", "--strategies"], "--plan is of one program"),
        (["--plan=speed=3"], "--plan: 'speed' is no assumption"),
        (["--meshes=fsdp=4"], "--meshes is read with --strategies only"),
        (["--remat=full"], "--remat is read with --strategies only"),
        (["--scan=true"], "--scan is read with --strategies only"),
        (["--export=no/such/folder/step"], "there is no folder .*no/such/folder"),
        (["--strategies", "--remat=full,some"], "--remat: 'some' is not one of none,"),
    ],
)
def test_flags_that_would_fail_late_are_refused_at_once(words, message):
    flags = cli.parse(
        compile.parser(), [f"--config={QUICK}", "--topology=v5e:4x4", *words]
    )
    with pytest.raises(UserError, match=message):
        compile.main(flags)

"""Changes that are offered: configs take them, they are what was meant, and they fit."""

import dataclasses
import pathlib

import jax
import pytest

from vit_jax import compile
from vit_jax.command_line import cli
from vit_jax.config import loading
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import repetition
from vit_jax.tools.planning import analysis, report, strategies
from vit_jax.training import config as configuration
from vit_jax.training import train_setup

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
    return [way for sizes in strategies.changes(found) for way in sizes]


@pytest.mark.usefixtures("all_devices")
@pytest.mark.parametrize(
    ("spec", "keys", "count"),
    [
        (QUICK, {}, 4),
        pytest.param(QUICK, {"model.variant": "R+Ti/16"}, 4, marks=pytest.mark.slow),
        (RESNET, {}, 3),
    ],
    ids=["vit", "hybrid", "resnet"],
)
def test_what_is_advised_is_a_program_that_can_be_built(spec, keys, count):
    small = {"sharding.min_size": 512, "data.num_classes": 16}
    keys = {**keys, **small, "ema.decay": 0.5, "batch_size": 8}
    mesh = meshes.create(configuration.load(spec, keys).mesh)
    found = analysis.settings(configuration.load(spec, keys), dict(mesh.shape))
    kinds = strategies.changes(found)
    assert len(kinds) == count
    assert kinds[0][0] == {"mesh.data": 4, "mesh.fsdp": 2}
    for sizes in kinds:
        config = configuration.load(spec, {**keys, **sizes[-1]})
        mesh = meshes.create(config.mesh)
        train_setup.build(config, mesh, EXAMPLES)
        assert analysis.settings(config, dict(mesh.shape)) != found


@pytest.mark.parametrize(
    ("spec", "devices", "keys"),
    [
        (QUICK, 24, {"mesh.data": 24}),
        (RESNET, 10, {}),
        (QUICK, 7, {}),
        (QUICK, 1, {}),
        (RESNET, 24, {"mesh.data": 6, "mesh.fsdp": 4}),
        (QUICK, 24, {"mesh.data": 24, "mesh.dcn_data": 6}),
        (QUICK, 24, {"mesh.data": 2, "mesh.fsdp": 12, "mesh.dcn_fsdp": 6}),
    ],
)
def test_what_is_advised_fits_devices_slices_and_batch(spec, devices, keys):
    fakes = [Fake(n, 4) for n in range(devices)]
    keys = {"optim.grad_accum_steps": 3, "batch_size": 3 * 5 * devices, **keys}
    if devices % 4:
        fakes = [Fake(n, devices) for n in range(devices)]
    found = settings(spec, keys, fakes)
    can_shard = found["mesh"]["data"] // found["dcn"]["dcn_data"] % 2 == 0
    assert any("mesh.fsdp" in way for way in ways(found)) == can_shard
    microbatches = [way.get("optim.grad_accum_steps") for way in ways(found)]
    assert [n for n in microbatches if n] == [5, 15]
    for way in ways(found):
        changed = settings(spec, {**keys, **way}, fakes)
        assert changed != found
        assert changed["batch_size"] == found["batch_size"]


def test_one_image_a_device_is_not_cut_into_microbatches():
    found = settings(QUICK, {"batch_size": 8}, [Fake(n, 8) for n in range(8)])
    assert not any("optim.grad_accum_steps" in way for way in ways(found))
    nothing = found | {
        "mesh": {"data": 1, "fsdp": 8, "model": 1},
        "remat_policy": None,
        "mu_dtype": "bfloat16",
        "dtype": "bfloat16",
        "average": False,
    }
    assert strategies.changes(nothing) == []
    assert "larger slice or a smaller batch" in "".join(report.remedies([]))


GIB = 2**30
LIMIT = 16 * GIB
ARGUMENTS = {"mu": 2, "rest": 4}  # GiB of one chip.


def offered(activations, keys, monkeypatch):
    """Returns what is said of a program of so many GiB, and how many were compiled."""
    compiled = []

    def analyse(trial, mesh, examples, limit):
        optim = trial.optim
        moments = ARGUMENTS["mu"] / (2 if optim.mu_dtype == "bfloat16" else 1)
        state = (moments + ARGUMENTS["rest"]) / mesh.shape["fsdp"]
        size = int((state + activations / optim.grad_accum_steps) * GIB)
        compiled.append(size)
        return dataclasses.replace(
            strategies.unfit(trial, ""),
            settings=analysis.settings(trial, dict(mesh.shape)),
            peak_bytes=size,
            limit_bytes=limit,
            fits=size <= limit,
        )

    monkeypatch.setattr(analysis, "analyse", analyse)
    config = configuration.load(QUICK, {"model.remat_policy": "full", **keys})
    devices = jax.devices()
    found = analysis.analyse(config, meshes.create(config.mesh, devices), 20, LIMIT)
    ways = strategies.remedies(config, devices, found, EXAMPLES, LIMIT)
    return list(report.remedies(ways)), len(compiled) - 1


def test_what_is_offered_was_compiled_to_fit(monkeypatch):
    # 8 devices of 36 images: 6 + 45 GiB, where 5 microbatches would do but divide none.
    lines, _ = offered(45, {"batch_size": 288}, monkeypatch)
    assert lines == ["  fits with --config.optim.grad_accum_steps=6: 13.50 GiB"]
    # 6 + 11 GiB: two parts of the parameters are enough, and half a moment.
    lines, _ = offered(11, {"batch_size": 8}, monkeypatch)
    assert lines == [
        "  fits with --config.mesh.data=4 --config.mesh.fsdp=2: 14.00 GiB",
        "  fits with --config.optim.mu_dtype=bfloat16: 16.00 GiB",
    ]


def test_what_helps_too_little_is_not_offered_but_the_least_is_told(monkeypatch):
    lines, compiled = offered(100, {"batch_size": 32}, monkeypatch)
    assert len(lines) == 1
    assert (
        "the smallest needs 31.00 GiB, with --config.optim.grad_accum_steps=4"
        in lines[0]
    )
    assert compiled == 3  # Of every change the largest alone.


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


@pytest.mark.parametrize(
    ("spec", "keys"), [(QUICK, {"mesh.fsdp": 8, "mesh.data": 1}), (RESNET, {})]
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
    keys = {"mesh.data": 4, "mesh.fsdp": 2, "mesh.dcn_data": 2, "model.scan": True}
    found = settings(QUICK, keys, fakes)
    row = strategies.unfit(configuration.load(QUICK), "")
    words = strategies.flags(dataclasses.replace(row, settings=found))
    assert words == (
        "--config.mesh.data=4 --config.mesh.fsdp=2 --config.mesh.model=1 "
        "--config.mesh.dcn_data=2 --config.mesh.dcn_fsdp=1 "
        "--config.model.remat_policy=none --config.model.scan=True"
    )
    assert settings(QUICK, overrides(words), fakes) == found


def test_all_policies_that_there_are_are_compared(monkeypatch):
    assert set(strategies.REMAT) == repetition.REMAT_POLICIES.keys()
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
        (["--export=step", "--strategies"], "--export is for one program"),
        (["--plan", "--strategies"], "--plan is for one program"),
        (["--plan=speed=3"], "--plan: 'speed' is not one of"),
        (["--meshes=fsdp=4"], "--meshes is read with --strategies only"),
        (["--remat=full"], "--remat is read with --strategies only"),
        (["--mesh=auto", "--strategies"], "--mesh=auto and --strategies"),
        (["--mesh=auto", "--largest_batch"], "--largest_batch and --mesh: "),
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

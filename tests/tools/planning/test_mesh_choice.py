"""The meshes of `compile --mesh=auto`, and which of them is chosen."""

import dataclasses
import json

import jax
import pytest

from tests.tools.planning.test_analysis import FOUND, GIB, QUICK
from vit_jax import compile
from vit_jax.command_line import cli
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.tools.planning import analysis, mesh_choice, topology
from vit_jax.tools.planning.analysis import Roofline
from vit_jax.tools.planning.mesh_choice import Candidate
from vit_jax.training import config as configuration


class Fake:
    """A device of which only its place is read, as JAX describes it in a topology."""

    device_kind = "fake"

    def __init__(self, number, size, count, platform):
        self.platform, self.id = platform, number
        self.process_index = number // (4 if platform == "tpu" else size)
        if platform == "tpu" and size < count:
            self.slice_index = number // size


@pytest.mark.parametrize(
    ("count", "size", "platform", "parts"),
    [
        (8, 8, "gpu", {1: "copies", 8: "parts on all"}),
        (32, 8, "gpu", {1: "copies", 8: "parts within a host", 32: "parts on all"}),
        (32, 16, "tpu", {1: "copies", 16: "parts within a slice", 32: "parts on all"}),
        (64, 64, "tpu", {1: "copies", 16: "parts on 16", 64: "parts on all"}),
        (12, 12, "tpu", {1: "copies", 4: "parts on 4", 12: "parts on all"}),
        (1, 1, "gpu", {1: "copies"}),
    ],
)
def test_meshes_follow_the_links_between_devices(count, size, platform, parts):
    devices = [Fake(i, size, count, platform) for i in range(count)]
    found = mesh_choice.candidates(devices)
    assert {keys["mesh.fsdp"]: name for name, keys in found} == parts
    config = configuration.load(QUICK, {"batch_size": 64, "mesh.fsdp": 3})
    for name, keys in found:
        place = mesh_choice.placed(config, keys).mesh
        assert (place.data, place.fsdp) == (count // place.fsdp, place.fsdp)
        if platform == "gpu":
            first = meshes.arrange(place, devices)[0]
            hosts = {device.process_index for device in first.flat}
            assert len(hosts) == 1 or name == "parts on all"


def row(name, floor, fits=True, **changes):
    found = dataclasses.replace(
        FOUND, fits=fits, roofline=Roofline(floor, 0.0, 0.0, 0.0) if fits else None
    )
    return Candidate(name, {}, dataclasses.replace(found, **changes))


def test_the_lowest_floor_that_fits_is_chosen_and_the_simplest_of_equal_ones():
    large = row("copies", 0, fits=False, peak_bytes=20 * GIB)
    rows = [large, row("parts within a host", 0.1019), row("parts on all", 0.1)]
    assert mesh_choice.choose(rows) is rows[1]
    assert mesh_choice.reason(rows) == (
        "mesh=auto: parts within a host, with a floor of 101.90 ms; copies: does not "
        "fit; parts on all: 100.00 ms"
    )
    rows[1] = row("parts within a host", 0.1021)
    assert mesh_choice.choose(rows) is rows[2]
    assert mesh_choice.choose([large]) is None
    assert mesh_choice.reason([large]) == "mesh=auto: none of these fits"


def test_bytes_on_links_and_on_the_network_are_shown_apart():
    one = {"slices": False, "sent": 5_000_000, "network": 2_000_000}
    between = {"slices": True, "sent": 3_000_000, "network": 0}
    found = row("copies", 0.1, collectives=(one, between))
    assert mesh_choice.traffic(found.result) == (5_000_000, 5_000_000)
    assert mesh_choice.line(found).split() == [
        *("copies", "256", "x", "1", "10.00", "5", "5", "100.00"),
        *("bound", "by", "compute"),
    ]


@pytest.mark.usefixtures("all_devices")
def test_each_mesh_is_compiled_and_one_that_is_impossible_says_why(monkeypatch):
    config = configuration.load(QUICK, {"batch_size": 8, "mesh.data": 2})
    seen = []

    def analyse(trial, mesh, examples, limit):
        seen.append(dict(mesh.shape))
        if mesh.shape["fsdp"] > 1:
            raise UserError("batch_size=8: no")
        return FOUND

    monkeypatch.setattr(analysis, "analyse", analyse)
    rows = list(mesh_choice.compare(config, jax.devices(), 20, None))
    assert seen == [
        {"data": 8, "fsdp": 1, "model": 1},
        {"data": 1, "fsdp": 8, "model": 1},
    ]
    assert mesh_choice.choose(rows) is rows[0]
    assert mesh_choice.line(rows[1]).endswith("does not compile: batch_size=8: no")
    as_json = mesh_choice.to_json(rows[0])
    assert as_json["roofline"]["floor"] == FOUND.roofline.floor


class Place:
    """The devices of this process, as a topology."""

    text = memory_source = "here"
    compilers = ("jax",)
    prepare = staticmethod(lambda: None)
    devices = staticmethod(jax.devices)
    usable_memory = staticmethod(lambda device: 16 * GIB)


@pytest.mark.parametrize("limit", [16, 12])
def test_the_command_reports_on_the_choice_or_on_what_needs_least(
    limit, monkeypatch, capsys
):
    def analyse(trial, mesh, examples, _):
        parts = mesh.shape["fsdp"]
        size = 20 * GIB if parts == 1 else 14 * GIB
        settings = analysis.settings(trial, dict(mesh.shape))
        fits = size <= limit * GIB
        bounds = Roofline(0.1, 0.0, 0.0, 0.0) if fits else None
        return dataclasses.replace(
            FOUND, settings=settings, peak_bytes=size, fits=fits, roofline=bounds
        )

    monkeypatch.setattr(analysis, "analyse", analyse)
    monkeypatch.setattr(topology, "parse", lambda *_: Place)

    def run(*words):
        flags = [f"--config={QUICK}", "--topology=v5e:2x4", "--mesh=auto", *words]
        code = compile.main(cli.parse(compile.parser(), flags))
        return code, capsys.readouterr().out

    code, text = run("--config.batch_size=8")
    code_of_json, line = run("--config.batch_size=8", "--json")
    assert code == code_of_json == (0 if limit == 16 else compile.EXIT_TOO_LARGE)
    found = json.loads(line)
    # Reported is what is chosen, or what needs the least memory.
    assert found["settings"]["mesh"] == {"data": 1, "fsdp": 8, "model": 1}
    assert [row["name"] for row in found["meshes"]] == ["copies", "parts on all"]
    assert found["mesh_choice"] in text
    advised = "for training: --config.mesh.data=1 --config.mesh.fsdp=8" in text
    assert advised == (limit == 16)

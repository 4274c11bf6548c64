"""Chooses between copies and parts of the parameters: `compile --mesh=auto`.

Three meshes are compiled: copies of the parameters on all devices (data parallelism),
parts within a host or slice and copies across, and parts over all devices. The choice
is the one that fits the memory and has the lowest floor: parts take less memory, and
their optimiser moves fewer bytes, but they send more.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vit_jax.config import fields
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.tools.planning import analysis, strategies
from vit_jax.tools.planning.analysis import Analysis
from vit_jax.training.config import TrainConfig

# A later candidate must have a floor that is lower by this fraction, since the bytes in
# a floor are right to some percent only.
_GAIN = 0.02
# Parts within a slice of more chips than this are of this many.
_WITHIN_SLICE = 16
_HEADING = ("mesh", "data x fsdp", "GiB", "MB on links", "network", "floor, ms", "")
_ROW = "  {:<22} {:>11} {:>7} {:>11} {:>8} {:>9}  {}"


class Candidate(NamedTuple):
    """A mesh that may be chosen.

    Attributes:
      name: name for reports.
      keys: dotted config keys to values.
      result: analysis of the compiled program.
    """

    name: str
    keys: dict[str, int]
    result: Analysis


def candidates(devices: Sequence, model: int = 1) -> list[tuple[str, dict[str, int]]]:
    """Returns names and config keys of the meshes to compare, the simplest first.

    Args:
      devices: devices of the topology.
      model: `mesh.model`, which stays.
    """
    total = len(devices) // model
    groups = len({_group(device) for device in devices})
    within = total // groups if groups > 1 else math.gcd(total, _WITHIN_SLICE)
    where = "slice" if devices[0].platform == "tpu" else "host"
    middle = f"parts within a {where}" if groups > 1 else f"parts on {within}"
    # Equal sizes have the last name.
    names = {within: middle} | {total: "parts on all"} | {1: "copies"}
    return [
        (name, {"mesh.data": total // size, "mesh.fsdp": size})
        for size, name in sorted(names.items())
    ]


def _group(device) -> int:
    """Returns the slice of a TPU chip, or the host of a GPU."""
    if device.platform == "tpu":  # The chips of a single slice have no index.
        return getattr(device, "slice_index", 0)
    return device.process_index


def compare(
    config: TrainConfig, devices: Sequence, examples: int, limit: int | None
) -> Iterator[Candidate]:
    """Compiles a config for each candidate.

    Args:
      config: complete config; its keys `mesh.data`, `mesh.fsdp`, `mesh.dcn_data` and
        `mesh.dcn_fsdp` are replaced.
      devices: devices of the topology.
      examples: number of training examples.
      limit: bytes of a chip that a program can use; None if unknown.

    Yields:
      Candidates, each as soon as it is compiled.
    """
    for name, keys in candidates(devices, config.mesh.model):
        trial = placed(config, keys)
        try:
            mesh = meshes.create(trial.mesh, devices)
            result = analysis.analyse(trial, mesh, examples, limit)
        except UserError as error:
            result = strategies.unfit(trial, str(error))
        yield Candidate(name, keys, result)


def placed(config: TrainConfig, keys: dict[str, int]) -> TrainConfig:
    """Returns a config with the mesh of a candidate."""
    across = {"mesh.dcn_data": 1, "mesh.dcn_fsdp": 1}  # These are chosen for the mesh.
    return fields.replace(config, {**across, **keys})


def choose(rows: Sequence[Candidate]) -> Candidate | None:
    """Returns the candidate that fits and has the lowest floor; None if none fits.

    Of two floors that differ by less than 2 %, the simpler mesh is chosen.
    """
    fitting = [row for row in rows if row.result.fits and row.result.roofline]
    if not fitting:
        return None
    lowest = min(row.result.roofline.floor for row in fitting)
    return next(
        row for row in fitting if row.result.roofline.floor * (1 - _GAIN) <= lowest
    )


def line(row: Candidate | None = None) -> str:
    """Returns a line of the table, or its heading if `row` is None."""
    if row is None:
        return _ROW.format(*_HEADING).rstrip()
    result, sizes = row.result, row.result.settings["mesh"]
    links, network = traffic(result)
    known = result.roofline
    return _ROW.format(
        row.name,
        f"{sizes['data']} x {sizes['fsdp']}",
        f"{result.peak_bytes / 2**30:.2f}" if result.peak_bytes else "-",
        f"{links / 1e6:,.0f}" if result.fits else "-",
        f"{network / 1e6:,.0f}" if result.fits else "-",
        f"{known.floor * 1e3:.2f}" if known else "-",
        _verdict(result),
    ).rstrip()


def _verdict(result: Analysis) -> str:
    if result.fits:
        return f"bound by {result.roofline.bound}" if result.roofline else "fits"
    return "does not fit" if result.peak_bytes else f"does not compile: {result.error}"


def traffic(result: Analysis) -> tuple[int, int]:
    """Returns the bytes that a device sends per step, on links and on the network."""
    rows = result.collectives
    between = sum(row["network"] or row["sent"] * row["slices"] for row in rows)
    return sum(row["sent"] for row in rows if not row["slices"]), between


def reason(rows: Sequence[Candidate]) -> str:
    """Returns the sentence that says what `choose` chooses, and why."""
    chosen = choose(rows)
    if not chosen:
        return "mesh=auto: none of these fits"
    words = [f"mesh=auto: {chosen.name}, with a floor of {_floor(chosen)} ms"]
    for row in rows:
        if row is not chosen:
            fits = row.result.fits and row.result.roofline
            short = _verdict(row.result).partition(":")[0]
            why = f"{_floor(row)} ms" if fits else short
            words.append(f"{row.name}: {why}")
    return "; ".join(words)


def _floor(row: Candidate) -> str:
    return f"{row.result.roofline.floor * 1e3:.2f}"


def to_json(row: Candidate) -> dict:
    """Returns a candidate as plain numbers and strings."""
    links, network = traffic(row.result)
    words = {"name": row.name, "keys": row.keys, "links": links, "network": network}
    return words | row.result.to_json()

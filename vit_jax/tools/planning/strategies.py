"""Compares meshes, remat policies and other settings of a config by compiling each."""

import bisect
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from vit_jax.config import fields
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import repetition
from vit_jax.tools.planning import analysis
from vit_jax.tools.planning.analysis import Analysis
from vit_jax.training.config import TrainConfig, complete

# From the most memory to the most recomputation.
REMAT = tuple(repetition.REMAT_POLICIES)
_DEFAULT = {"data": -1, "fsdp": 1, "model": 1}
_WIDTHS = (11, 9, 5, 9, 9, 10, 9)
HEADING = ("mesh", "remat", "scan", "GiB", "TFLOP", "MB sent", "floor ms")


def meshes_for(devices: int, model: bool) -> list[dict]:
    """Returns meshes worth trying, each with sizes by axis.

    Args:
      devices: total number of devices.
      model: whether the network has attention heads and MLPs that can be split.
    """
    sizes = [1] + [n for n in (4, 8, 16, 32) if devices % n == 0]
    candidates = [_DEFAULT | {"fsdp": size} for size in sizes]
    if model and devices % 4 == 0:
        candidates.append(_DEFAULT | {"model": 4})
    return candidates


def parse_meshes(text: str) -> list[dict]:
    """Parses meshes: "fsdp=16,fsdp=4+model=2,data=-1".

    Raises:
      UserError: a word is not an axis with a size, or an axis is repeated.
    """
    parsed = []
    for words in text.split(","):
        sizes = {}
        for word in words.split("+"):
            axis, _, size = word.partition("=")
            known = axis in _DEFAULT and axis not in sizes
            if not known or not re.fullmatch(r"-?\d+", size):
                raise UserError(
                    f"--meshes: {word!r} in {words!r} is not an axis with a size, or "
                    "repeats an axis: write meshes as data=-1,fsdp=16,fsdp=4+model=2"
                )
            sizes[axis] = int(size)
        parsed.append(_DEFAULT | sizes)
    return parsed


def compare(
    config: TrainConfig,
    devices: Sequence,
    examples: int,
    limit: int | None,
    sizes: Sequence[dict],
    policies: Sequence[str] = REMAT,
    scans: Sequence[bool] = (),
) -> Iterator[Analysis]:
    """Compiles a config for each mesh, value of scan and remat policy.

    A policy that recomputes less is not always faster: it reads and writes more.

    Args:
      config: complete config.
      devices: devices of the topology.
      examples: number of training examples.
      limit: bytes of a chip that a program can use; None if unknown.
      sizes: meshes, each with sizes by axis.
      policies: remat policies; one is enough for a network without blocks.
      scans: values of `model.scan`; only the config's value if empty.

    Yields:
      Analyses, each as soon as it is ready.

    Raises:
      UserError: no mesh fits the config, or a policy is unknown.
    """
    num_refused = 0
    scans = scans or [getattr(config.model, "scan", False)]
    for mesh_sizes, scan in itertools.product(sizes, scans):
        for policy in policies:
            trial = variant(config, mesh_sizes, policy, scan)
            try:
                mesh = meshes.create(trial.mesh, devices)
                row = analysis.analyse(trial, mesh, examples, limit)
            except UserError as error:
                num_refused += 1
                if num_refused == len(sizes) * len(scans):
                    raise
                yield unfit(trial, str(error))
                break
            yield row


def remedies(
    config: TrainConfig,
    devices: Sequence,
    refused: Analysis,
    examples: int,
    limit: int | None,
) -> Iterator[tuple[str, Analysis]]:
    """Compiles separate changes of a config whose program does not fit.

    Args:
      config: complete config.
      devices: devices of the topology.
      refused: analysis of the config.
      examples: number of training examples.
      limit: bytes of a chip that a program can use; None if unknown.

    Yields:
      Command-line flags of a change and its analysis, each as soon as it is ready. For
      a change with several sizes, this is the smallest that fits, or else the largest.
    """

    def analyse(keys):
        trial = fields.replace(config, keys)
        mesh = meshes.create(trial.mesh, devices)
        return analysis.analyse(trial, mesh, examples, limit)

    for sizes in changes(refused.settings):
        attempts = functools.cache(lambda i, sizes=sizes: analyse(sizes[i]))
        best = len(sizes) - 1
        # Larger ones need less memory: if the largest does not fit, none does.
        if attempts(best).fits:
            best = bisect.bisect(range(best), False, key=lambda i: attempts(i).fits)
        words = [f"--config.{key}={value}" for key, value in sizes[best].items()]
        yield " ".join(words), attempts(best)


def changes(settings: dict) -> list[list[dict]]:
    """Returns changes that reduce the memory of a program, each in increasing sizes.

    Args:
      settings: result of `analysis.settings`.

    Returns:
      Changes, each as a list of values by dotted config key.
    """
    mesh, now = settings["mesh"], settings["grad_accum_steps"]
    whole = mesh["data"] // settings["dcn"]["dcn_data"]
    rows = settings["batch_size"] // math.prod(mesh[axis] for axis in meshes.BATCH_AXES)
    parts = [2**n for n in range(1, whole.bit_length()) if whole % 2**n == 0]
    options = [
        # Both axes are set, because "data" in a config would not shrink by itself.
        [{"mesh.data": mesh["data"] // n, "mesh.fsdp": mesh["fsdp"] * n} for n in parts]
    ]
    if settings["remat_policy"] not in (None, "full"):
        options.append([{"model.remat_policy": "full"}])
    if settings["mu_dtype"] == "float32":
        options.append([{"optim.mu_dtype": "bfloat16"}])
    if settings["dtype"] != "bfloat16":
        options.append([{"model.dtype": "bfloat16"}])
    if settings["average"]:
        options.append([{"ema.decay": 0.0}])
    more = [n for n in range(now + 1, rows + 1) if rows % n == 0]
    options.append([{"optim.grad_accum_steps": n} for n in more])
    return [sizes for sizes in options if sizes]


def variant(config: TrainConfig, sizes: dict, policy: str, scan: bool) -> TrainConfig:
    """Returns a config with another mesh, remat policy and value of scan."""
    trial = fields.to_dict(config)
    trial["mesh"] |= sizes
    if "remat_policy" in trial["model"]:
        trial["model"] |= {"remat_policy": policy, "scan": scan}
    return complete(trial)


def unfit(config: TrainConfig, reason: str) -> Analysis:
    """Returns a row for a mesh that does not fit the config or the devices."""
    mesh = {axis: getattr(config.mesh, axis) for axis in meshes.AXES}
    return Analysis(analysis.settings(config, mesh), error=reason)


def fastest(rows: Sequence[Analysis]) -> Analysis | None:
    """Returns the fitting row with the lowest floor; None if none fits.

    Rows with unknown trip counts come last: their floors are too low.
    """
    fitting = [row for row in rows if row.fits and row.roofline]
    return min(
        fitting,
        key=lambda row: (row.unread_loops > 0, row.roofline.floor),
        default=None,
    )


def flags(row: Analysis) -> str:
    """Returns the command-line flags for a row's settings, including all mesh axes."""
    dcn = row.settings["dcn"]
    if set(dcn.values()) == {1}:
        dcn = {}  # Chosen automatically, as in the config of the row.
    words = [f"mesh.{axis}={n}" for axis, n in {**row.settings["mesh"], **dcn}.items()]
    for key in ("remat_policy", "scan"):
        if row.settings[key] is not None:
            words.append(f"model.{key}={row.settings[key]}")
    return " ".join(f"--config.{word}" for word in words)


def line(row: Analysis | None = None) -> str:
    """Returns a line of the table, or its heading if `row` is None."""
    if row is None:
        cells = HEADING
    else:
        sizes = row.settings["mesh"]
        shown = "x".join(str(sizes[axis]) for axis in ("data", "fsdp", "model"))
        sent = sum(one["sent"] for one in row.collectives)
        cells = (
            shown,
            row.settings["remat_policy"] or "-",
            {True: "yes", False: "no", None: "-"}[row.settings["scan"]],
            f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else "-",
            f"{row.flops / 1e12:.2f}" if row.flops else "-",
            f"{sent / 1e6:.0f}" if row.fits else "-",
            f"{row.roofline.floor * 1e3:.1f}" if row.roofline else "-",
        )
    words = [f"{cell:>{w}}" for cell, w in zip(cells, _WIDTHS, strict=True)]
    return "  ".join(words) + ("" if row is None else _note(row))


def _note(row: Analysis) -> str:
    if row.unread_loops:
        return f"  {row.unread_loops} loops are counted once: the floor is too low"
    if row.fits:
        return ""
    return "  does not fit" if row.peak_bytes else f"  does not compile: {row.error}"

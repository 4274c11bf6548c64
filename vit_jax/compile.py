"""Compiles a training step for TPUs or GPUs that are not here:

python -m vit_jax.compile --config=configs/b16_i21k.py:model=H/14 --topology=v5e:16x16
python -m vit_jax.compile --config=configs/b16_i21k.py --topology=h100:4x8

It prints what the step needs of each chip and compares it to what the chip has: memory,
products, bytes, collectives and the minimum time of a step. It runs on any Linux
machine with the extra `tpu` or `cuda`; a large model takes minutes. --plan adds what
the whole run needs: days, hosts, checkpoints, failures. --largest_batch tries batch
sizes until it finds the largest one that fits. Any key of the config can be set:
--config.mesh.fsdp=16. Exit codes: 0 the step fits, 2 bad input (one line says what), 3
the step does not fit or does not compile, or with --strategies none of them fits.
"""

import argparse
import dataclasses
import json
import pathlib

from vit_jax.command_line import cli
from vit_jax.command_line.printing import printable, versions
from vit_jax.errors import UserError
from vit_jax.tools.planning import gpus, topology

EXIT_TOO_LARGE = 3
# The number of training examples if neither the config nor the catalogue has it. It
# changes the length of the run and of its schedule, which are numbers in a program that
# stays the same. It is the size of JFT-300M, so that no warmup is longer than the run.
_EXAMPLES = 303_000_000
_ASSUMED = "assumed; it changes numbers, not the program"


def main(flags: argparse.Namespace) -> int:
    """Compiles the step given by the flags, prints its cost; returns the exit code."""
    place = topology.parse(flags.topology, flags.slices)
    place.prepare()  # Before JAX is imported.
    from vit_jax.distributed import mesh as meshes
    from vit_jax.tools.planning import batch_search, mesh_choice, run_plan
    from vit_jax.training import config as configuration

    _check(flags)
    assumed = None if flags.plan is None else run_plan.parse(flags.plan)
    # Not cli.load_config: the initial weights do not change the program.
    config = configuration.load(flags.config, flags.overrides)
    config = _placed(config, place)
    devices = place.devices()
    limit = place.usable_memory(devices[0])
    examples, source = _examples(flags, config)
    unknown = examples if source == _ASSUMED else 0
    result = None
    if flags.largest_batch:
        mesh = meshes.create(config.mesh, devices)
        config, result = batch_search.largest_batch(config, mesh, examples, limit)
    heading = (
        f"{printable(config.name)} on {len(devices)} x {devices[0].device_kind} "
        f"({place.text}), {config.batch_size:,} images a step; "
        f"{versions(place.compilers)}; {examples:,} examples ({source})"
    )
    if flags.strategies:
        return _compare(flags, config, devices, examples, limit, heading)
    meshes_tried = []
    if flags.mesh:
        meshes_tried = _try_meshes(flags, config, devices, examples, limit)
        # If none fits, the one that needs the least memory is reported.
        chosen = mesh_choice.choose(meshes_tried) or meshes_tried[-1]
        config = mesh_choice.placed(config, chosen.keys)
        result = None if flags.out else chosen.result
    return _one(
        flags,
        config,
        place,
        devices,
        examples,
        limit,
        heading,
        assumed,
        unknown,
        result,
        meshes_tried,
    )


def _try_meshes(flags, config, devices, examples, limit) -> list:
    """Compiles the candidates of --mesh=auto, and prints them and the choice."""
    from vit_jax.tools.planning import mesh_choice

    def say(line):
        if not flags.json:
            print(line, flush=True)

    rows = []
    say(mesh_choice.line())
    for row in mesh_choice.compare(config, devices, examples, limit):
        rows.append(row)
        say(mesh_choice.line(row))
    say(mesh_choice.reason(rows))
    if chosen := mesh_choice.choose(rows):
        words = (f"--config.{key}={value}" for key, value in chosen.keys.items())
        say(f"for training: {' '.join(words)}\n")
    return rows


def _check(flags) -> None:
    """Rejects flags that would be ignored, or would fail after minutes of compiling."""
    single = {name: bool(getattr(flags, name)) for name in ("export", "out")}
    single["plan"] = flags.plan is not None
    for name, is_set in single.items():
        if is_set and flags.strategies:
            raise UserError(f"--{name} is for one program: leave --strategies out")
    if flags.mesh and flags.strategies:
        raise UserError("--mesh=auto and --strategies: both compare meshes; use one")
    if flags.largest_batch and (flags.strategies or flags.out or flags.mesh):
        others = ("strategies", "out", "mesh")
        other = next(name for name in others if getattr(flags, name))
        raise UserError(
            f"--largest_batch and --{other}: find the batch first, then compile it with "
            "--config.batch_size"
        )
    for name in ("meshes", "remat", "scan"):
        if getattr(flags, name) and not flags.strategies:
            raise UserError(f"--{name} is read with --strategies only: add it")
    for name in ("export", "out"):
        path = getattr(flags, name)
        folder = pathlib.Path(path).absolute().parent
        if path and not folder.is_dir():
            raise UserError(f"--{name}={path}: there is no folder {folder}: make it")
    from vit_jax.models import repetition

    known = repetition.REMAT_POLICIES
    for policy in filter(None, flags.remat.split(",")):
        if policy not in known:
            raise UserError(f"--remat: {policy!r} is not one of {', '.join(known)}")


def _placed(config, place):
    """Returns the config with the values that a run on the devices would choose."""
    from vit_jax.config import fields
    from vit_jax.data.config import ESTIMATE
    from vit_jax.models import attention

    is_gpu, keys = isinstance(place, gpus.Gpus), {}
    if getattr(config.model, "scan", True) is None:
        platform = "gpu" if is_gpu else "tpu"
        model = dataclasses.replace(config.model, platform=platform)
        keys["model.scan"] = model.stacked
    for name in ("mean", "std"):
        if getattr(config.data, name) == ESTIMATE:  # There is no data to read.
            keys[f"data.{name}"] = (0.5,)
    is_old = is_gpu and place.capability < attention.CUDNN_CAPABILITY
    if is_old and getattr(config.model, "attention_impl", "") == "auto":
        keys["model.attention_impl"] = "einsum"
    return fields.replace(config, keys)


def _examples(flags, config) -> tuple[int, str]:
    """Returns the size of the training split, and its source."""
    from vit_jax.data import catalogue

    entry = catalogue.ENTRIES.get(config.data.name)
    known = (
        (flags.examples, "--examples"),
        (config.data.num_examples, "data.num_examples"),
        (entry.images if entry else 0, "the catalogue"),
    )
    return next((pair for pair in known if pair[0]), (_EXAMPLES, _ASSUMED))


def _one(
    flags,
    config,
    place,
    devices,
    examples,
    limit,
    heading,
    assumed,
    unknown,
    result,
    meshes_tried,
) -> int:
    from vit_jax.distributed import chips
    from vit_jax.distributed import mesh as meshes
    from vit_jax.tools.planning import analysis, report, run_plan, strategies

    mesh = meshes.create(config.mesh, devices)
    if not result:
        result = analysis.analyse(config, mesh, examples, limit, flags.out)
    if not flags.json:
        print(report.text(result, heading, place.memory_source), flush=True)
        if flags.movers and result.fits:
            print("\n" + "\n".join(report.movers(result)), flush=True)
    remedies = ()
    if not result.fits and result.peak_bytes:
        remedies = strategies.remedies(config, devices, result, examples, limit)
    plan = None
    if assumed and result.roofline:
        every = config.checkpoint_every_steps
        every = every or round(
            config.checkpoint_every_epochs * examples / config.batch_size
        )
        plan = run_plan.make(
            result,
            len(devices),
            len({device.process_index for device in devices}),
            config.num_steps(examples),
            (config.local_checkpoint.every_steps, every),
            chips.find(devices[0].device_kind).peak_flops,
            assumed,
        )
    if flags.json:
        words = _to_json(heading, result, remedies, meshes_tried)
        if plan:
            words["plan"] = run_plan.to_json(plan, assumed, unknown)
        print(json.dumps(words))
    elif remedies:
        print("compiling each change separately", flush=True)
        for line in report.remedies(remedies):
            print(line, flush=True)
    elif plan:
        print("\n" + "\n".join(run_plan.text(plan, assumed, unknown)))
    if flags.export:
        size = analysis.export_stablehlo(
            config, mesh, examples, pathlib.Path(flags.export)
        )
        if not flags.json:
            print(f"StableHLO of the step: {flags.export}, {size:,} bytes")
    if flags.out and result.fits and not flags.json:
        size = pathlib.Path(flags.out).stat().st_size
        print(
            f"compiled step, for vit_jax.train --compiled: {flags.out}, {size:,} bytes"
        )
    return 0 if result.fits else EXIT_TOO_LARGE


def _to_json(heading, result, remedies, meshes_tried) -> dict:
    """Returns the report on one program as plain numbers and strings."""
    from vit_jax.tools.planning import mesh_choice

    words = {"heading": heading} | result.to_json()
    words["remedies"] = [
        {"flags": way, "peak_bytes": row.peak_bytes}
        for way, row in remedies
        if row.fits
    ]
    if meshes_tried:
        words["meshes"] = [mesh_choice.to_json(row) for row in meshes_tried]
        words["mesh_choice"] = mesh_choice.reason(meshes_tried)
    return words


def _compare(flags, config, devices, examples, limit, heading) -> int:
    from vit_jax.tools.planning import report, strategies

    has_blocks = hasattr(config.model, "remat_policy")
    sizes = strategies.meshes_for(len(devices), has_blocks)
    if flags.meshes:
        sizes = strategies.parse_meshes(flags.meshes)
    chosen = flags.remat.split(",") if flags.remat else strategies.REMAT
    policies = chosen if has_blocks else ["none"]
    scans = [config.model.scan] if has_blocks else [False]
    if flags.scan and has_blocks:
        scans = [{"true": True, "false": False}[word] for word in flags.scan.split(",")]
    rows = []
    if not flags.json:
        print(f"{heading}\n{strategies.line()}", flush=True)
    for row in strategies.compare(
        config, devices, examples, limit, sizes, policies, scans
    ):
        rows.append(row)
        if not flags.json:
            print(strategies.line(row), flush=True)
    best = strategies.fastest(rows)
    if flags.json:
        recommended = strategies.flags(best) if best else ""
        words = {"heading": heading, "rows": [row.to_json() for row in rows]}
        print(json.dumps(words | {"recommended": recommended}))
    elif best:
        print(f"the fastest that fits (lowest minimum time): {strategies.flags(best)}")
    else:
        wanted = [(row.peak_bytes, strategies.flags(row)) for row in rows]
        print(f"none of these fits; {report.least(wanted)}")
    return 0 if best else EXIT_TOO_LARGE


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, config="TrainConfig", local=("export", "out"))
    add = parser.add_argument
    add("--config", required=True, help="recipe or file, :argument")
    add("--topology", required=True, help="v5e:16x16, v4:4x4x4, h100:8, h100:4x8")
    add(
        "--slices",
        type=cli.positive,
        default=1,
        help="number of TPU slices; default: 1",
    )
    add("--examples", type=cli.positive, default=0, help="size of the training split")
    add("--json", action="store_true", help="print one JSON object")
    add("--export", default="", help="file for the step's StableHLO")
    add("--out", default="", help="file for the compiled step: train --compiled")
    add(
        "--plan",
        nargs="?",
        const="",
        metavar="NAME=VALUE,...",
        help="print what the whole run needs; mfu, host_days, store, ... are assumed",
    )
    text = "find the largest batch that fits, to 5%%; the config's is ignored"
    add("--largest_batch", action="store_true", help=text)
    text = (
        "compile copies and parts of the parameters, and choose one by memory and floor"
    )
    add("--mesh", choices=("auto",), default="", help=text)
    text = "print the ten instructions that move the most bytes in memory"
    add("--movers", action="store_true", help=text)
    add("--strategies", action="store_true", help="compare meshes and remat policies")
    add("--meshes", default="", help="meshes to compare: data=-1,fsdp=16,model=4")
    add("--remat", default="", help="remat policies to compare; default: all")
    scans = ("true", "false", "true,false")
    shown = "true|false|true,false"
    text = "layer loops to compare; default: the config's"
    add("--scan", choices=scans, metavar=shown, help=text)
    return parser


if __name__ == "__main__":
    cli.run(main, parser())

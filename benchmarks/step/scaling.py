"""What a training step costs as batch, depth, tokens and devices double.

Run: python -m benchmarks.step.scaling [--variant=S/16] [--csv=FILE] [--plot=FILE]

Each point is the product's own step in a process of its own, with everything else as in
the middle of the axis (--batch, --depth, --side). Images a second are medians of --calls
steps. The axes are measured in turns, and the middle once for each of them: how far these
differ, printed below the table, is what another process on the machine did. Memory is what the compiler plans for one device (on a CPU the sum of its buffers),
with parameters and moments. The batch is split over the devices, parameters are not. On a
CPU the devices are fake: they share its cores, so that a flat line is the most that can
be had, and what falls below it is what splitting costs. The plot needs matplotlib.
"""

import argparse
import csv
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time

import jax

from benchmarks import smoke

FIELDS = ("axis", "value", "batch", "depth", "tokens", "devices", "images_per_second")
FIELDS += ("seconds", "peak_gib", "gmacs_per_image")


@dataclasses.dataclass(frozen=True)
class Point:
    """One step to measure; the side of the images is in pixels."""

    axis: str
    batch: int
    depth: int
    side: int
    devices: int


def points(args) -> list[Point]:
    """Returns the points of the axes; the middle is in each."""
    base = Point("", args.batch, args.depth, args.side, 1)
    factors = [2.0**i for i in range(-args.doublings, args.doublings + 1)]
    found = []
    for factor in factors:
        for axis in ("batch", "depth"):
            value = round(getattr(base, axis) * factor)
            found.append(dataclasses.replace(base, axis=axis, **{axis: value}))
        # Twice the tokens are the root of 2 times the side, in whole patches.
        side = round(base.side * factor**0.5 / args.patch) * args.patch
        found.append(dataclasses.replace(base, axis="tokens", side=side))
    devices = 1
    while devices <= args.devices:
        found.append(dataclasses.replace(base, axis="devices", devices=devices))
        devices *= 2
    return [point for point in found if point.axis in args.axes.split(",")]


def measure(args, point: Point) -> dict:
    """Times one point in this process."""
    import numpy as np

    from vit_jax.distributed import mesh as meshes
    from vit_jax.models import cost
    from vit_jax.training import config as configuration
    from vit_jax.training import train_setup

    num_classes = 1000
    raw = {
        "total_steps": 1_000_000,
        "batch_size": point.batch,
        "data": {
            "name": "synthetic",
            "num_classes": num_classes,
            "num_examples": 1_000_000,
            "image_size": (point.side, point.side),
        },
        "model": {"variant": args.variant, "depth": point.depth, "dtype": args.dtype},
        "optim": {"name": "adam", "learning_rate": 1e-3},
        "ema": {"decay": 0.0},
    }
    config = configuration.complete(raw)
    devices = jax.devices()[: point.devices]
    mesh = meshes.create(config.mesh, devices)
    program = train_setup.build(config, mesh, 1_000_000)
    step = program.train_step.lower(
        program.layout.shapes, program.layout.batch
    ).compile()
    rng = np.random.default_rng(0)
    shape = (point.batch, point.side, point.side, 3)
    batch = {
        "image": rng.integers(0, 256, shape, dtype=np.uint8),
        "label": rng.integers(0, num_classes, point.batch, dtype=np.int32),
        "index": np.arange(point.batch, dtype=np.uint32),
    }
    batch, state, seconds = meshes.to_devices(batch, mesh), program.initial_state(), []
    for _ in range(args.calls + 2):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    seconds = statistics.median(seconds[2:])  # The first ones warm up.
    tokens = cost.tokens(program.model)
    return {
        "axis": point.axis,
        "value": tokens if point.axis == "tokens" else getattr(point, point.axis),
        "batch": point.batch,
        "depth": point.depth,
        "tokens": tokens,
        "devices": point.devices,
        "images_per_second": round(point.batch / seconds, 3),
        "seconds": round(seconds, 5),
        "peak_gib": round(peak_bytes(step, devices[0].platform) / 2**30, 4),
        "gmacs_per_image": round(cost.macs_per_image(program.model) / 1e9, 4),
    }


def peak_bytes(step, platform: str) -> int:
    """Returns what a device holds at most during a compiled step."""
    about = step.memory_analysis()
    if platform != "cpu":
        return about.peak_memory_in_bytes
    # The CPU's compiler leaves its temporary buffers out of that.
    held = about.argument_size_in_bytes + about.output_size_in_bytes
    return held + about.temp_size_in_bytes - about.alias_size_in_bytes


def in_a_process(args, point: Point) -> dict:
    """Times one point in a process of its own."""
    env = dict(os.environ)
    if jax.default_backend() == "cpu":
        flag = f"--xla_force_host_platform_device_count={point.devices}"
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}"
    words = [f"--{key}={getattr(args, key)}" for key in ("variant", "dtype", "calls")]
    words += [f"--point={json.dumps(vars(point))}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step.scaling", *words],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def plot(rows: list[dict], path: str, title: str) -> None:
    """Draws images a second and memory over each axis, both with logarithmic scales."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    kinds = (
        ("images_per_second", "images a second"),
        ("peak_gib", "peak GiB a device"),
    )
    figure, grid = pyplot.subplots(
        2, len(axes), figsize=(3 * len(axes), 5.4), sharex="col", sharey="row"
    )
    for column, axis in enumerate(axes):
        own = sorted((r for r in rows if r["axis"] == axis), key=lambda r: r["value"])
        values = [row["value"] for row in own]
        for line, (key, label) in enumerate(kinds):
            place = grid[line][column]
            place.plot(values, [row[key] for row in own], "o-", color="#2a6f97")
            place.set_xscale("log", base=2)
            place.set_yscale("log", base=2)
            place.xaxis.set_major_formatter("{x:.0f}")
            place.yaxis.set_major_formatter("{x:g}")
            place.set_xticks(values, minor=False)
            place.minorticks_off()
            place.grid(alpha=0.3)
            if column == 0:
                place.set_ylabel(label)
        grid[1][column].set_xlabel(axis)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    """Measures, prints the table, writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--variant", default="S/16")
    add("--dtype", default="float32")
    add("--batch", type=int, default=8)
    add("--depth", type=int, default=12)
    add("--side", type=int, default=160, help="of the images, in pixels")
    add("--devices", type=int, default=8, help="at most; fake ones on a CPU")
    add("--doublings", type=int, default=2, help="up and down from the middle")
    add("--axes", default="batch,depth,tokens,devices")
    add("--calls", type=int, default=10, help="timed steps a point")
    add("--csv", default="", help="file to write")
    add("--plot", default="", help="PNG to write")
    add("--point", default="", help=argparse.SUPPRESS)
    args = smoke.parse(
        parser,
        "--variant=Ti/16 --batch=1 --depth=1 --side=32 --devices=1 --doublings=0 --calls=1 "
        "--axes=tokens",
    )
    if point := args.point:
        print(json.dumps(measure(args, Point(**json.loads(point)))))
        return
    args.patch = int(args.variant.split("/")[1])
    found = points(args)
    title = (
        f"{args.variant} on {jax.devices()[0].device_kind}, {args.dtype}: batch "
        f"{args.batch}, {args.depth} layers, {args.side} px, else as shown"
    )
    rows = sorted((in_a_process(args, p) for p in found), key=lambda row: row["axis"])
    print(f"| {' | '.join(FIELDS)} |\n{'|---' * len(FIELDS)}|")
    for row in rows:
        print(f"| {' | '.join(str(row[field]) for field in FIELDS)} |")
    same = args.batch, args.depth, 1, (args.side // args.patch) ** 2 + 1
    keys = ("batch", "depth", "devices", "tokens")
    middle = [r["images_per_second"] for r in rows if tuple(r[k] for k in keys) == same]
    print(f"\nthe middle, {len(middle)} times: {min(middle):g} to {max(middle):g}")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    if args.plot:
        plot(rows, args.plot, title)


if __name__ == "__main__":
    main()

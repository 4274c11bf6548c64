"""What Orbax finds of a damaged checkpoint by itself, and what our checksums cost.

Run: python -m benchmarks.reliability.checkpoint [--gigabytes=1] [--flips=60]
     [--parts=damage,cost,local]

First a small state is saved; in each of its files one bit at a time is flipped, or the
file is cut by a byte, halved or removed, and the state loaded again: an error, the same
numbers, or others without a word. Then a larger one of random float32 is saved, summed
up, verified and loaded, three times; the files are in the memory of the operating system.
Last a training state of that size goes to a local disk and back (LocalCheckpointer): the
stall is what the steps wait for, the rest of the writing happens beside them.
"""

import argparse
import collections
import pathlib
import random
import shutil
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from benchmarks import smoke
from vit_jax.data.sources.arrays import open_synthetic
from vit_jax.training import config as configuration
from vit_jax.training.local_checkpoint import LocalCheckpointer
from vit_jax.training.train_state import TrainState
from vit_jax.weights import checkpoint_folders

ABOUT = {"config": {"seed": 3}}


def like(tree):
    """Returns the shapes and places of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def damaged(data, kind, rng):
    """Returns a file's contents with one damage, or None if it is gone."""
    data = bytearray(data)
    if kind == "bit flipped":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return data
    return {"a byte short": data[:-1], "halved": data[: len(data) // 2], "gone": None}[
        kind
    ]


def outcome(folder, tree):
    """Loads a checkpoint and says what came of it."""
    try:
        found = ocp.load(folder, like(tree))
        about = ocp.metadata(folder).custom_metadata
    except Exception:  # noqa: BLE001 (whatever it says, it has noticed)
        return "error"
    same = jax.tree.map(lambda a, b: bool((a == b).all()), tree, found)
    return "same" if about == ABOUT and all(jax.tree.leaves(same)) else "OTHER"


def damage_all(folder, flips):
    """Damages every file in turn and prints what Orbax and our checksums notice."""
    rng = random.Random(0)
    tree = {
        "a": jnp.arange(100_003.0),
        "b": jax.random.normal(jax.random.key(0), (70, 3)),
    }
    ocp.save(folder, tree, custom_metadata=ABOUT)
    checkpoint = epath.Path(folder)
    checkpoint_folders.write_checksums(
        checkpoint, checkpoint_folders.compute_checksums(checkpoint)
    )
    kinds = ["bit flipped"] * flips + ["a byte short", "halved", "gone"]
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data, seen, missed = path.read_bytes(), collections.Counter(), 0
        if not data or path.name == checkpoint_folders.CHECKSUMS_FILE:
            continue
        for kind in kinds:
            spoilt = damaged(data, kind, rng)
            path.unlink()
            if spoilt is not None:
                path.write_bytes(spoilt)
            seen[kind, outcome(folder, tree)] += 1
            missed += not checkpoint_folders.find_damage(checkpoint)
            path.write_bytes(data)
        name = str(path.relative_to(folder))
        print(f"{name[:44]:44} ({len(data):,} bytes), missed by checksums: {missed}")
        for (kind, what), count in sorted(seen.items()):
            print(f"    {kind:14} {what:6} {count}")


def cost(folder, gigabytes):
    """Times saving, summing up, verifying and loading."""
    count = max(round(gigabytes * 1e9 / 16e6), 1)
    keys = jax.random.split(jax.random.key(0), count)
    tree = {f"l{i}": jax.random.normal(keys[i], (4_000_000,)) for i in range(count)}
    jax.block_until_ready(tree)
    for _ in range(3):
        times, checkpoint = [time.perf_counter()], epath.Path(folder)
        shutil.rmtree(folder, ignore_errors=True)
        times.append(time.perf_counter())
        ocp.save(folder, tree)
        times.append(time.perf_counter())
        sums = checkpoint_folders.compute_checksums(checkpoint)
        times.append(time.perf_counter())
        checkpoint_folders.write_checksums(checkpoint, sums)
        assert not checkpoint_folders.find_damage(checkpoint)
        times.append(time.perf_counter())
        jax.block_until_ready(ocp.load(folder, like(tree)))
        times.append(time.perf_counter())
        _, save, add, verify, load = np.diff(times)
        size = sum(size for size, _ in sums.values()) / 1e9
        print(
            f"{size:.2f} GB: save {save:.2f} s, sum up {add:.2f} s, verify "
            f"{verify:.2f} s, load {load:.2f} s"
        )


def local(folder, gigabytes):
    """Times checkpoints on a host's own disk."""
    config = configuration.load(
        "b16_i21k",
        {
            "data.name": "synthetic",
            "data.split": "train",
            "evals": {},
            "data.num_examples": 20,
            "local_checkpoint.dir": str(folder / "disk"),
            "local_checkpoint.every_steps": 1,
        },
    )
    source = open_synthetic("train", (8, 8), 3, 5, 20)
    count = max(round(gigabytes * 1e9 / 16e6), 1)
    keys = jax.random.split(jax.random.key(0), count)
    params = {f"l{i}": jax.random.normal(keys[i], (4_000_000,)) for i in range(count)}
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=(),
        average=None,
        key=jax.random.key(1),
        extra=None,
    )
    shapes = jax.eval_shape(lambda: state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    for step in range(1, 4):
        disk = LocalCheckpointer(config, folder / "run", source, shapes, shardings)
        times = [time.perf_counter()]
        disk.save(step, state, 0.0)
        times.append(time.perf_counter())
        disk.wait()
        times.append(time.perf_counter())
        found = disk.restore(0)
        jax.block_until_ready(found.state.params)
        times.append(time.perf_counter())
        assert found.step == step
        stall, write, load = np.diff(times)
        print(
            f"{count * 16e6 / 1e9:.2f} GB on a local disk: stall {stall:.2f} s, write "
            f"{write:.2f} s, restore {load:.2f} s"
        )


def main():
    """Damages, then times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--parts", default="damage,cost,local")
    flags = smoke.parse(parser, "--gigabytes=0.02 --flips=1")
    with tempfile.TemporaryDirectory() as place:
        place, parts = pathlib.Path(place), flags.parts.split(",")
        if "damage" in parts:
            damage_all(place / "small", flags.flips)
        if "cost" in parts:
            cost(place / "large", flags.gigabytes)
        if "local" in parts:
            local(place / "local", flags.gigabytes)


if __name__ == "__main__":
    main()

"""What Orbax finds of a damaged checkpoint by itself, and what our checksums cost.

Run: PYTHONPATH=. python benchmarks/checkpoint.py [--gigabytes=1] [--flips=60]

First a small state is saved; in each of its files one bit at a time is flipped, or the
file is cut by a byte, halved or removed, and the state loaded again: an error, the same
numbers, or others without a word. Then a larger one of random float32 is saved, summed
up, verified and loaded, three times; the files are in the memory of the operating system.
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

from vit_jax.weights import workdir

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
    workdir.write_checksums(checkpoint, workdir.compute_checksums(checkpoint))
    kinds = ["bit flipped"] * flips + ["a byte short", "halved", "gone"]
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data, seen, missed = path.read_bytes(), collections.Counter(), 0
        if not data or path.name == workdir.CHECKSUMS_FILE:
            continue
        for kind in kinds:
            spoilt = damaged(data, kind, rng)
            path.unlink()
            if spoilt is not None:
                path.write_bytes(spoilt)
            seen[kind, outcome(folder, tree)] += 1
            missed += not workdir.find_damage(checkpoint)
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
        sums = workdir.compute_checksums(checkpoint)
        times.append(time.perf_counter())
        workdir.write_checksums(checkpoint, sums)
        assert not workdir.find_damage(checkpoint)
        times.append(time.perf_counter())
        jax.block_until_ready(ocp.load(folder, like(tree)))
        times.append(time.perf_counter())
        _, save, add, verify, load = np.diff(times)
        size = sum(size for size, _ in sums.values()) / 1e9
        print(
            f"{size:.2f} GB: save {save:.2f} s, sum up {add:.2f} s, verify "
            f"{verify:.2f} s, load {load:.2f} s"
        )


def main():
    """Damages, then times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--flips", type=int, default=60)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        damage_all(pathlib.Path(place) / "small", flags.flips)
        cost(pathlib.Path(place) / "large", flags.gigabytes)


if __name__ == "__main__":
    main()

"""Peak memory of loading a large file of weights, by the size of the file.

Run:  python -m benchmarks.prediction.loading [--variant=g/14] [--devices=8]

Makes a timm folder of the network with random numbers in a temporary folder and loads it,
each way in a process of its own: `load_model` and `load_flax` on one device, then both on a
mesh of CPU devices that split the parameters (fsdp). Memory is the peak of what the process
holds (VmHWM of Linux), with Python, JAX and the arrays on the devices, which are the host's
memory here.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from benchmarks import smoke
from vit_jax import models
from vit_jax.weights import export
from vit_jax.weights.pretrained import Pretrained

# Ways to load the folder `sys.argv[1]`; the last line prints the peak.
WAYS = {
    "load_model": "vit_jax.load_model(PLACE, tell=str)",
    "load_flax": "vit_jax.load_flax(PLACE, tell=str)",
    "load_model, mesh": "vit_jax.load_model(PLACE, mesh=mesh, tell=str)",
    "load_flax, mesh": "vit_jax.load_flax(PLACE, shardings=mesh, tell=str)",
}
PROGRAM = """
import pathlib, re, sys
import jax, vit_jax
from vit_jax.distributed import mesh as meshes
PLACE = sys.argv[1]
mesh = meshes.create(meshes.MeshConfig(data=1, fsdp=jax.device_count()))
jax.block_until_ready(jax.numpy.zeros(1))
status = lambda: pathlib.Path("/proc/self/status").read_text()
before = re.search(r"VmRSS:\\s+(\\d+)", status())[1]
loaded = {way}
print(before, re.search(r"VmHWM:\\s+(\\d+)", status())[1])
"""


def make(folder, variant, depth):
    """Writes a timm folder whose blocks are alike, one array at a time."""
    model = models.create(variant, num_classes=1_000, depth=1, activation="gelu")
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: rng.standard_normal(s.shape, np.float32), model.shapes
    )
    one = pathlib.Path(folder, "one")
    one.mkdir()
    made = Pretrained(params, model.options, "vit_jax", "made")
    export.export(made, "timm", one)
    config = json.loads((one / "config.json").read_text())
    data = (one / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    arrays = json.loads(data[8:start])
    header, parts, end = {"__metadata__": arrays.pop("__metadata__")}, [], 0
    for name, about in arrays.items():
        first, last = about["data_offsets"]
        for i in range(depth if name.startswith("blocks.0.") else 1):
            places = [end, end + last - first]
            copy = name.replace("blocks.0.", f"blocks.{i}.")
            header[copy] = {**about, "data_offsets": places}
            parts.append((start + first, start + last))
            end = places[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = pathlib.Path(folder, "many")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first, last in parts:
            file.write(memoryview(data)[first:last])
    return path


def peak(path, way, devices):
    """Returns memory before and at the peak of loading, in bytes, and seconds."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{way}", way), str(path)],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    kilobytes = re.findall(r"\d+", done.stdout.splitlines()[-1])
    return *(1024 * int(number) for number in kilobytes), time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="g/14")
    parser.add_argument("--depth", type=int, default=0, help="of the variant if 0")
    parser.add_argument("--devices", type=int, default=8, help="of the mesh")
    flags = smoke.parse(parser, "--variant=Ti/16 --depth=2 --devices=2")
    depth = flags.depth or models.create(flags.variant, num_classes=0).config.depth
    with tempfile.TemporaryDirectory() as folder:
        path = make(folder, flags.variant, depth)
        size = (path / "model.safetensors").stat().st_size
        print(f"file: {size / 1e9:.2f} GB")
        print("way               start, GB  peak, GB  peak / file  seconds")
        for name, way in WAYS.items():
            devices = flags.devices if "mesh" in name else 1
            start, most, took = peak(path, way, devices)
            cells = f"{start / 1e9:9.2f}  {most / 1e9:8.2f}  {most / size:11.3f}"
            print(f"{name:16}  {cells}  {took:7.1f}")


if __name__ == "__main__":
    main()

"""What `vit_jax.compile` says of a training step, beside what the GPU of this machine does.

python -m benchmarks.compile.gpu_measured --out=rows.jsonl [--only=REGEX] [--steps=20]
python -m benchmarks.compile.gpu_measured --out=rows.jsonl --table  prints the file as a table

Each row is a process of its own. It compiles the step twice: for the description of the
GPU, without autotuning, as `vit_jax.compile` does; and for the GPU itself, as training
does. It runs both on the same made-up batch. Peaks are those that the compiler says and
that JAX's allocator counted; times are medians of five groups of steps.
"""

import argparse
import json
import math
import os
import statistics
import time

import jax
import numpy as np

from benchmarks import smoke
from benchmarks.compile import ahead
from vit_jax import compile
from vit_jax.config import loading
from vit_jax.distributed import chips
from vit_jax.distributed import mesh as meshes
from vit_jax.tools.planning import analysis, gpus
from vit_jax.training import config as configuration
from vit_jax.training import train_setup

_B16 = "configs/b16_i21k.py"
_ROWS = {
    "B/16": (_B16, "batch_size=256"),
    "B/16, einsum": (_B16, "batch_size=256", "model.attention_impl=einsum"),
    "B/16, scan": (_B16, "batch_size=256", "model.scan=True"),
    "L/16": (f"{_B16}:model=L/16", "batch_size=128"),
    "H/14": (f"{_B16}:model=H/14", "batch_size=64"),
    "L/16, remat full": (
        *(f"{_B16}:model=L/16", "batch_size=128", "model.remat_policy=full"),
    ),
    "MAE": ("configs/mae.py", "batch_size=256"),
    "DINO": ("configs/dino.py", "batch_size=64"),
    "Swin-B": ("configs/swin.py:model=B", "batch_size=128"),
    "CLIP": ("configs/clip.py", "batch_size=256", "data.tokenizer=bytes"),
    "B/16, 384": (_B16, "batch_size=64", "data.image_size=(384,384)"),
    "R50+B/16": (_B16, "batch_size=128", "model.variant=R50+B/16"),
    "Mixer": ("configs/mixer.py", "batch_size=256"),
    "tiny": ("configs/digits.py", "model.depth=1"),  # For --smoke.
}


def _measure(words, steps):
    """Predicts and runs one step in this process; returns a row."""
    recipe, *overrides = words
    pairs = (word.split("=", 1) for word in ["model.dtype=bfloat16", *overrides])
    keys = {key: loading.parse_override(value) for key, value in pairs}
    config = configuration.load(recipe, keys)
    device = jax.devices()[0]
    row = {"device": device.device_kind, "batch": config.batch_size}
    kinds = {gpu.kind: name for name, gpu in gpus.GPUS.items()}
    examples = 1_281_167
    if device.device_kind in kinds:
        place = gpus.Gpus(kinds[device.device_kind], hosts=1, per_host=1)
        config = compile._placed(config, place)
        mesh = meshes.create(config.mesh, place.devices())
        limit = place.usable_memory(device)
        row |= analysis.analyse(config, mesh, examples, limit).to_json()
    mesh = meshes.create(config.mesh, [device])
    setup = train_setup.build(config, mesh, examples)
    lowered = setup.train_step.lower(setup.layout.shapes, setup.layout.batch)
    found = {}
    # The first is what training does.
    options = {"autotuned": None, "as_predicted": analysis.lowering(mesh)[1]}
    for name, chosen in options.items():
        began = time.perf_counter()
        step = lowered.compile(compiler_options=chosen)
        found[f"{name}_compile_seconds"] = round(time.perf_counter() - began, 1)
        found[f"{name}_seconds"] = _time(step, setup, steps)
        stats = device.memory_stats() or {}
        found.setdefault("peak_in_use", stats.get("peak_bytes_in_use", 0))
    return row | found


def _time(step, setup, steps):
    """Returns the median seconds of a step in five groups."""
    state, batch = setup.initial_state(), _made(setup.layout.batch)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, batch)
        loss = float(metrics["loss"])
        seconds.append((time.perf_counter() - began) / steps)
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    return statistics.median(seconds[1:])


def _made(shapes):
    """Returns a batch: images of noise, labels and token ids 0 and 1."""
    rng = np.random.default_rng(0)
    highest = {"image": 256, "index": 1}
    return {
        name: jax.device_put(
            rng.integers(highest.get(name, 2), size=x.shape).astype(x.dtype), x.sharding
        )
        for name, x in shapes.items()
    }


def _table(rows):
    """Prints a Markdown table."""
    print(
        "| step | images | peak GiB, said | in use | floor, ms | autotuned | as compiled "
        "| images/s | MFU |"
    )
    print("| --- |" + " ---: |" * 8)
    for row in rows:
        step = row["autotuned_seconds"]
        peak = chips.find(row["device"]).peak_flops
        cells = (
            row["name"],
            str(row["batch"]),
            f"{row['peak_bytes'] / 2**30:.2f}",
            f"{row['peak_in_use'] / 2**30:.2f}",
            f"{row['roofline']['floor'] * 1e3:.1f} ({row['roofline']['bound']})",
            f"{step * 1e3:.1f}",
            f"{row['as_predicted_seconds'] * 1e3:.1f}",
            f"{row['batch'] / step:,.0f}",
            f"{row['model_flops'] / step / peak:.1%}",
        )
        print("| " + " | ".join(cells) + " |")


def main():
    """Runs the rows that are not in the file yet."""
    parser = ahead.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of a group")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    flags = smoke.parse(parser, "--out={folder}/rows.jsonl --only=tiny --steps=1")
    if flags.row:
        print(json.dumps(_measure(_ROWS[flags.row], flags.steps)))
        return
    # JAX counts what is used, and takes no more.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    module = ["benchmarks.compile.gpu_measured", "--out=none", f"--steps={flags.steps}"]
    rows = ((name, [*module, f"--row={name}"]) for name in _ROWS)
    ahead.run(flags, rows, _table)


if __name__ == "__main__":
    main()

"""Cost of a network at an image size: forward speed, and the largest batch on a chip.

A study with `measure="cost"` measures this instead of training, as in the paper's
appendix D.5. The forward pass is timed on the first local device. The largest training
batch comes from compiling for a TPU (`python -m vit_jax.compile`), which needs no TPU.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from etils import epath

from vit_jax.command_line.files import read_json
from vit_jax.config import fields
from vit_jax.distributed import compilation
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tools.sweeps import runs
from vit_jax.training import run_report
from vit_jax.training.config import TrainConfig

TOPOLOGY = "v5e:1x1"
_ROUNDS = 5
_FIRST = 256  # First batch size to compile.
MEASURED = "measured.json"
_EXIT_TOO_LARGE = 3


def measure(config: TrainConfig, folder: str | os.PathLike, *_, keep: bool) -> dict:
    """Measures the cost of a network, or returns the report of an earlier measurement.

    Args:
      config: complete config, with the batch size of the timed forward passes.
      folder: folder for report.json, the compiled config, and each measurement, so that
        an interrupted one resumes: a compilation takes minutes.
      keep: not used; exists for `runs.train`.

    Returns:
      A report like that of a training run, with the evaluation "cost":
      images_per_second and gmacs of a forward pass, and largest_batch (0 if not even
      one image fits).

    Raises:
      UserError: the compiler for TPUs is missing, or the folder cannot be written.
    """
    if done := run_report.read_report(folder):
        return done
    epath.Path(folder).mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    model = config.build_model()
    scores = {
        "images_per_second": _once(
            folder, "images_per_second", forward_speed, model, config
        ),
        "largest_batch": _once(folder, "largest_batch", largest_batch, config, folder),
        "gmacs": cost.macs_per_image(model) / 1e9,
    }
    report = {
        "config": config.name,
        "variant": config.model.variant,
        "dataset": config.data.name,
        "steps": 0,
        "wall_seconds": time.perf_counter() - began,
        "compute": {},
        "final": {"cost": {"params": scores}},
    }
    runs.write_json(folder, run_report.FILE, report)
    return report


def forward_speed(model, config: TrainConfig) -> float:
    """Returns images per second of the forward pass, the median of 5 rounds."""
    shape = (config.batch_size, *config.data.image_size, config.data.channels)
    images = jnp.zeros(shape, jnp.float32)
    params = jax.jit(model.init)(jax.random.key(config.seed))
    options = compilation.options(bfloat16=model.config.rounds_products)
    forward = jax.jit(model.apply, compiler_options=options)
    jax.block_until_ready(forward(params, images))  # Compile before timing.
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        jax.block_until_ready(forward(params, images))
        seconds.append(time.perf_counter() - began)
    return config.batch_size / statistics.median(seconds)


def largest_batch(config: TrainConfig, folder: os.PathLike) -> int:
    """Returns the largest batch of a bfloat16 training step that fits a chip.

    `vit_jax.compile --largest_batch` finds it, with a precision of 5 % or one image.

    Args:
      config: complete config.
      folder: folder for config.py, the file that is compiled.

    Raises:
      UserError: the compiler for TPUs is missing.
    """
    file = epath.Path(folder) / "config.py"
    raw = fields.to_json(config) | {"init": {}, "batch_size": _FIRST}
    raw["model"]["dtype"] = "bfloat16"  # The timed config may be float32, for CPUs.
    file.write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config(arg=None):\n"
        f"    return ConfigDict({raw!r})\n"
    )
    words = [f"--config={file}", f"--topology={TOPOLOGY}", "--largest_batch", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "vit_jax.compile", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == _EXIT_TOO_LARGE:
        return 0
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise UserError(f"python -m vit_jax.compile {' '.join(words)}: {lines[-1]}")
    return json.loads(done.stdout)["settings"]["batch_size"]


def _once(folder: str | os.PathLike, name: str, measure: Callable, *args: object):
    """Returns a measurement stored in the folder, or measures and stores it."""
    path = epath.Path(folder) / MEASURED
    measured = read_json(path) if path.exists() else {}
    if name not in measured:
        measured[name] = measure(*args)
        runs.write_json(folder, MEASURED, measured)
    return measured[name]

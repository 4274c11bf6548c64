"""Finds the largest batch of a training step that fits the devices, by compiling it."""

import dataclasses
import math
import os
import pathlib
import re
import time
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from vit_jax.config import fields
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.tools.planning import analysis
from vit_jax.tools.planning.analysis import Analysis
from vit_jax.training import loop
from vit_jax.training.config import TrainConfig
from vit_jax.weights import checkpoint_folders

_WITHIN = 0.05  # Relative precision of the result.


def largest_batch(
    config: TrainConfig,
    mesh: Mesh,
    examples: int,
    limit: int | None,
    most: int = 2**31,
) -> tuple[TrainConfig, Analysis]:
    """Finds the largest batch of a training step that fits each device.

    A batch that is 5 % larger, or larger by the fewest images that can be split over
    the devices, was compiled too and does not fit.

    Args:
      config: complete config; its batch is compiled first.
      mesh: devices of a topology.
      examples: number of training examples.
      limit: bytes of a device that a program can use.
      most: maximum batch to try, if it is more than one image per device.

    Returns:
      The config with this batch, and its analysis; if no batch fits, those for one
      image per device.

    Raises:
      UserError: `limit` is None, or a step fails to compile for a reason other than its
        size.
    """
    if limit is None:
        raise UserError(
            "--largest_batch: the memory of this device is unknown: leave the flag out"
        )
    whole = meshes.num_data_devices(mesh) * config.optim.grad_accum_steps
    whole *= config.data.transforms.packs
    whole *= max(1, getattr(config.model, "drop_path_group", 0))
    if config.optim.sam_rho and config.optim.sam_batch_size:
        whole = math.lcm(whole, config.optim.sam_batch_size)
    best, largest, step = 0, None, _WITHIN / 2
    too_large = 1 + max(1, most // whole)
    # In units of the fewest images that can be split; often images per device.
    count = min(max(1, config.batch_size // whole), too_large - 1)
    while too_large - best > max(1, _WITHIN * best):
        trial = fields.replace(config, {"batch_size": count * whole})
        result = analysis.analyse(trial, mesh, examples, limit)
        if not result.peak_bytes:
            raise UserError(f"batch_size={count * whole}: {result.error}")
        arguments = result.params_bytes + result.moments_bytes + result.average_bytes
        per_image = max(1, result.peak_bytes - arguments) / count
        linear = int((limit - arguments) / per_image)
        if result.fits:
            # Near the limit XLA saves memory, so more than `linear` predicts may fit.
            best, largest = count, (trial, result)
            count = max(linear, math.ceil(count * (1 + step)))
            step *= 2
        else:
            too_large = count
            largest = largest if best else (trial, result)
            count = min(max(linear, 1), int(count / (1 + _WITHIN / 2)))
        if not best < count < too_large:
            count = (best + too_large) // 2
    return largest


def of_run(
    config: TrainConfig, workdir: str | os.PathLike, tell: Callable[[str], None]
) -> TrainConfig:
    """Returns the config of a run with the largest batch that fits the devices here.

    The batch is at most the training split. A run that resumes keeps the batch of its
    newest checkpoint.

    Args:
      config: complete config.
      workdir: folder of the run.
      tell: function called with a line about the batch.

    Raises:
      UserError: no batch fits, or the memory is unknown.
    """
    if checkpoint_folders.has_checkpoint(workdir):
        batch_size = checkpoint_folders.read_metadata(workdir)["config"]["batch_size"]
        tell(f"batch_size={batch_size:,}, as when the run in {workdir} started")
        return fields.replace(config, {"batch_size": batch_size})
    began = time.perf_counter()
    config = loop.resolved(config)
    mesh = meshes.create(config.mesh)
    source = open_source(config.data, config.data.split)
    task = config.task.of_records(config.data, source)
    limit = usable_memory(mesh.devices.flat[0])
    largest, result = largest_batch(
        dataclasses.replace(config, task=task), mesh, len(source), limit, len(source)
    )
    used = f"{result.peak_bytes / 2**30:.2f} of {limit / 2**30:.2f} GiB per device"
    if not result.fits:
        raise UserError(
            f"--largest_batch: {largest.batch_size:,} images need {used}: choose a smaller "
            "model or image size, model.remat_policy, mesh.fsdp, or more devices"
        )
    seconds = time.perf_counter() - began
    tell(
        f"batch_size={largest.batch_size:,}, within 5 % of the largest that fits, up to "
        f"all {len(source):,} images: {used} by the compiler ({seconds:.0f} s)"
    )
    return fields.replace(config, {"batch_size": largest.batch_size})


def usable_memory(device: jax.Device) -> int | None:
    """Returns the bytes of a device here that a program can use; None if unknown.

    CPU devices share the available memory of the host.
    """
    if device.platform != "cpu":
        return sharding.device_memory([device])
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
    except OSError:
        return None
    kilobytes = int(re.search(r"MemAvailable: *(\d+) kB", text)[1])
    return kilobytes * 1024 // jax.local_device_count()

"""The largest batch of a training step that fits the devices, by compiling it."""

import math

from jax.sharding import Mesh

from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.tools.planning import analysis
from vit_jax.tools.planning.analysis import Analysis
from vit_jax.training.config import TrainConfig

_WITHIN = 0.05  # Precision of the result.


def largest_batch(
    config: TrainConfig, mesh: Mesh, examples: int, limit: int | None
) -> tuple[TrainConfig, Analysis]:
    """Finds the largest batch of a training step that fits each device.

    A batch that is 5 % or one image per device larger was compiled too, and does not fit.

    Args:
      config: complete config; its batch is compiled first.
      mesh: devices of a topology.
      examples: number of training examples.
      limit: bytes of a device that a program can use.

    Returns:
      The config with this batch, and its analysis; with one image per device, which does
      not fit, if there is none.

    Raises:
      UserError: `limit` is None, or a step does not compile for another reason than its
        size.
    """
    if limit is None:
        raise UserError(
            "--largest_batch: the compiler does not say how much memory a device has: "
            "leave the flag out"
        )
    whole = mesh.size // mesh.shape["model"] * config.optim.grad_accum_steps
    count = max(1, config.batch_size // whole)  # Images per device and microbatch.
    best, found, too_large, step = 0, None, math.inf, _WITHIN / 2
    while too_large - best > max(1, _WITHIN * best):
        trial = fields.replace(config, {"batch_size": count * whole})
        result = analysis.analyse(trial, mesh, examples, limit)
        if not result.peak_bytes:
            raise UserError(f"batch_size={count * whole}: {result.error}")
        arguments = result.params_bytes + result.moments_bytes + result.average_bytes
        per_image = max(1, result.peak_bytes - arguments) / count
        linear = int((limit - arguments) / per_image)
        if result.fits:
            # Near the limit XLA saves memory, so that more than `linear` may fit.
            best, found = count, (trial, result)
            count = max(linear, math.ceil(count * (1 + step)))
            step *= 2
        else:
            too_large = count
            found = found if best else (trial, result)
            count = min(max(linear, 1), int(count / (1 + _WITHIN / 2)))
        if not best < count < too_large:
            count = (best + too_large) // 2
    return found

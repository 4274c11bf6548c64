"""SAM and GSAM: gradients at the highest loss nearby, for any task and optimiser.

SAM (arXiv:2010.01412) takes a step uphill from the parameters w along the gradient g to
w + e, and trains w with the gradient r at w + e. GSAM (arXiv:2203.08065) also changes
the direction of r.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from vit_jax.config.fields import key
from vit_jax.config.lengths import RunLength
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.training.optim.config import GradFn, Moving, PlainOptimConfig
from vit_jax.training.schedules import Number, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(PlainOptimConfig):
    """Keys of `config.optim` that every optimiser has, with those of SAM and GSAM."""

    sam_rho: float = key(
        0.0,
        "SAM (arXiv:2010.01412): length rho of the step uphill to the parameters at "
        "which the gradient is computed; every step then takes two passes. 0 is off.",
    )
    sam_rho_end: float = key(
        0.0,
        "GSAM (arXiv:2203.08065): value of `optim.sam_rho` at the end of the run; it "
        "decreases with the learning rate. 0 keeps it constant.",
    )
    sam_adaptive: str = key(
        "none",
        'Scale of SAM\'s step uphill for each parameter: "none", "asam" for the size '
        'of the parameter as in ASAM (arXiv:2102.11600), or "scaled" for its size as '
        "in "
        "big_vision.",
        choices=("none", "asam", "scaled"),
    )
    sam_batch_size: int = key(
        0,
        "Number of images for which SAM computes a common step uphill (the m of "
        "m-sharpness), on any number of devices; 0 is the whole batch.",
    )
    gsam_alpha: float = key(
        0.0,
        "GSAM (arXiv:2203.08065): weight of the part of the gradient that lowers the "
        "surrogate gap; 0 is off.",
    )
    gsam_minimize: str = key(
        "robust",
        'Loss that GSAM minimises beside the surrogate gap: "robust", the loss after '
        'the step uphill, or "clean", the loss before it.',
        choices=("robust", "clean"),
    )

    @property
    def passes(self) -> int:
        return 2 if self.sam_rho else 1

    def microbatches(self, batch_size: int, mesh: Mesh) -> tuple[int, int]:
        size = self.sam_batch_size
        if not (self.sam_rho and size):
            return super().microbatches(batch_size, mesh)
        devices = meshes.num_data_devices(mesh)
        if batch_size % size or size % devices:
            raise UserError(
                f"optim.sam_batch_size={size}: must divide batch_size={batch_size} and be a "
                f"multiple of the {devices} devices, which share these images: "
                f"set it to {math.lcm(devices, math.gcd(size, batch_size))}, or to 0 for "
                "the whole batch"
            )
        groups = batch_size // size
        parts = -(-self.grad_accum_steps // groups)
        meshes.check_batch(batch_size, groups * parts, mesh)
        return groups, parts

    def microbatch_key(self, parts: int) -> str:
        if parts > 1:
            return super().microbatch_key(parts)
        return f"optim.sam_batch_size={self.sam_batch_size}"

    def wrap_gradients(
        self,
        gradients: GradFn,
        rate: Schedule,
        peak: Number,
        run: RunLength,
        moving: Moving,
    ) -> GradFn:
        if not self.sam_rho:
            return gradients
        return climb(gradients, self, radius(self, rate, peak, run), moving)


def radius(
    config: OptimConfig, rate: Schedule, peak: Number, run: RunLength
) -> Schedule:
    """Returns the radius rho as a function of the number of steps taken.

    With `sam_rho_end` the radius is a linear function of the learning rate, as in GSAM:
    `sam_rho` at the highest rate, `sam_rho_end` at the last rate. In the warmup, it is
    `sam_rho_end` for learning rates below the last one.
    """
    high, low = config.sam_rho, config.sam_rho_end
    if not low:
        return lambda step: high

    def at(step):
        last = rate(run.total_steps)
        part = (rate(step) - last) / jnp.maximum(peak - last, jnp.finfo("float32").tiny)
        return low + (high - low) * jnp.clip(part, 0.0, 1.0)

    return at


def climb(
    grad_fn: GradFn,
    config: OptimConfig,
    rho: Schedule,
    moving: Moving = lambda grads, step: grads,
) -> GradFn:
    """Returns a function like `grad_fn` that computes gradients after a step uphill.

    Its metrics and statistics are those of the first pass, at the parameters w.

    Args:
      grad_fn: gradient function of the loss. It is called twice with the same key, so
        that both passes have the same dropout.
      config: section `optim` of the config.
      rho: length of the step uphill, as a function of the number of steps taken.
      moving: function of gradients and the number of steps taken that sets the
        gradients of parameters that are still frozen to zero. These parameters do not
        take part in the step uphill or in GSAM's products.
    """

    def gradients(state, batch, key):
        length = rho(state.step)
        moving_now = functools.partial(moving, step=state.step)
        clean, aux = grad_fn(state, batch, key)
        away = perturbation(
            state.params, moving_now(clean), length, config.sam_adaptive
        )
        worse = jax.tree.map(lambda p, e: (p + e).astype(p.dtype), state.params, away)
        robust, _ = grad_fn(state.replace(params=worse), batch, key)
        how = config.gsam_alpha, config.gsam_minimize, moving_now
        return turned(clean, robust, *how), aux

    return gradients


def perturbation(params: dict, grads: dict, rho: Number, adaptive: str) -> dict:
    """Returns the step uphill to the highest loss within rho, to first order.

    Args:
      params: parameters w.
      grads: gradients g, with the same structure.
      rho: length of the step; relative to the sizes of the parameters unless `adaptive`
        is "none".
      adaptive: "none": rho g / |g|, with one norm over all parameters. "asam":
        rho w^2 g / ||w| g| (arXiv:2102.11600). "scaled": rho |w| g / |g|, as in
        big_vision.
    """
    scale = grads
    if adaptive == "asam":
        scale = jax.tree.map(lambda w, g: jnp.abs(w) * g, params, grads)
    # If all parameters are frozen, the gradient and the step are 0.
    norm = jnp.maximum(optax.tree.norm(scale), jnp.finfo("float32").tiny)
    if adaptive == "asam":
        return jax.tree.map(lambda w, s: rho / norm * jnp.abs(w) * s, params, scale)
    if adaptive == "scaled":
        return jax.tree.map(lambda w, g: rho / norm * jnp.abs(w) * g, params, grads)
    return jax.tree.map(lambda g: rho / norm * g, grads)


def turned(
    clean: dict,
    robust: dict,
    alpha: float,
    minimize: str,
    moving: Callable[[dict], dict] = lambda grads: grads,
) -> dict:
    """Returns GSAM's gradient; the robust gradient if `alpha` is 0.

    Args:
      clean: gradient g at the parameters.
      robust: gradient r after the step uphill.
      alpha: weight of the orthogonal component.
      minimize: "robust": r - alpha (g - projection of g on r), which lowers the loss
        around the parameters, as in the paper. "clean": g + alpha (r - projection of r
        on g), an option of GSAM's code.
      moving: function that sets the gradients of frozen parameters to zero.
    """
    if not alpha:
        return robust
    along, other, sign = clean, robust, 1
    if minimize == "robust":
        along, other, sign = robust, clean, -1
    # optax.tree.vdot flattens parameters, which gathers split ones on each device.
    dot = lambda x, y: optax.tree.sum(optax.tree.mul(moving(x), y))
    square = jnp.maximum(dot(along, along), jnp.finfo("float32").tiny)
    part = dot(other, along) / square
    return jax.tree.map(lambda a, o: a + sign * alpha * (o - part * a), along, other)

"""A plain ViT trained in a plain way, to compare ahead-of-time compilations with.

Built like the one of google-research/big_vision, in our own words: Linen's own layers,
blocks under `nn.scan` with every one rematerialised as a whole, bfloat16 computation on
float32 parameters, Adam with a bfloat16 first moment and decoupled weight decay, sigmoid
loss, pure data parallelism over all devices.

python -m benchmarks.compile.baseline_vit --variant=H/14 --topology=v5e:16x16
prints what it needs, one JSON object with the keys of `vit_jax.compile --json`.
"""

import argparse
import dataclasses
import functools
import json
import os
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import smoke
from vit_jax.distributed import compilation
from vit_jax.models import cost
from vit_jax.tools.planning import analysis, costs, hlo, topology


@dataclasses.dataclass(frozen=True)
class Size:
    """Width, depth, heads, hidden width and patch side of a variant."""

    width: int
    depth: int
    num_heads: int
    hidden: int
    patch: int


# arXiv:2010.11929, table 1.
SIZES = {
    "Ti/16": Size(192, 12, 3, 768, 16),  # arXiv:2012.12877.
    "B/16": Size(768, 12, 12, 3072, 16),
    "L/16": Size(1024, 24, 16, 4096, 16),
    "H/14": Size(1280, 32, 16, 5120, 14),
}


class Block(nn.Module):
    """Pre-LayerNorm encoder block, as a step of a scan."""

    size: Size
    dtype: jnp.dtype = jnp.bfloat16

    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(self.size.num_heads, dtype=self.dtype)(y, y)
        x = x + y
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(self.size.hidden, dtype=self.dtype)(y))
        y = nn.Dense(self.size.width, dtype=self.dtype)(y)
        return x + y, None


class VisionTransformer(nn.Module):
    """Classifier on the class token with a tanh layer before its head."""

    size: Size
    num_classes: int
    dtype: jnp.dtype = jnp.bfloat16

    @nn.compact
    def __call__(self, images):
        side = (self.size.patch,) * 2
        x = nn.Conv(
            self.size.width, side, strides=side, padding="VALID", dtype=self.dtype
        )(images)
        x = x.reshape(len(x), -1, self.size.width)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, self.size.width))
        cls = jnp.tile(cls.astype(x.dtype), (len(x), 1, 1))
        x = jnp.concatenate([cls, x], axis=1)
        init = nn.initializers.normal(0.02)
        x = x + self.param("posembed", init, (1, *x.shape[1:])).astype(x.dtype)
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.size.depth,
        )
        x, _ = blocks(self.size, self.dtype, name="blocks")(x, None)
        x = nn.LayerNorm(dtype=self.dtype)(x)[:, 0]
        x = nn.tanh(nn.Dense(self.size.width, dtype=self.dtype)(x))
        return nn.Dense(self.num_classes, dtype=jnp.float32)(x)


def optimizer(rate: float = 1e-3, decay: float = 0.03) -> optax.GradientTransformation:
    """Adam with a bfloat16 first moment, and weight decay of the kernels."""
    return optax.chain(
        optax.scale_by_adam(mu_dtype=jnp.bfloat16),
        optax.add_decayed_weights(
            decay, mask=functools.partial(jax.tree.map, lambda p: p.ndim > 1)
        ),
        optax.scale(-rate),
    )


def step(model, tx, state, images, labels):
    """One training step on images (B, Y, X, C), uint8, and labels (B,)."""
    params, opt_state = state
    images = images.astype(jnp.float32) / 127.5 - 1

    def loss(params):
        logits = model.apply({"params": params}, images)
        targets = jax.nn.one_hot(labels, model.num_classes)
        return optax.sigmoid_binary_cross_entropy(logits, targets).sum(-1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def lower(variant: str, num_classes: int, batch_size: int, side: int, devices: list):
    """Lowers a data-parallel training step.

    Args:
      variant: a key of SIZES.
      num_classes: of the head.
      batch_size: images over all devices.
      side: of the images, in pixels.
      devices: of a topology or of this machine.

    Returns:
      The lowered step, the traced one, the shapes of the state, and the mesh.
    """
    model = VisionTransformer(SIZES[variant], num_classes)
    tx = optimizer()
    mesh = Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    images = jax.ShapeDtypeStruct((batch_size, side, side, 3), jnp.uint8)
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)

    def init():
        zeros = jnp.zeros((1, *images.shape[1:]))
        params = model.init(jax.random.key(0), zeros)["params"]
        return params, tx.init(params)

    state = jax.eval_shape(init)
    traced = jax.jit(
        functools.partial(step, model, tx),
        in_shardings=(everywhere, split, split),
        out_shardings=everywhere,
        donate_argnums=0,
    ).trace(state, images, labels)
    platform, _ = analysis.lowering(mesh)
    return traced.lower(lowering_platforms=(platform,)), traced, state, mesh


def main() -> None:
    """Compiles the step for TPUs or GPUs and prints what it needs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", required=True, choices=SIZES)
    parser.add_argument("--topology", required=True)
    parser.add_argument("--num_classes", type=int, default=21_843)
    parser.add_argument("--batch_size", type=int, default=4_096)
    parser.add_argument("--side", type=int, default=224)
    flags = smoke.parse(
        parser,
        "--variant=Ti/16 --topology=v5e:2x2 --num_classes=10 --batch_size=8 --side=32",
    )
    place = topology.parse(flags.topology)
    place.prepare()
    # JAX, imported above, has read its environment already.
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    devices = place.devices()
    lowered, traced, (params, moments), mesh = lower(
        flags.variant, flags.num_classes, flags.batch_size, flags.side, devices
    )
    began = time.perf_counter()
    platform, options = analysis.lowering(mesh)
    gpu = compilation.options("gpu") if platform == "cuda" else {}  # As ours.
    compiled = lowered.compile(compiler_options=gpu | (options or {}))
    seconds = time.perf_counter() - began
    stats = compiled.memory_analysis()
    module = hlo.parse(compiled.as_text())
    row = {
        "heading": f"plain {flags.variant} on {flags.topology}",
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "params_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)),
        "moments_bytes": sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(moments)
        ),
        "argument_bytes": stats.argument_size_in_bytes,
        "peak_bytes": stats.peak_memory_in_bytes,
        "flops": 2 * cost.macs_of(traced.jaxpr.jaxpr) / len(devices),
        "moved_bytes": costs.count_bytes_moved(module),
        "collectives": costs.summarize_collectives(
            costs.find_collectives(module, analysis.network_hosts(mesh))
        ),
        "compile_seconds": round(seconds, 1),
        "fits": True,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()

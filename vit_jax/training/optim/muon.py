"""Muon (arXiv:2502.16982): orthogonalised steps for the matrices of the blocks.

Other parameters have the steps of Adam. Every kernel is treated as a matrix (inputs,
outputs), with the heads merged and the window of a convolution as a part of the inputs.
All matrices of the same shape are orthogonalised as one stack, split over all devices.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.distributed.mesh import AXES
from vit_jax.training.optim.outside import OutsideConfig
from vit_jax.training.schedules import Number

_WITHIN = ("fsdp", "model")  # Axes of the mesh along which parameters are split.
_HEADS = re.compile(
    r"(^|/)(\w*heads?(_dist)?|projection|segmenter)/|(^|/)decoder/kernel$"
)
_EMBEDDINGS = re.compile(r"(^|/)(embedding|conv_root)/kernel$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonBase(OutsideConfig):
    """Muon for the matrices of the blocks, Adam for the rest."""

    # Parameters with Adam have the same weight decay as the others,
    # `optim.weight_decay`.
    left_out = ("adam_weight_decay",)

    consistent_rms: float | None = key(
        0.2,
        "Root mean square of a step of Muon, divided by the learning rate. The default "
        "is about the value for Adam, so that learning rates and weight decay for Adam "
        "can be kept. None uses the scale of Muon's original code.",
        optional=True,
        above=0,
    )
    patch_embedding: bool = key(
        False,
        "Also use Muon for the kernel of the patch embedding and for the first "
        "convolution of a ResNet. Convolutions of a stem always use Muon.",
    )

    def make(
        self, rate: Number, decay: Number | None = None, mask: dict | None = None
    ) -> optax.GradientTransformationExtraArgs:
        del decay, mask  # Weight decay is added later in the chain.
        muon = optax.chain(
            momentum(self.beta, self.mu_dtype, nesterov=self.nesterov),
            optax.stateless(lambda updates, _: self._orthogonal(updates)),
        )
        adam = optax.scale_by_adam(
            b1=self.adam_b1,
            b2=self.adam_b2,
            eps=self.eps,
            eps_root=self.adam_eps_root,
            mu_dtype=self.mu_dtype,
            nesterov=self.nesterov,
        )
        of_each = optax.partition({"muon": muon, "adam": adam}, self.labels)
        return optax.chain(of_each, optax.scale_by_learning_rate(rate))

    def labels(self, params: dict) -> dict:
        """Returns "muon" or "adam" for each parameter, with separate blocks."""
        label = lambda keys, leaf: (
            "muon" if self.inputs(_path(keys), leaf.ndim) else "adam"
        )
        return jax.tree.map_with_path(label, params)

    def inputs(self, path: str, ndim: int) -> int:
        """Returns the number of leading axes that are inputs; 0 if Adam is used."""
        *_, module, name = ("", "", *path.split("/"))
        if name != "kernel" or ndim not in (2, 3, 4) or _HEADS.search(path):
            return 0
        if _EMBEDDINGS.search(path) and not self.patch_embedding:
            return 0
        # Query, key and value kernels are (D, H, K), "out" is (H, K, D), convolutions
        # are (height, width, inputs, outputs).
        return 2 if ndim == 3 and module == "out" else {2: 1, 3: 1, 4: 3}[ndim]

    def _orthogonal(self, updates: dict) -> dict:
        """Returns the orthogonalised updates, scaled by factors of their shapes."""
        leaves = jax.tree.leaves_with_path(updates)
        groups = collections.defaultdict(list)
        for i, (keys, leaf) in enumerate(leaves):
            matrix = _Matrix.of(leaf.shape, self.inputs(_path(keys), leaf.ndim))
            groups[matrix.rows, matrix.columns].append((i, matrix))
        scaled = [None] * len(leaves)
        for members in groups.values():
            stack = jnp.stack([m.flat(leaves[i][1]) for i, m in members])
            stack = self._orthogonalize(stack)
            for each, (i, matrix) in zip(stack, members, strict=True):
                scaled[i] = self._scale(matrix) * matrix.shaped(each)
        return jax.tree.unflatten(jax.tree.structure(updates), scaled)

    def _orthogonalize(self, x: Float[Array, "N R C"]) -> Float[Array, "N R C"]:
        """Orthogonalises matrices; each device computes a part of the stack."""
        axes = optax.contrib.MuonDimensionNumbers(1, 2)
        # Without momentum this is only the Newton-Schulz iteration, without a state.
        iteration = optax.contrib.scale_by_muon(
            ns_coeffs=self.ns_coeffs,
            ns_steps=self.ns_steps,
            beta=0.0,
            eps=self.eps,
            nesterov=False,
            preconditioning=self.preconditioning,
            weight_dimension_numbers=axes,
        )
        number, devices = len(x), _size(AXES)
        padded = jnp.pad(x, ((0, -number % devices), (0, 0), (0, 0)))
        padded = _split(_split(padded, within=True), within=False)
        y, _ = iteration.update(padded, iteration.init(padded))
        y = _split(_split(y, within=False), within=True)[:number]
        if self.adaptive:
            y = y * (x * y).sum((1, 2), keepdims=True)
        return y

    def _scale(self, matrix: "_Matrix") -> float:
        if self.consistent_rms is None:
            return math.sqrt(max(1, matrix.outputs / matrix.inputs))
        return self.consistent_rms * math.sqrt(max(matrix.inputs, matrix.outputs))


class _Matrix(NamedTuple):
    """The shape of a parameter as a matrix, transposed if inputs exceed outputs."""

    shape: Sequence[int]
    inputs: int
    outputs: int

    @classmethod
    def of(cls, shape, leading) -> "_Matrix":
        return cls(shape, math.prod(shape[:leading]), math.prod(shape[leading:]))

    @property
    def rows(self) -> int:
        return min(self.inputs, self.outputs)

    @property
    def columns(self) -> int:
        return max(self.inputs, self.outputs)

    def flat(self, x: Array) -> Float[Array, "R C"]:
        x = x.reshape(self.inputs, self.outputs)
        return x.T if self.inputs > self.outputs else x

    def shaped(self, x: Float[Array, "R C"]) -> Array:
        return (x.T if self.inputs > self.outputs else x).reshape(self.shape)


class MomentumState(NamedTuple):
    """Number of steps taken, and running mean of the gradients."""

    count: jax.Array
    mu: dict


def momentum(
    beta: float, mu_dtype: str, *, nesterov: bool
) -> optax.GradientTransformation:
    """Returns the bias-corrected running mean of gradients, as in optax's Muon."""

    def init(params):
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        return MomentumState(jnp.zeros([], jnp.int32), mu)

    def update(grads, state, params=None):
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        mean = optax.tree.bias_correction(mu, beta, count)
        if nesterov:
            ahead = optax.tree.bias_correction(mu, beta, count + 1)
            now = optax.tree.bias_correction(grads, beta, count)
            mean = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        return mean, MomentumState(count, optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init, update)


def _size(axes: Sequence[str]) -> int:
    """Returns the number of devices along axes of the mesh of `sharding.activations`."""
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    return math.prod(shape.get(axis, 1) for axis in axes)


@jax.named_scope("muon")
def _split(x: Float[Array, "N R C"], *, within: bool) -> Float[Array, "N R C"]:
    """Splits a stack over the devices.

    Parameters are split along columns, but orthogonalisation needs whole matrices. With
    both constraints in sequence, devices exchange parts of matrices, and no device
    holds the whole stack.

    Args:
      x: stack of matrices.
      within: whether each matrix is split by its columns; else the stack is split by
        matrices.
    """
    if _size(AXES) == 1:
        return x
    spec = PartitionSpec(AXES)
    if within:
        columns = _WITHIN if not x.shape[2] % _size(_WITHIN) else None
        spec = PartitionSpec(None, None, columns)
    return jax.lax.with_sharding_constraint(x, spec)


def _path(keys: tuple) -> str:
    return "/".join(key.key for key in keys)

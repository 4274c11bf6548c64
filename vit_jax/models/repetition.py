"""Blocks as a scan, and rematerialisation.

Letters: B images, M tokens, D model width.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.models.encoder import BLOCK, Block, BlockInputs, Encoder, run_block
from vit_jax.models.encoder_config import EncoderConfig

_policies = jax.checkpoint_policies


def _save_attention(primitive, *args, **params) -> bool:
    named = _policies.save_only_these_names("attention")(primitive, *args, **params)
    # Results of cuDNN in jax.nn.dot_product_attention do not have a name.
    return named or primitive.name.startswith("dot_product_attention_fwd")


# Name -> policy that chooses the values to save beside a block's input; other values
# are recomputed.
REMAT_POLICIES = {
    "none": None,  # Saves all values that the derivatives need.
    "full": _policies.nothing_saveable,
    # Saves the results of the six projections and dense layers.
    "dots": _policies.dots_with_no_batch_dims_saveable,
    # Saves the results of attention, so its kernel runs once.
    "attention": _save_attention,
}


def wrap_remat(function: Callable, name: str, *, in_scan: bool) -> Callable:
    """Applies a rematerialisation policy to a function.

    Args:
      function: function of a module and arrays, for flax.linen.remat.
      name: a key of REMAT_POLICIES.
      in_scan: whether `function` is the body of a scan, in which XLA cannot replace
        recomputed values by the earlier ones.
    """
    if name == "none":
        return function
    return nn.remat(function, policy=REMAT_POLICIES[name], prevent_cse=not in_scan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedConfig(EncoderConfig):
    """An encoder with an optional scan over blocks and optional rematerialisation."""

    scan: bool | None = key(
        False,
        "Run the blocks as a scan, which compiles faster but needs more memory; "
        "results and checkpoints do not change. None uses a scan except on GPUs "
        "without `model.remat_policy`, where it would move 1.5 times as many bytes.",
        optional=True,
        changes_result=False,
    )
    remat_policy: str = key(
        "none",
        "Rematerialisation policy: which values the backward pass recomputes instead "
        "of storing them; results do not change. See vit_jax/models/repetition.py.",
        choices=tuple(REMAT_POLICIES),
        changes_result=False,
    )

    @property
    def stacked(self) -> bool:
        """Whether the blocks' parameters are in the layout of a scan."""
        if self.scan is not None:
            return self.scan
        # On GPUs, XLA keeps recomputed values of separate blocks (docs/decisions.md).
        on_gpu = (self.platform or jax.default_backend()) == "gpu"
        return not on_gpu or self.remat_policy != "none"

    @property
    def encoder(self) -> type[Encoder]:
        once = not self.stacked and self.remat_policy == "none"
        return super().encoder if once else RepeatedEncoder


class RepeatedEncoder(Encoder):
    """An encoder with the scan and rematerialisation of `RepeatedConfig`."""

    def run(
        self, x: Float[Array, "B M D"], inputs: Sequence[BlockInputs]
    ) -> Float[Array, "B M D"]:
        """Applies the blocks and the norm, see `Encoder`."""
        config = self.config
        if not config.stacked or self.is_initializing():
            return super().run(x, inputs)
        if inputs[-1].added is not None:  # `begin` has added that of the first block.
            zeros = jnp.zeros_like(inputs[-1].added)
            inputs = [inputs[0]._replace(added=zeros), *inputs[1:]]
        x = scan(config.block(config, name=BLOCK), x, inputs, config)
        return self.final_norm()(x)

    def run_block(
        self, block: Block, x: Float[Array, "B M D"], given: BlockInputs
    ) -> Float[Array, "B M D"]:
        """Applies a block, see `Encoder`."""
        policy = "none" if self.is_initializing() else self.config.remat_policy
        return wrap_remat(run_block, policy, in_scan=False)(block, x, given)


def scan(
    block: Block,
    x: Float[Array, "B M D"],
    inputs: Sequence[BlockInputs],
    config: RepeatedConfig,
) -> Float[Array, "B M D"]:
    """Runs equal blocks as a scan over stacked parameters; call it in a compact method.

    Args:
      block: block with the name BLOCK.
      x: tokens.
      inputs: other inputs of each block, trees of the same structure.
      config: config of the encoder.
    """

    def run(block, x, given):
        return run_block(block, x, given), None

    rounds = config.dtype != "float32"
    if rounds:
        unround = functools.partial(_round, dtype=config.dtype)
        run = nn.map_variables(run, "params", trans_in_fn=unround)
    run = nn.scan(
        wrap_remat(run, config.remat_policy, in_scan=True),
        variable_axes={"params": 0},
        length=config.depth,
    )
    if rounds:
        split = functools.partial(_split_rounded, config=config)
        run = nn.map_variables(run, "params", trans_in_fn=split)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs)
    return run(block, x, stacked)[0]


class _Rounded(NamedTuple):
    """A parameter of a product in a scan.

    Attributes:
      exact: float32 value, which does not receive a gradient.
      rounded: value in the dtype of the computation, which only receives the gradient.
    """

    exact: Float[Array, "*S"]
    rounded: Float[Array, "*S"]


@jax.custom_vjp
def _with_gradient_of(value, other):
    """Returns `value`, and passes its gradient to `other`."""
    return value


_with_gradient_of.defvjp(
    lambda value, other: (value, None), lambda _, grad: (jnp.zeros_like(grad), grad)
)


def _split_rounded(params: Mapping, config: object) -> Mapping:
    """Splits parameters of products into values and receivers of gradients.

    Products round their parameters to the dtype of the computation anyway. Gradients
    are passed to copies that are rounded before the scan, so the scan stacks gradients
    in that dtype instead of float32. Values are rounded inside the scan, so memory does
    not hold a rounded copy of all blocks. Without rematerialisation the scan keeps such
    a copy anyway, so values are not split.
    """

    def split_leaf(path, leaf):
        if any("LayerNorm" in key.key for key in path):
            return leaf
        rounded = leaf.astype(config.dtype)
        if config.remat_policy == "none":
            return rounded
        return _Rounded(jax.lax.stop_gradient(leaf), rounded)

    return jax.tree.map_with_path(split_leaf, params)


def _round(params: Mapping, dtype: str) -> Mapping:
    """Returns the parameters of one block, with parameters of products rounded."""

    def round_leaf(leaf):
        if not isinstance(leaf, _Rounded):
            return leaf
        # XLA would move a plain conversion out of the loop and round all blocks at
        # once.
        kind = jnp.finfo(dtype)
        value = jax.lax.reduce_precision(leaf.exact, kind.nexp, kind.nmant)
        return _with_gradient_of(value.astype(dtype), leaf.rounded)

    return jax.tree.map(
        round_leaf, params, is_leaf=lambda leaf: isinstance(leaf, _Rounded)
    )

"""Rematerialisation: what a block keeps for its backward pass, by name."""

from collections.abc import Callable

import flax.linen as nn
import jax

_policies = jax.checkpoint_policies


def _of_attention(primitive, *args, **params) -> bool:
    named = _policies.save_only_these_names("attention")(primitive, *args, **params)
    # cuDNN's results, of jax.nn.dot_product_attention, have no name.
    return named or primitive.name.startswith("dot_product_attention_fwd")


# Name to what is kept besides the block's input; the rest is computed again.
POLICIES = {
    "none": None,  # Everything that the derivatives ask for; nothing again.
    "full": _policies.nothing_saveable,
    # Results of the six projections and dense layers.
    "dots": _policies.dots_with_no_batch_dims_saveable,
    # What attention mixed, so that a kernel for it runs only once.
    "attention": _of_attention,
}


def wrap(function: Callable, name: str, *, in_scan: bool) -> Callable:
    """Lets the backward pass of a function compute again what was not kept.

    Args:
      function: of a module and arrays, as flax.linen.remat takes it.
      name: one of POLICIES.
      in_scan: whether it is the body of a scan, in which XLA cannot merge what is
        computed again with what was computed before.

    Returns:
      A function of the same results and gradients.
    """
    if name == "none":
        return function
    return nn.remat(function, policy=POLICIES[name], prevent_cse=not in_scan)

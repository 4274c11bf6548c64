"""How encoder blocks are repeated: parameters one by one or stacked, rematerialisation.

One by one, block 3 is "Transformer/encoderblock_3/...", as in all checkpoints. Stacked,
all blocks are "Transformer/encoderblock/..." with a leading axis of length depth, over
which a scan runs.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

ENCODER, STACKED = "Transformer", "encoderblock"
_BLOCK = re.compile(rf"{STACKED}_(\d+)")


def stack(params: Mapping) -> dict:
    """Stacks the parameters of all encoder blocks along a leading axis.

    Args:
      params: nested dict of arrays or jax.ShapeDtypeStruct, blocks one by one. Without
        such blocks (a ResNet, or stacked already) it is returned unchanged.

    Returns:
      The same with the blocks under "Transformer/encoderblock"; stacked shapes have no
      sharding.
    """
    blocks, others = _split(params)
    if not blocks:
        return dict(params)
    trees = [blocks[i] for i in range(len(blocks))]
    stacked = jax.tree.map(lambda *leaves: _stack(leaves), *trees)
    return {**params, ENCODER: {**others, STACKED: stacked}}


def unstack(params: Mapping) -> dict:
    """Returns parameters with the blocks one by one: the inverse of `stack`.

    Args:
      params: nested dict of arrays or jax.ShapeDtypeStruct. Without stacked blocks it is
        returned unchanged.
    """
    encoder = params.get(ENCODER, {})
    if STACKED not in encoder:
        return dict(params)
    stacked = encoder[STACKED]
    depth = jax.tree.leaves(stacked)[0].shape[0]
    blocks = {
        f"{STACKED}_{i}": jax.tree.map(lambda leaf, i=i: _layer(leaf, i), stacked)
        for i in range(depth)
    }
    others = {name: value for name, value in encoder.items() if name != STACKED}
    return {**params, ENCODER: {**others, **blocks}}


def convert(
    tree: object, function: Callable[[Mapping], dict], like: object, params: Mapping
) -> object:
    """Applies a function to every parameter tree of a network within a larger tree.

    Args:
      tree: such as a training state.
      function: `stack` or `unstack`.
      like: the same tree with the network in the layout that it computes with. What has
        the structure of `params` there (moments, averages) is converted; parameters of
        other networks, such as a teacher's, stay.
      params: parameters of the network, as `like` has them.

    Returns:
      The tree with those parts converted.
    """
    own = jax.tree.structure(params)

    def is_own(node):
        return isinstance(node, Mapping) and jax.tree.structure(node) == own

    return jax.tree.map(
        lambda node, part: function(part) if is_own(node) else part,
        like,
        tree,
        is_leaf=is_own,
    )


def is_stacked(path: str) -> bool:
    """Returns whether the parameter at a path has the leading axis of the blocks."""
    return f"{ENCODER}/{STACKED}/" in path


def map_paths(params: Mapping, function: Callable[[str], object]) -> dict:
    """Maps parameter paths to values.

    Args:
      params: nested dict of arrays or jax.ShapeDtypeStruct, in either layout.
      function: of a path as in checkpoints, "Transformer/encoderblock_0/.../kernel".

    Returns:
      Nested dict of values. Where values of stacked blocks differ, an array of them
      that broadcasts against the parameter.
    """

    def value(keys, leaf):
        path = "/".join(key.key for key in keys)
        if not is_stacked(path):
            return function(path)
        path = path.replace(f"/{STACKED}/", f"/{STACKED}_{{}}/")
        values = [function(path.format(i)) for i in range(leaf.shape[0])]
        if len(set(values)) == 1:
            return values[0]
        return np.reshape(values, (-1,) + (1,) * (leaf.ndim - 1))

    return jax.tree.map_with_path(value, params)


def _split(params: Mapping) -> tuple[dict[int, Mapping], dict]:
    """Returns block number -> parameters, and the encoder's other parameters."""
    blocks, others = {}, {}
    for name, value in params.get(ENCODER, {}).items():
        match = _BLOCK.fullmatch(name)
        if match:
            blocks[int(match[1])] = value
        else:
            others[name] = value
    return blocks, others


def _stack(leaves):
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    # Arrays read from a file stay on the host.
    return np.stack(leaves) if isinstance(first, np.ndarray) else jnp.stack(leaves)


def _layer(leaf, i):
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[i]


_policies = jax.checkpoint_policies


def _save_attention(primitive, *args, **params) -> bool:
    named = _policies.save_only_these_names("attention")(primitive, *args, **params)
    # cuDNN's results, of jax.nn.dot_product_attention, have no name.
    return named or primitive.name.startswith("dot_product_attention_fwd")


# Name -> what is saved besides the block's input; the rest is recomputed.
REMAT_POLICIES = {
    "none": None,  # Everything that the derivatives need.
    "full": _policies.nothing_saveable,
    # Results of the six projections and dense layers.
    "dots": _policies.dots_with_no_batch_dims_saveable,
    # Results of attention, so that its kernel runs only once.
    "attention": _save_attention,
}


def wrap_remat(function: Callable, name: str, *, in_scan: bool) -> Callable:
    """Applies a rematerialisation policy to a function.

    Args:
      function: of a module and arrays, for flax.linen.remat.
      name: one of REMAT_POLICIES.
      in_scan: whether it is the body of a scan, where XLA cannot merge recomputed with
        earlier results.

    Returns:
      A function with the same results and gradients.
    """
    if name == "none":
        return function
    return nn.remat(function, policy=REMAT_POLICIES[name], prevent_cse=not in_scan)


def scan(
    run: Callable,
    block: nn.Module,
    x: jax.Array,
    layers: Sequence[object],
    config: object,
) -> jax.Array:
    """Runs equal blocks as a scan over stacked parameters; call it in a compact method.

    Args:
      run: of a block, tokens and further inputs; returns tokens, and None.
      block: named STACKED.
      x: tokens.
      layers: further inputs of each block: equal trees of arrays, numbers and None.
      config: of the encoder: its depth, dtype and `remat_policy`.
    """
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
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return run(block, x, stacked)[0]


class _Rounded(NamedTuple):
    """A parameter of a product under a scan.

    Attributes:
      exact: its value, which takes no gradient.
      rounded: takes the gradient; the value is not read.
    """

    exact: Float[Array, "*S"]
    rounded: Float[Array, "*S"]


@jax.custom_vjp
def _with_gradient_of(value, other):
    """Returns `value`, whose gradient goes to `other` instead."""
    return value


_with_gradient_of.defvjp(
    lambda value, other: (value, None), lambda _, grad: (jnp.zeros_like(grad), grad)
)


def _split_rounded(params: Mapping, config: object) -> Mapping:
    """Separates the parameters of products into values and what takes gradients.

    Products round their parameters to the dtype of the computation anyway. Rounded
    before the scan, parameters get gradients that it stacks in that dtype and not in
    float32. What products read is rounded in the scan, so that no rounded copy of all
    blocks is in memory; without rematerialisation the scan would keep one in any case.
    """

    def split_one(path, leaf):
        if any("LayerNorm" in key.key for key in path):
            return leaf
        rounded = leaf.astype(config.dtype)
        if config.remat_policy == "none":
            return rounded
        return _Rounded(jax.lax.stop_gradient(leaf), rounded)

    return jax.tree.map_with_path(split_one, params)


def _round(params: Mapping, dtype: str) -> Mapping:
    """Returns the parameters of one block, those of products rounded."""

    def round_one(leaf):
        if not isinstance(leaf, _Rounded):
            return leaf
        # XLA moves a mere conversion out of the loop, to all blocks at once.
        kind = jnp.finfo(dtype)
        value = jax.lax.reduce_precision(leaf.exact, kind.nexp, kind.nmant)
        return _with_gradient_of(value.astype(dtype), leaf.rounded)

    return jax.tree.map(
        round_one, params, is_leaf=lambda leaf: isinstance(leaf, _Rounded)
    )

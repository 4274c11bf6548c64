"""How encoder blocks are repeated: parameters one by one or stacked, rematerialisation.

One by one, block 3 is "Transformer/encoderblock_3/...", as in all checkpoints. Stacked,
all blocks are "Transformer/encoderblock/..." with a leading axis of length depth, over
which a scan runs.
"""

import re
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

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

"""Repetition of encoder blocks: stacked parameters, scan, rematerialisation.

In checkpoints, block 3 is "Transformer/encoderblock_3/...". Stacked, all blocks are
"Transformer/encoderblock/..." with a leading axis of length depth, for a scan.
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
      The parameters with the blocks under "Transformer/encoderblock"; stacked
      jax.ShapeDtypeStruct have no sharding.
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
      tree: larger tree, such as a training state.
      function: `stack` or `unstack`.
      like: the same tree with the network in the layout of its computation. Subtrees of
        the structure of `params` (moments, averages) are converted; others, such as a
        teacher's parameters, are not.
      params: parameters of the network, in the layout of `like`.
    """
    structure = jax.tree.structure(params)

    def is_network(node):
        return isinstance(node, Mapping) and jax.tree.structure(node) == structure

    return jax.tree.map(
        lambda node, subtree: function(subtree) if is_network(node) else subtree,
        like,
        tree,
        is_leaf=is_network,
    )


def separate(tree: object) -> object:
    """Returns a tree with the blocks of every encoder in it one by one."""
    return jax.tree.map(
        lambda node: unstack(node) if _has_stacked(node) else node,
        tree,
        is_leaf=_has_stacked,
    )


def join(tree: object, like: object) -> object:
    """Returns a tree with blocks stacked where they are in `like`: undoes `separate`."""
    return jax.tree.map(
        lambda node, subtree: stack(subtree) if _has_stacked(node) else subtree,
        like,
        tree,
        is_leaf=_has_stacked,
    )


def difference(given: object, wanted: object) -> str:
    """Returns how given parameters differ from those of a run; "" if they have its shapes.

    Args:
      given, wanted: arrays or jax.ShapeDtypeStruct, or nested dicts of them, with blocks
        stacked or one by one.

    Returns:
      A clause on the first difference, as "kernel is (2, 3), not (2, 4)".
    """
    given, wanted = (
        {
            jax.tree_util.keystr(keys, simple=True, separator="/"): leaf.shape
            for keys, leaf in jax.tree.leaves_with_path(separate(tree))
        }
        for tree in (given, wanted)
    )
    for name in sorted(given.keys() | wanted.keys()):
        if name not in given:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} has no place"
        if given[name] != wanted[name]:
            return f"{name or 'it'} is {given[name]}, not {wanted[name]}"
    return ""


def _has_stacked(node: object) -> bool:
    return isinstance(node, Mapping) and STACKED in node.get(ENCODER, {})


def is_stacked(path: str) -> bool:
    """Returns whether a parameter has the leading axis of stacked blocks."""
    return f"{ENCODER}/{STACKED}/" in path


def map_paths(params: Mapping, function: Callable[[str], object]) -> dict:
    """Maps parameter paths to values.

    Args:
      params: nested dict of arrays or jax.ShapeDtypeStruct, in either layout.
      function: function of a path as in checkpoints,
        "Transformer/encoderblock_0/.../kernel".

    Returns:
      Nested dict of values; if they differ between stacked blocks, an array that
      broadcasts against the parameter.
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
    # Results of cuDNN in jax.nn.dot_product_attention have no name.
    return named or primitive.name.startswith("dot_product_attention_fwd")


# Name -> policy of the values that are saved beside a block's input; others are recomputed.
REMAT_POLICIES = {
    "none": None,  # Saves all that the derivatives need.
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
      in_scan: whether `function` is the body of a scan, where XLA cannot merge recomputed
        with earlier results.
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
      run: function of a block, its tokens and its other inputs to (tokens, None).
      block: block whose name is STACKED.
      x: tokens.
      layers: other inputs of each block, trees of equal structure.
      config: config of the encoder, with `depth`, `dtype` and `remat_policy`.
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
      exact: float32 value, which gets no gradient.
      rounded: value in the dtype of the computation, used for its gradient alone.
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
    """Separates the values of parameters of products from those that get gradients.

    Products round their parameters to the dtype of the computation anyway. Gradients go
    to parameters that are rounded before the scan, so it stacks gradients in that dtype,
    not in float32. Values are rounded in the scan, so memory holds no rounded copy of
    all blocks; without rematerialisation the scan would keep one in any case.
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
    """Returns the parameters of one block, with those of products rounded."""

    def round_leaf(leaf):
        if not isinstance(leaf, _Rounded):
            return leaf
        # XLA would move a plain conversion out of the loop and round all blocks at once.
        kind = jnp.finfo(dtype)
        value = jax.lax.reduce_precision(leaf.exact, kind.nexp, kind.nmant)
        return _with_gradient_of(value.astype(dtype), leaf.rounded)

    return jax.tree.map(
        round_leaf, params, is_leaf=lambda leaf: isinstance(leaf, _Rounded)
    )

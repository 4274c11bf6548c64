"""Two layouts of the encoder blocks' parameters: one by one, and stacked for a scan.

One by one, block 3 is "Transformer/encoderblock_3/...": so are checkpoints, published
and our own. Stacked, all blocks are "Transformer/encoderblock/..." with a leading axis
of as many as there are blocks, which a scan over layers runs along.
"""

import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

ENCODER, STACKED = "Transformer", "encoderblock"
_BLOCK = re.compile(rf"{STACKED}_(\d+)")


def stack(params: Mapping) -> dict:
    """Puts the parameters of all encoder blocks into arrays with a leading axis.

    Args:
      params: nested dict of arrays or of jax.ShapeDtypeStruct, blocks one by one.
        Without such blocks (a ResNet, or stacked already) it is returned as it is.

    Returns:
      The same with the blocks under "Transformer/encoderblock"; of arrays, shapes are
      made of shapes without shardings.
    """
    blocks, others = _split(params)
    if not blocks:
        return dict(params)
    trees = [blocks[i] for i in range(len(blocks))]
    stacked = jax.tree.map(lambda *leaves: _stack(leaves), *trees)
    return {**params, ENCODER: {**others, STACKED: stacked}}


def unstack(params: Mapping) -> dict:
    """Undoes `stack`.

    Args:
      params: nested dict of arrays or of jax.ShapeDtypeStruct. Without stacked blocks
        it is returned as it is.

    Returns:
      The same with the blocks one by one.
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


def convert(tree: object, function: Callable[[Mapping], dict]) -> object:
    """Applies `stack` or `unstack` to every parameter tree within a larger tree.

    Args:
      tree: such as a training state or an optimiser's: what is shaped like the
        parameters in it (moments, an average) is found by its "Transformer" key.
      function: `stack` or `unstack`.

    Returns:
      The tree with those parts converted.
    """

    def is_params(node):
        return isinstance(node, Mapping) and ENCODER in node

    return jax.tree.map(
        lambda node: function(node) if is_params(node) else node,
        tree,
        is_leaf=is_params,
    )


def is_stacked(path: str) -> bool:
    """Tells whether a parameter of this path has the leading axis of the blocks."""
    return f"{ENCODER}/{STACKED}/" in path


def map_paths(params: Mapping, function: Callable[[str], object]) -> dict:
    """Gives each parameter a value that follows from its path.

    Args:
      params: nested dict of arrays or of jax.ShapeDtypeStruct, in either layout.
      function: of a path as on disk, "Transformer/encoderblock_0/.../kernel".

    Returns:
      Nested dict of values; of stacked blocks whose values differ, an array of them
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
    """Returns the blocks by number, and the encoder's other parameters."""
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
    # What was read from a file stays on the host.
    return np.stack(leaves) if isinstance(first, np.ndarray) else jnp.stack(leaves)


def _layer(leaf, i):
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[i]

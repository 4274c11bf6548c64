"""Converts parameters of encoder blocks between two layouts: separate and stacked.

In checkpoints blocks are separate: block 3 is "Transformer/encoderblock_3/...". For a
scan (repetition.py) they are stacked: all blocks are "Transformer/encoderblock/..."
with a leading axis of length depth.
"""

import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.encoder import BLOCK, ENCODER

_NUMBERED = re.compile(rf"{BLOCK}_(\d+)")


def stack(params: Mapping) -> dict:
    """Stacks the parameters of all encoder blocks along a leading axis.

    Args:
      params: nested dict of arrays or jax.ShapeDtypeStruct with separate blocks.
        Without separate blocks (a ResNet, or blocks that are stacked already) it is
        returned unchanged.

    Returns:
      The parameters with the blocks under "Transformer/encoderblock"; stacked
      jax.ShapeDtypeStruct do not have a sharding.
    """
    blocks, others = _split(params)
    if not blocks:
        return dict(params)
    trees = [blocks[i] for i in range(len(blocks))]
    stacked = jax.tree.map(lambda *leaves: _stack(leaves), *trees)
    return {**params, ENCODER: {**others, BLOCK: stacked}}


def unstack(params: Mapping) -> dict:
    """Returns parameters with separate blocks: the inverse of `stack`.

    Args:
      params: nested dict of arrays or jax.ShapeDtypeStruct; it is returned unchanged if
        it does not have stacked blocks.
    """
    encoder = params.get(ENCODER, {})
    if BLOCK not in encoder:
        return dict(params)
    stacked = encoder[BLOCK]
    depth = jax.tree.leaves(stacked)[0].shape[0]
    blocks = {
        f"{BLOCK}_{i}": jax.tree.map(lambda leaf, i=i: _layer(leaf, i), stacked)
        for i in range(depth)
    }
    others = {name: value for name, value in encoder.items() if name != BLOCK}
    return {**params, ENCODER: {**others, **blocks}}


def convert(
    tree: object, function: Callable[[Mapping], dict], like: object, params: Mapping
) -> object:
    """Applies a function to every parameter tree of a network within a larger tree.

    Args:
      tree: larger tree, such as a training state.
      function: `stack` or `unstack`.
      like: the same tree with the network in the layout on devices. Subtrees with the
        structure of `params` (moments, averages) are converted; others, such as a
        teacher's parameters, are not.
      params: parameters of the network in the layout of `like`.
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
    """Returns a tree in which the blocks of every encoder are separate."""
    return jax.tree.map(
        lambda node: unstack(node) if _has_stacked(node) else node,
        tree,
        is_leaf=_has_stacked,
    )


def join(tree: object, like: object) -> object:
    """Stacks the blocks that are stacked in `like`: the inverse of `separate`."""
    return jax.tree.map(
        lambda node, subtree: stack(subtree) if _has_stacked(node) else subtree,
        like,
        tree,
        is_leaf=_has_stacked,
    )


def difference(given: object, wanted: object) -> str:
    """Returns the first difference between shapes of parameters; "" if they are equal.

    Args:
      given: arrays or jax.ShapeDtypeStruct, or nested dicts of them, with stacked or
        separate blocks.
      wanted: the shapes that are needed, in the same form.

    Returns:
      A clause about the difference, such as "kernel is (2, 3), not (2, 4)".
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
    return isinstance(node, Mapping) and BLOCK in node.get(ENCODER, {})


def is_stacked(path: str) -> bool:
    """Returns whether a parameter has the leading axis of stacked blocks."""
    return f"{ENCODER}/{BLOCK}/" in path


def split_path(path: str) -> tuple[str, int | None]:
    """Returns the path of a parameter in stacked blocks, and the number of its block.

    The number is None for parameters outside the blocks.
    """
    match = re.match(rf"{ENCODER}/{_NUMBERED.pattern}/", path)
    if not match:
        return path, None
    return f"{ENCODER}/{BLOCK}/{path[match.end() :]}", int(match[1])


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
        path = path.replace(f"/{BLOCK}/", f"/{BLOCK}_{{}}/")
        values = [function(path.format(i)) for i in range(leaf.shape[0])]
        if len(set(values)) == 1:
            return values[0]
        return np.reshape(values, (-1,) + (1,) * (leaf.ndim - 1))

    return jax.tree.map_with_path(value, params)


def _split(params: Mapping) -> tuple[dict[int, Mapping], dict]:
    """Returns block number -> parameters, and the encoder's other parameters."""
    blocks, others = {}, {}
    for name, value in params.get(ENCODER, {}).items():
        match = _NUMBERED.fullmatch(name)
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

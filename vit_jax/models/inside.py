"""The inside of a network, a block at a time: where it looks, and what it comes to.

Each block is run by itself, one program for all of them, so that the attention of one is
gone when that of the next is there. It is computed by the einsum, its softmax in float32,
whatever the way in which the network is trained.
Letters: B images, Y by X pixels, C channels, N tokens, H heads, D width, L classes.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.errors import UserError
from vit_jax.models import parts, stacking
from vit_jax.models.vit import VisionTransformer

Images = Float[Array, "B Y X C"]


class Layer(NamedTuple):
    """What a block did.

    Attributes:
      attention: how much each token (third axis) looks at each (fourth), of sum 1.
      tokens: after the block.
    """

    attention: Float[Array, "B H N N"]
    tokens: Float[Array, "B N D"]


class Pull(NamedTuple):
    """How a block's attention led to a logit.

    Attributes:
      attention: as of Layer.
      gradient: of the logit with respect to it.
    """

    attention: Float[Array, "B H N N"]
    gradient: Float[Array, "B H N N"]


def layers(module: nn.Module, params: Mapping, images: Images) -> Iterator[Layer]:
    """Runs a network block by block.

    Args:
      module: of a `Model`.
      params: its parameters, blocks stacked for a scan or one by one.
      images: normalised.

    Returns:
      An iterator that computes a block when it is asked for it, and keeps only the
      tokens; the caller drops a layer before the next if memory is short.

    Raises:
      UserError: the network has no attention.
    """
    _check(module)
    return _layers(module, params, images)


def _layers(module, params, images) -> Iterator[Layer]:
    tokens, given = parts.begin(module, _others(params), images)

    # Not a generator, which would hold what it has handed out.
    def run(i):
        nonlocal tokens
        attention, tokens = parts.run(module, _block(params, i), tokens, given[i])
        return Layer(attention, tokens.astype(jnp.float32))

    return map(run, range(len(given)))


def finish(
    module: nn.Module, params: Mapping, tokens: Float[Array, "B N D"]
) -> dict[str, Float[Array, "..."]]:
    """Goes on from the tokens after the last block to the outputs of `Model.apply`.

    Args:
      module, params: as of `layers`.
      tokens: of the last Layer.

    Raises:
      UserError: the network has no attention.
    """
    _check(module)
    return parts.finish(module, _others(params), tokens.astype(module.dtype))


def gradients(
    module: nn.Module, params: Mapping, images: Images, classes: Int[Array, " B"]
) -> tuple[Float[Array, "B N"], Iterator[Pull]]:
    """Follows one logit of each image back through the blocks.

    Args:
      module, params, images: as of `layers`.
      classes: whose logits, from 0.

    Returns:
      How much the classifier looks at each token after the last block: the class token
      alone, both of DeiT, or all patches alike, of sum 1; with attention pooling the
      positive part of attention times gradient, the mean of the heads. And an iterator
      over the blocks, the last first, that keeps tokens of all and attention of one.

    Raises:
      UserError: no attention, no classifier of whole images, or no such class.
    """
    _check(module)
    if not module.classes or module.head == "none":
        raise UserError(
            f"there is no logit to explain with classes={module.classes} and "
            f"head={module.head}: give a model that classifies images"
        )
    classes = np.asarray(classes)
    wrong = classes[(classes < 0) | (classes >= module.classes)]
    if wrong.size:
        raise UserError(
            f"class {wrong[0]} is not one of the {module.classes} of the model: name "
            f"one from 0 to {module.classes - 1}"
        )
    others = _others(params)
    tokens, given = parts.begin(module, others, images)
    entering = []
    for i, extras in enumerate(given):
        entering.append(tokens)
        tokens = parts.run(module, _block(params, i), tokens, extras)[1]
    looked_at, slope = parts.look_back(module, others, tokens, classes)
    return looked_at, _pulls(module, params, entering, given, slope)


def _pulls(module, params, entering, given, slope) -> Iterator[Pull]:
    def pull(i):
        nonlocal slope
        block = _block(params, i)
        *pulled, slope = parts.pull(module, block, entering.pop(), given[i], slope)
        return Pull(*pulled)

    return map(pull, reversed(range(len(given))))


def _check(module: nn.Module) -> None:
    if not isinstance(module, VisionTransformer):
        raise UserError(
            "a ResNet has no attention to look at: give a Vision Transformer or a hybrid"
        )


def _others(params: Mapping) -> dict:
    """Returns all parameters but those of the blocks."""
    encoder = {
        name: value
        for name, value in params[stacking.ENCODER].items()
        if not name.startswith(stacking.STACKED)
    }
    return {**params, stacking.ENCODER: encoder}


def _block(params: Mapping, i: int) -> dict:
    encoder = params[stacking.ENCODER]
    if stacking.STACKED in encoder:
        return jax.tree.map(lambda leaf: leaf[i], encoder[stacking.STACKED])
    return encoder[f"{stacking.STACKED}_{i}"]

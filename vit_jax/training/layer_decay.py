"""Layer-wise rates for fine-tuning: the nearer to the input, the slower it moves.

The rate of a layer is `decay` times that of the layer above it, as in BEiT
(arXiv:2106.08254) and MAE (arXiv:2111.06377, table 9). From below: what
makes tokens of an image, a whole ResNet included, and its position embeddings; each
block; all that comes after the blocks, at the full rate.
"""

import re

import jax
import optax

from vit_jax.errors import UserError
from vit_jax.models import stacking

_INPUT = re.compile(
    r"(cls|dist)$|(embedding|conv_root|gn_root|block\d+)/"
    r"|Transformer/(posembed_input|posembed_0)/"
)
# What is added before or within a block belongs to it.
_BLOCK = re.compile(r"Transformer/(?:encoderblock|posembed|relative_embedding)_(\d+)")
_OUTPUT = re.compile(
    # One table for the attention of all blocks; BEiT has it at the full rate too.
    r"Transformer/(encoder_norm/|relative_embedding$)"
    r"|(MAPHead_0|fc_norm|pre_logits|head|head_dist)/"
)


def scale(params: dict, decay: float) -> optax.GradientTransformation:
    """Multiplies the updates of each parameter by the factor of its layer.

    Args:
      params: model parameters, as arrays or shapes, in either layout of the blocks.
      decay: factor from a layer to the one below it.

    Returns:
      Transformation without a state.

    Raises:
      UserError: the model has no encoder blocks.
    """
    by_parameter = factors(params, decay)

    def update(updates, params=None):
        del params
        return jax.tree.map(lambda u, f: u * f, updates, by_parameter)

    return optax.stateless(update)


def factors(params: dict, decay: float) -> dict:
    """Returns the factor of each parameter's rate.

    Args and Raises: as `scale`.

    Returns:
      Nested dict of floats; of stacked blocks, arrays that broadcast against them.
    """
    depth = 0

    def look(path):
        nonlocal depth
        if match := _BLOCK.match(path):
            depth = max(depth, int(match[1]) + 1)

    stacking.map_paths(params, look)
    if not depth:
        raise UserError(
            f"optim.layer_decay={decay} needs the blocks of a Transformer, which this "
            "model has not: set it to 0, or choose another model.variant"
        )
    return stacking.map_paths(
        params, lambda path: decay ** (depth + 1 - _layer(path, depth))
    )


def _layer(path: str, depth: int) -> int:
    """Returns 0 for the input, 1 to `depth` for the blocks, one more for the output."""
    if _INPUT.match(path):
        return 0
    if match := _BLOCK.match(path):
        return int(match[1]) + 1
    if _OUTPUT.match(path):
        return depth + 1
    raise ValueError(f"{path} is of no layer: tell layer_decay.py where it belongs")

"""Networks as modules of Flax NNX, for loops of users."""

import dataclasses
import os

from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.api.flax_networks import load_flax
from vit_jax.config import arguments
from vit_jax.config.fields import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments:
    rngs: nnx.Rngs = key(nnx.Rngs(0), "Random keys of dropout.")


@arguments.checked(_Arguments)
def load_nnx(
    source: str | os.PathLike, *, rngs: nnx.Rngs | None = None, **options
) -> nnx.Module:
    """Opens weights of any format as an NNX module.

    The module wraps the Flax module of `load_flax` by `nnx.bridge.ToNNX`: each
    parameter is an `nnx.Param` under its name there, and running means of BatchNorm are
    `nnx.BatchStat`.

    Args:
      source, **options: arguments of `load_flax`.
      rngs: random keys of dropout and stochastic depth, `nnx.Rngs(dropout=0)`; needed
        for `train=True`.

    Returns:
      An `nnx.Module`. `module(images, train=True)` returns "logits" (B, num_classes)
      and "pre_logits" (B, width) for normalised images (B, height, width, channels).
      `nnx.to_pure_dict(nnx.state(module, nnx.Param))` is the dict of `load_flax`.

    Raises:
      UserError: the weights cannot be opened, or an argument does not fit them.

    Example:
      >>> import jax, vit_jax
      >>> module = vit_jax.load_nnx(
      ...     "runs/digits", num_classes=5, tell=lambda line: None
      ... )
      >>> module(jax.numpy.zeros((2, 8, 8, 1)))["logits"].shape
      (2, 5)
    """
    module, params = load_flax(source, **options)
    collections = {nnx.BatchStat: params.pop("batch_stats", {}), nnx.Param: params}
    variables = {}
    for kind, tree in collections.items():
        variables |= {name: kind(value) for name, value in flatten_dict(tree).items()}
    network = nnx.bridge.ToNNX(module, rngs)
    for name, value in unflatten_dict(variables).items():
        setattr(network, name, nnx.data(value))
    return network

"""Keeps the features of each layer while a network runs, for layer_features.py."""

from collections.abc import Callable, Sequence

import flax.linen as nn
from jaxtyping import Array, Float

COLLECTION = "layers"  # Variable collection of the features.
KEPT = "features"


def keep(
    module: nn.Module,
    features: Sequence[Float[Array, "B ..."]],
    norm: Callable[[Array], Array],
    *,
    norm_all: bool = True,
) -> None:
    """Keeps features for `Model.layer_features`, if they are needed.

    A network calls this function in its compact method, with the features of its
    `config.num_layers` layers.

    Args:
      module: the calling module.
      features: output of each layer, (B, P + N, D), or (B, y, x, D) without prefix
        tokens.
      norm: the final norm.
      norm_all: whether the norm can be applied to every layer, or only to the last.
    """
    if not module.is_mutable_collection(COLLECTION) or module.is_initializing():
        return
    first = 0 if norm_all else len(features) - 1
    normed = [*features[:first], *map(norm, features[first:])]
    module.sow(COLLECTION, KEPT, {True: normed, False: list(features)})

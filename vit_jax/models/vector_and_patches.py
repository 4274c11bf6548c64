"""The feature vector of each image and its patches, from one pass of a network.

Letters: B images, Y by X pixels, C channels, y by x patches, N tokens, D and F width.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config import fields
from vit_jax.models import layer_features
from vit_jax.models.model import Model
from vit_jax.models.pooling import Weights
from vit_jax.models.vit import VisionTransformer, joined

_TOKENS = "tokens"


class Features(NamedTuple):
    """Features of a batch, float32.

    Attributes:
      vector: "pre_logits" of `Model.apply`.
      patches: features of the last layer, as `Model.patch_features` returns them.
    """

    vector: Float[Array, "B F"]
    patches: Float[Array, "B y x D"]


class _WithTokens(VisionTransformer):
    """A Vision Transformer whose outputs include the tokens of its encoder."""

    def classify(
        self, x: Float[Array, "B N D"], weights: Weights | None = None
    ) -> dict[str, Float[Array, "..."]]:
        return {**super().classify(x, weights), _TOKENS: x}


def compute(
    model: Model,
    params: Mapping,
    images: Float[Array, "B Y X C"],
    *,
    key: jax.Array | None = None,
) -> Features:
    """Computes the feature vectors and the patches of images.

    Args:
      model: network with "pre_logits" and patches, see `Model.has_patch_features`, and
        without running means.
      params, images: see `Model.apply`.
      key: random key of dropout and stochastic depth; None turns both off.

    Raises:
      UserError: the network does not return patches.
    """
    layer_features.check(model, -1)
    if isinstance(model.module, VisionTransformer):
        with model.config.matmul_precision():
            outputs = joined(_WithTokens, model.module).apply(
                model.variables(params),
                images,
                train=key is not None,
                rngs=None if key is None else {"dropout": key},
            )
        tokens = outputs[_TOKENS].astype(jnp.float32)
        patches = layer_features.select_tokens(model, tokens, "patches", True)
        return Features(outputs["pre_logits"], patches)
    (patches,) = model.layer_features(params, images, key=key)
    if not fields.is_custom(model.config.variant):
        return Features(patches.mean((1, 2)), patches)
    # Only a user's network may pool in another way, which takes a second pass.
    outputs = model.apply(params, images, train=key is not None, key=key)
    return Features(outputs["pre_logits"], patches)

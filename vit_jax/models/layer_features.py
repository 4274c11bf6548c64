"""Features after each layer of a network, like timm's `forward_intermediates`.

A layer is a block of a Vision Transformer, a hybrid or a Mixer, a pair of blocks of an
Axial-ViT, or a stage of a Swin Transformer before its patches are merged. Layer 0 of a
ResNet is its first convolution, before the pooling; layer i is its stage i. The
argument `model` of the functions here is a `Model`.

Letters: B images, y by x patches, P prefix tokens, N patches or all tokens, D width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.models.kept import COLLECTION, KEPT
from vit_jax.models.patches import PatchSequences

TOKENS = ("pooled", "patches", "prefix", "all")

Features = Float[Array, "B ..."]


def compute(
    model: Any,
    params: Mapping,
    images: Float[Array, "B Y X C"] | PatchSequences,
    layers: Sequence[int],
    *,
    norm: bool,
    tokens: str,
    reshape: bool,
    key: Key[Array, ""] | None,
) -> tuple[Features, ...]:
    """Computes features, see `Model.layer_features`."""
    chosen = [check(model, layer) for layer in layers]
    if tokens == "prefix" and not model.num_prefix_tokens:
        raise UserError(
            f"tokens='prefix': model.variant={model.options['variant']!r} does not have "
            "tokens before the patches: choose 'patches' or 'pooled'"
        )
    last = max(1, model.config.num_layers) - 1
    if not model.config.num_layers or (norm and {*chosen} == {last}):
        # The last features are the output of the encoder, so a scan can be kept.
        train = key is not None
        outputs = {last: model.encode(params, images, train=train, key=key)}
    else:
        outputs = _run(model, params, images, key)[norm]

    places = {}
    if isinstance(images, PatchSequences):
        if reshape and tokens == "patches":
            raise UserError(
                "reshape=True: images of any size have different grids of patches: set "
                "reshape=False, and remove the padding"
            )
        places["places"] = images.places()

    def arrange(x):
        x = x.astype(jnp.float32)
        if tokens == "pooled":
            return model.config.pool_layer(params, x, norm=norm, **places)
        return select_tokens(model, x, tokens, reshape)

    return tuple(arrange(outputs[layer]) for layer in chosen)


def check(model: Any, layer: int) -> int:
    """Returns the number of a layer, counted from 0.

    Raises:
      UserError: the network does not have this layer.
    """
    if not model.has_patch_features:
        raise UserError(
            f"model.variant={model.options['variant']!r} does not return features of "
            "patches: add the argument `classify` to its module (docs/own_network.md)"
        )
    model.config.check_grid()
    count = max(1, model.config.num_layers)
    if not -count <= layer < count:
        raise UserError(
            f"layers={layer}: {model.options['variant']} has {count} "
            f"layer{'s' * (count > 1)}: choose from 0 to {count - 1}, or from -{count} "
            "to -1 counted from the last"
        )
    return layer % count


def check_all(model: Any, layers: Sequence[int]) -> list[int]:
    """Returns the numbers of layers, counted from 0.

    Raises:
      UserError: the network does not have a layer, or two numbers mean the same layer.
    """
    chosen = [check(model, layer) for layer in layers]
    for i, number in enumerate(chosen):
        if number in chosen[:i]:
            same = layers[chosen.index(number)], layers[i]
            raise UserError(
                f"layers={tuple(layers)}: {same[0]} and {same[1]} are the same layer of "
                f"{model.options['variant']}, which has {model.num_layers} layers: keep one"
            )
    return chosen


def _run(model, params, images, key) -> dict[bool, list[Features]]:
    """Returns the features of all layers, with and without the norm."""
    if model.config.stacked:
        # With separate blocks XLA removes those that the chosen layers do not need.
        model, params = model.replace(scan=False), stacking.unstack(params)
    _, kept = model.config.reader(model.module, images).apply(
        model.variables(params),
        images,
        train=key is not None,
        classify=False,
        rngs=None if key is None else {"dropout": key},
        mutable=[COLLECTION],
    )
    kept = kept[COLLECTION]
    while KEPT not in kept:  # A submodule may have kept the features.
        (kept,) = kept.values()
    return kept[KEPT][0]


def select_tokens(
    model: Any, x: Float[Array, "B ..."], tokens: str, reshape: bool
) -> Features:
    """Returns some tokens of a layer's features.

    Args:
      model: network of the features.
      x: features of a layer: (B, P + N, D), or (B, y, x, D) without prefix tokens.
      tokens, reshape: see `Model.layer_features`, without "pooled".
    """
    P = model.num_prefix_tokens if model.config.has_encoder else 0
    if tokens == "prefix":
        return x[:, :P]
    if tokens == "patches" and reshape:
        return (
            x if x.ndim == 4 else x[:, P:].reshape(x.shape[0], *_grid(model, x, P), -1)
        )
    x = x.reshape(len(x), -1, x.shape[-1])
    return x if tokens == "all" else x[:, P:]


def _grid(model, x, P: int) -> tuple[int, int]:
    """Returns the numbers of rows and columns of patches."""
    rows, columns = model.grid
    if x.shape[1] - P == rows * columns:
        return rows, columns
    rows = -(-model.image_shape[0] // (model.config.encoder_stride or 1))
    return rows, (x.shape[1] - P) // rows

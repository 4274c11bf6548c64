"""Training losses.

Letters: B images, L classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.config.fields import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Loss of classification."""

    name: str = key(
        "softmax",
        '"softmax" or "sigmoid" cross-entropy.',
        choices=("softmax", "sigmoid"),
    )
    label_smoothing: float = key(
        0.0, "Part of a label's weight that all classes share.", below=1
    )


def softmax(
    logits: Float[Array, "B L"], labels: Float[Array, "B L"]
) -> Float[Array, " B"]:
    """Cross-entropy of one distribution over the classes."""
    return optax.losses.softmax_cross_entropy(logits, labels)


def sigmoid(
    logits: Float[Array, "B L"], labels: Float[Array, "B L"]
) -> Float[Array, " B"]:
    """Sum over the classes of the binary cross-entropies (BiT, arXiv:1912.11370)."""
    return jnp.sum(optax.losses.sigmoid_binary_cross_entropy(logits, labels), axis=-1)


LOSSES = {"softmax": softmax, "sigmoid": sigmoid}


def smooth(labels: Float[Array, "B L"], smoothing: float) -> Float[Array, "B L"]:
    """Moves `smoothing` of each label's weight to all classes evenly."""
    return optax.losses.smooth_labels(labels, smoothing) if smoothing else labels


def one_hot(labels: jax.Array, classes: int) -> Float[Array, "B L"]:
    """Turns class numbers into rows with a single 1."""
    return jax.nn.one_hot(labels, classes, dtype=jnp.float32)

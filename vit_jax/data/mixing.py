"""Mixup and cutmix: each example with its neighbour, one draw a batch.

The draw is a function of the key and of the batch's first position in the run, so of
the step. The neighbour is the one before in the global batch, whatever the hosts.
Letters: B examples, H and W height and width, C channels, K classes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Num

Images = Num[Array, "B H W C"]
Labels = Float[Array, "B K"]
Given = Any  # What a user wrote in a config; `__post_init__` checks it.


@dataclasses.dataclass(frozen=True)
class Mixup:
    """Blends each example with its neighbour in the batch (arXiv:1710.09412).

    Args:
      alpha: of the Beta(alpha, alpha) that one share a batch is drawn from.
    """

    alpha: Given

    def __post_init__(self):
        _check_alpha(alpha=self.alpha)

    def __call__(self, images: Images, labels: Labels, index, key):
        share = _beta(jax.random.fold_in(key, index[0]), self.alpha)
        return _blend(images.astype(jnp.float32), share), _blend(labels, share)


@dataclasses.dataclass(frozen=True)
class Cutmix:
    """Puts a part of its neighbour over each example (arXiv:1905.04899).

    The labels are weighted by the shares of pixels, counted after the part is cut off
    at the edges of the image.

    Args:
      alpha: of the Beta(alpha, alpha) that the share of pixels an example keeps is
        drawn from, before that cut.
    """

    alpha: Given = 1.0

    def __post_init__(self):
        _check_alpha(alpha=self.alpha)

    def __call__(self, images: Images, labels: Labels, index, key):
        kept, share = _cut(jax.random.fold_in(key, index[0]), self.alpha, images)
        neighbour = jnp.roll(images, 1, axis=0)
        return jnp.where(kept, images, neighbour), _blend(labels, share)


@dataclasses.dataclass(frozen=True)
class MixupOrCutmix:
    """Either of them, drawn for each batch, as DeiT does (arXiv:2012.12877, table 9).

    Args:
      mixup: alpha of `Mixup`.
      cutmix: alpha of `Cutmix`.
      switch: probability of cutmix.
    """

    mixup: Given = 0.8
    cutmix: Given = 1.0
    switch: Given = 0.5

    def __post_init__(self):
        _check_alpha(mixup=self.mixup, cutmix=self.cutmix)
        if not 0 <= self.switch <= 1:
            raise ValueError(f"switch={self.switch} is not a probability")

    def __call__(self, images: Images, labels: Labels, index, key):
        key, switch, mixup = jax.random.split(jax.random.fold_in(key, index[0]), 3)
        cuts = jax.random.uniform(switch) < self.switch
        share = _beta(mixup, self.mixup)
        kept, kept_share = _cut(key, self.cutmix, images)
        weight = jnp.where(cuts, kept.astype(jnp.float32), share)
        images = _blend(images.astype(jnp.float32), weight)
        return images, _blend(labels, jnp.where(cuts, kept_share, share))


# What blends examples, so that a second one would blend blends.
MIXING = (Mixup, Cutmix, MixupOrCutmix)


def _blend(x: Float[Array, "B ..."], share: Float[Array, "..."]) -> Array:
    return share * x + (1 - share) * jnp.roll(x, 1, axis=0)


def _beta(key: Key[Array, ""], alpha: float) -> Float[Array, ""]:
    return jax.random.beta(key, alpha, alpha, dtype=jnp.float32)


def _cut(
    key: Key[Array, ""], alpha: float, images: Images
) -> tuple[Bool[Array, "1 H W 1"], Float[Array, ""]]:
    """Draws a part; returns which pixels an example keeps, and their share."""
    _, H, W, _ = images.shape
    centre, share = jax.random.split(key)
    side = jnp.sqrt(1 - _beta(share, alpha))  # Of the part, relative to the image.
    inside = []
    u = jax.random.uniform(centre, (2,))
    for length, place in zip((H, W), u, strict=True):
        part = jnp.floor(length * side)
        start = jnp.floor(place * length) - part // 2
        at = jnp.arange(length)
        inside.append((at >= start) & (at < start + part))
    rows, columns = inside
    kept = ~(rows[None, :, None, None] & columns[None, None, :, None])
    return kept, kept.sum().astype(jnp.float32) / (H * W)


def _check_alpha(**alphas: Given) -> None:
    for name, alpha in alphas.items():
        if not alpha > 0:
            raise ValueError(f"{name}={alpha} is not positive")

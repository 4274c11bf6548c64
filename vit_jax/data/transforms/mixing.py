"""Transforms that blend the examples of a batch, inside the training step.

Mixup and cutmix draw once per batch, from the key and the batch's first position in the
run, which depends on the step. The neighbour of an example is the example before it in
the global batch, on any number of hosts; with repeated augmentation (`data.repeats`) it
is the example before the copies of its image. Letters: B examples, H and W height and
width, C channels, K classes.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Num

from vit_jax.config.fields import key as field
from vit_jax.data.transforms.base import DeviceTransform, Given
from vit_jax.data.transforms.device import Images, Labels


@dataclasses.dataclass(frozen=True)
class Mixing(DeviceTransform):
    """Base of the transforms that blend each example with another of its batch.

    Attributes:
      distance: number of positions from an example back to its partner in the batch.
    """

    mixes_examples = True

    distance: int = dataclasses.field(default=1, init=False)

    def apart(self, copies: int) -> "Mixing":
        other = copy.copy(self)
        object.__setattr__(other, "distance", copies)
        return other

    @jax.named_scope("mixup")
    def partner(self, x: Num[Array, "B ..."]) -> Num[Array, "B ..."]:
        """Returns the partner of each example."""
        return jnp.roll(x, self.distance, axis=0)

    def blend(self, x: Float[Array, "B ..."], share: Float[Array, "..."]) -> Array:
        """Returns the sum of `share` of each example and the rest of its partner."""
        return share * x + (1 - share) * self.partner(x)


@dataclasses.dataclass(frozen=True)
class Mixup(Mixing):
    """Blends each example with its neighbour in the batch (arXiv:1710.09412).

    The share of an example is drawn once per batch from Beta(alpha, alpha).
    """

    alpha: Given = field(
        dataclasses.MISSING, "Parameter of Beta(alpha, alpha).", above=0
    )

    def __call__(self, images: Images, labels: Labels, index, key):
        share = _beta(jax.random.fold_in(key, index[0]), self.alpha)
        return self.blend(images.astype(jnp.float32), share), self.blend(labels, share)


@dataclasses.dataclass(frozen=True)
class Cutmix(Mixing):
    """Pastes a part of its neighbour into each example (arXiv:1905.04899).

    The share of pixels that an example keeps is drawn from Beta(alpha, alpha). Labels
    are weighted by the shares of pixels after the part is clipped at the edges of the
    image.
    """

    alpha: Given = field(1.0, "Parameter of Beta(alpha, alpha).", above=0)

    def __call__(self, images: Images, labels: Labels, index, key):
        kept, share = _cut(jax.random.fold_in(key, index[0]), self.alpha, images)
        return jnp.where(kept, images, self.partner(images)), self.blend(labels, share)


@dataclasses.dataclass(frozen=True)
class MixupOrCutmix(Mixing):
    """Applies mixup or cutmix, drawn per batch (DeiT, arXiv:2012.12877, table 9)."""

    mixup: Given = field(0.8, "Parameter alpha of mixup.", above=0)
    cutmix: Given = field(1.0, "Parameter alpha of cutmix.", above=0)
    switch: Given = field(0.5, "Probability of cutmix.", at_most=1)
    group: Given = field(
        0,
        "Number of successive images that share a draw, as the images of one GPU do in "
        "timm; 0 is the whole batch.",
    )

    def __call__(self, images: Images, labels: Labels, index, key):
        key = jax.random.fold_in(key, index[0])
        if not self.group:
            weight, share = self._draw(key, images)
        else:
            group = jnp.arange(len(images)) // self.group
            keys = jax.random.split(key, -(-len(images) // self.group))
            weight, share = jax.vmap(lambda key: self._draw(key, images))(keys)
            share = share[group].reshape(-1, *(1,) * (labels.ndim - 1))
            weight = jnp.squeeze(weight, 1)[group]
        images = self.blend(images.astype(jnp.float32), weight)
        return images, self.blend(labels, share)

    def _draw(self, key: Key[Array, ""], images: Images):
        """Draws the weights of an example's pixels, (1, H, W, 1), and of its label."""
        key, switch, mixup = jax.random.split(key, 3)
        cuts = jax.random.uniform(switch) < self.switch
        share = _beta(mixup, self.mixup)
        kept, kept_share = _cut(key, self.cutmix, images)
        weight = jnp.where(cuts, kept.astype(jnp.float32), share)
        return weight, jnp.where(cuts, kept_share, share)


def _beta(key: Key[Array, ""], alpha: float) -> Float[Array, ""]:
    return jax.random.beta(key, alpha, alpha, dtype=jnp.float32)


def _cut(
    key: Key[Array, ""], alpha: float, images: Images
) -> tuple[Bool[Array, "1 H W 1"], Float[Array, ""]]:
    """Draws a part to paste; returns which pixels an example keeps, and their share."""
    _, H, W, _ = images.shape
    centre, share = jax.random.split(key)
    side = jnp.sqrt(1 - _beta(share, alpha))  # Side of the part, relative to the image.
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

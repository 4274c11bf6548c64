"""Images of any size and shape, as sequences of patches (NaViT, arXiv:2307.06304).

A sequence has room for N patches: those of one image, row by row, or of K images, one after
the other ("packed"), and then padding. A network takes `PatchSequences` wherever it takes
images, and its outputs have a row for each image: the K of the first sequence, then those of
the second.

Letters: B sequences, K images of a sequence, N patches, V of them that are left, S side of a
patch in pixels, C channels, D features.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class PatchSequences(NamedTuple):
    """A batch of sequences of patches.

    Attributes:
      pixels: patches one below the other.
      grids: rows and columns of patches of each image; (0, 0) for an image that is missing.
    """

    pixels: Float[Array, "B NS S C"]
    grids: Int[Array, "B K 2"]

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.pixels.shape[2]

    def astype(self, dtype: str) -> "PatchSequences":
        """Returns the sequences with pixels of another type."""
        return self._replace(pixels=self.pixels.astype(dtype))

    def places(self) -> "Places":
        """Returns where each patch belongs."""
        grids = self.grids.astype(jnp.int32)
        counts = grids.prod(-1)
        ends = jnp.cumsum(counts, axis=1)
        n = jnp.arange(self.pixels.shape[1] // self.patch_size)
        image = (n[None, :, None] >= ends[:, None]).sum(-1)
        K = grids.shape[1]
        image_index = jnp.minimum(image, K - 1)
        start = jnp.take_along_axis(ends - counts, image_index, axis=1)
        # The places of padding do not matter: no result depends on them.
        sides = jnp.maximum(
            1, jnp.take_along_axis(grids, image_index[..., None], axis=1)
        )
        index = jnp.where(image < K, n[None] - start, 0)
        columns = sides[..., 1]
        # Not `//` and `%`, which jax2onnx refuses for any number of sequences.
        row = jax.lax.div(index, columns)
        place = jnp.stack([row, index - row * columns], axis=-1)
        return Places(image, place, sides, K)


def of_batch(
    batch: Mapping[str, Array], pixels: Float[Array, "B Y X C"]
) -> Float[Array, "B Y X C"] | PatchSequences:
    """Returns what a network takes of a batch: sequences if it has "grids", or the pixels."""
    return PatchSequences(pixels, batch["grids"]) if "grids" in batch else pixels


def map_pixels(
    function: Callable[[Array], Array], images: Array | np.ndarray | PatchSequences
):
    """Returns images, or sequences, whose pixels a function changed."""
    if isinstance(images, PatchSequences):
        return images._replace(pixels=function(images.pixels))
    return function(images)


def stack(images: Sequence[np.ndarray | PatchSequences]) -> np.ndarray | PatchSequences:
    """Returns a batch of images in host memory, or of sequences."""
    return jax.tree.map(lambda *rows: np.stack(rows), *images)


def to_images(sequences: PatchSequences) -> list[np.ndarray]:
    """Returns the images of sequences in host memory, (height, width, C) each, in order."""
    images, side = [], sequences.patch_size
    for strip, grids in zip(*map(np.asarray, sequences), strict=True):
        start = 0
        for rows, columns in grids.tolist():
            stop = start + rows * columns * side
            cells = strip[start:stop].reshape(rows, columns, side, side, -1)
            if rows:
                height, width = rows * side, columns * side
                images.append(cells.swapaxes(1, 2).reshape(height, width, -1))
            start = stop
    return images


def pad_batch(images: np.ndarray | PatchSequences, rows: int):
    """Returns a batch in host memory with rows of zeros at its end."""

    def pad(x):
        return np.pad(x, ((0, rows - len(x)), *((0, 0),) * (x.ndim - 1)))

    return jax.tree.map(pad, images)


def rows_of(images: Array | np.ndarray | PatchSequences) -> int:
    """Returns the number of rows of a batch."""
    return len(jax.tree.leaves(images)[0])


class Places(NamedTuple):
    """Where the patches of sequences belong.

    Attributes:
      image: number of the image of each patch in its sequence; K or more is padding.
      place: row and column of each patch in the grid of its image.
      sides: rows and columns of this grid, at least 1.
      num_images: K.
    """

    image: Int[Array, "B N"]
    place: Int[Array, "B N 2"]
    sides: Int[Array, "B N 2"]
    num_images: int

    @property
    def valid(self) -> Bool[Array, "B N"]:
        """Whether a patch is of an image."""
        return self.image < self.num_images

    def means(self, x: Float[Array, "B N D"]) -> Float[Array, "BK D"]:
        """Returns the mean of the patches of each image."""
        owned = self._one_hot(x.dtype)
        sums = jnp.einsum("bnk,bnd->bkd", owned, x, preferred_element_type=jnp.float32)
        counts = jnp.maximum(1.0, owned.astype(jnp.float32).sum(1))[..., None]
        return (sums / counts).astype(x.dtype).reshape(-1, x.shape[-1])

    def logit_bias(self, num_prefix_tokens: int) -> Float[Array, "B 1 K PN"]:
        """Returns the term of attention logits that masks the patches of other images."""
        owned = jnp.swapaxes(self._one_hot(jnp.bool_), 1, 2)
        bias = jnp.where(owned, 0.0, jnp.finfo(jnp.float32).min)[:, None]
        return jnp.pad(bias, ((0, 0),) * 3 + ((num_prefix_tokens, 0),))

    def mask(self, num_prefix_tokens: int) -> dict[str, Array]:
        """Returns the fields of `attention.Positions` that keep images apart.

        They keep padding out, too. Several images in a sequence have no prefix tokens.
        """
        if self.num_images > 1:
            return {"segments": self.image}
        lengths = num_prefix_tokens + self.valid.sum(1)
        return {"lengths": jnp.maximum(1, lengths)}

    def take(self, visible: Int[Array, "B V"], kept: Int[Array, " B"]) -> "Places":
        """Returns the places of some patches; those after the first `kept` are padding."""
        image = jnp.take_along_axis(self.image, visible, axis=1)
        beyond = jnp.arange(visible.shape[1])[None] >= kept[:, None]
        place, sides = (
            jnp.take_along_axis(x, visible[..., None], axis=1)
            for x in (self.place, self.sides)
        )
        image = jnp.where(beyond, self.num_images, image)
        return Places(image, place, sides, self.num_images)

    def _one_hot(self, dtype) -> Array:
        # Not jax.nn.one_hot, which ONNX Runtime does not have for bools.
        is_of_image = self.image[..., None] == jnp.arange(self.num_images)[None, None]
        return is_of_image.astype(dtype)


def draw(
    places: Places, fraction: float, key: Array
) -> tuple[Int[Array, "B V"], Int[Array, " B"]]:
    """Draws the patches that patch dropout keeps.

    Args:
      places: places of all patches.
      fraction: part of the patches of each image that is left out; at least one stays.
      key: random key.

    Returns:
      Indices, in random order, those that are left out last; and how many are kept.
    """
    B, N = places.image.shape
    K = places.num_images
    noise = jax.random.uniform(key, (B, N))
    same = places.image[:, :, None] == places.image[:, None]
    # Rank of a patch among those of its image.
    rank = (same & (noise[:, None] < noise[:, :, None])).sum(-1)
    left = jnp.maximum(1, jnp.round(same.sum(-1) * (1 - fraction)))
    kept = places.valid & (rank < left)
    order = jnp.argsort(jnp.where(kept, noise, 2.0), axis=1)
    # Rounding up may keep one more of each image.
    most = min(N, max(1, round(N * (1 - fraction))) + K - 1)
    return order[:, :most], jnp.maximum(1, kept.sum(1))

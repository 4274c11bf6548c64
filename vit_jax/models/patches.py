"""Images of any size and shape, as sequences of patches (NaViT, arXiv:2307.06304).

A sequence has N places. They contain the patches of one image, row by row, or of K
images one after the other ("packed"), followed by padding. Networks accept
`PatchSequences` in place of images; their outputs then have a row for each image, first
for the K images of the first sequence, then for those of the second, and so on.

Letters: B sequences, K images per sequence, N patches, V patches that are kept, S side
of a patch in pixels, C channels, D features.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num


class PatchSequences(NamedTuple):
    """A batch of sequences of patches.

    Attributes:
      pixels: pixels of the patches, stacked vertically.
      grids: rows and columns of patches of each image; (0, 0) for a missing image.
    """

    pixels: Float[Array, "B NS S C"]
    grids: Int[Array, "B K 2"]

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.pixels.shape[2]

    def astype(self, dtype: str) -> "PatchSequences":
        """Returns the sequences with pixels of another dtype."""
        return self._replace(pixels=self.pixels.astype(dtype))

    def places(self) -> "Places":
        """Returns the image and the place in its grid for each patch."""
        grids = self.grids.astype(jnp.int32)
        counts = grids.prod(-1)
        ends = jnp.cumsum(counts, axis=1)
        n = jnp.arange(self.pixels.shape[1] // self.patch_size)
        image = (n[None, :, None] >= ends[:, None]).sum(-1)
        K = grids.shape[1]
        image_index = jnp.minimum(image, K - 1)
        start = jnp.take_along_axis(ends - counts, image_index, axis=1)
        # Results do not depend on the places of padding.
        sides = jnp.maximum(
            1, jnp.take_along_axis(grids, image_index[..., None], axis=1)
        )
        index = jnp.where(image < K, n[None] - start, 0)
        columns = sides[..., 1]
        # jax2onnx does not support `//` and `%` for a variable number of sequences.
        row = jax.lax.div(index, columns)
        place = jnp.stack([row, index - row * columns], axis=-1)
        return Places(image, place, sides, K)


def of_batch(
    batch: Mapping[str, Array | np.ndarray], pixels: Num[Array | np.ndarray, "*B Y X C"]
) -> Num[Array | np.ndarray, "*B Y X C"] | PatchSequences:
    """Returns the input of a network: sequences if a batch has "grids", else pixels."""
    return PatchSequences(pixels, batch["grids"]) if "grids" in batch else pixels


def map_pixels(
    function: Callable[[Array], Array], images: Array | np.ndarray | PatchSequences
):
    """Applies a function to the pixels of images or sequences."""
    if isinstance(images, PatchSequences):
        return images._replace(pixels=function(images.pixels))
    return function(images)


def stack(images: Sequence[np.ndarray | PatchSequences]) -> np.ndarray | PatchSequences:
    """Stacks images, or sequences, to a batch in host memory."""
    return jax.tree.map(lambda *rows: np.stack(rows), *images)


def to_images(sequences: PatchSequences) -> list[np.ndarray]:
    """Returns the images of sequences in order, NumPy arrays (height, width, C)."""
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
    """Pads a batch in host memory with rows of zeros to a number of rows."""

    def pad(x):
        return np.pad(x, ((0, rows - len(x)), *((0, 0),) * (x.ndim - 1)))

    return jax.tree.map(pad, images)


def rows_of(images: Array | np.ndarray | PatchSequences) -> int:
    """Returns the number of rows of a batch."""
    return len(jax.tree.leaves(images)[0])


class Places(NamedTuple):
    """The places of patches in the images of their sequences.

    Attributes:
      image: index of the image of each patch in its sequence; K or more is padding.
      place: row and column of each patch in the grid of its image.
      sides: rows and columns of the grid of this image, at least 1.
      num_images: number K of images per sequence.
    """

    image: Int[Array, "B N"]
    place: Int[Array, "B N 2"]
    sides: Int[Array, "B N 2"]
    num_images: int

    @property
    def valid(self) -> Bool[Array, "B N"]:
        """Whether a patch belongs to an image and is not padding."""
        return self.image < self.num_images

    def means(self, x: Float[Array, "B N D"]) -> Float[Array, "BK D"]:
        """Returns the mean of the patches of each image."""
        owned = self._one_hot(x.dtype)
        sums = jnp.einsum("bnk,bnd->bkd", owned, x, preferred_element_type=jnp.float32)
        counts = jnp.maximum(1.0, owned.astype(jnp.float32).sum(1))[..., None]
        return (sums / counts).astype(x.dtype).reshape(-1, x.shape[-1])

    def logit_bias(self, num_prefix_tokens: int) -> Float[Array, "B 1 K PN"]:
        """Returns the term for attention logits that masks patches of other images."""
        owned = jnp.swapaxes(self._one_hot(jnp.bool_), 1, 2)
        bias = jnp.where(owned, 0.0, jnp.finfo(jnp.float32).min)[:, None]
        return jnp.pad(bias, ((0, 0),) * 3 + ((num_prefix_tokens, 0),))

    def mask(self, num_prefix_tokens: int) -> dict[str, Array]:
        """Returns the fields of `attention.Positions` that separate images.

        They also mask padding. Sequences of several images do not have prefix tokens.
        """
        if self.num_images > 1:
            return {"segments": self.image}
        lengths = num_prefix_tokens + self.valid.sum(1)
        return {"lengths": jnp.maximum(1, lengths)}

    def take(self, visible: Int[Array, "B V"], kept: Int[Array, " B"]) -> "Places":
        """Returns the places of the patches that `visible` selects.

        Args:
          visible: indices of the patches.
          kept: number of selected patches that are used; later ones become padding.
        """
        image = jnp.take_along_axis(self.image, visible, axis=1)
        beyond = jnp.arange(visible.shape[1])[None] >= kept[:, None]
        place, sides = (
            jnp.take_along_axis(x, visible[..., None], axis=1)
            for x in (self.place, self.sides)
        )
        image = jnp.where(beyond, self.num_images, image)
        return Places(image, place, sides, self.num_images)

    def _one_hot(self, dtype) -> Array:
        # ONNX Runtime does not support jax.nn.one_hot for bools.
        is_of_image = self.image[..., None] == jnp.arange(self.num_images)[None, None]
        return is_of_image.astype(dtype)


def draw(
    places: Places, fraction: float, key: Array
) -> tuple[Int[Array, "B V"], Int[Array, " B"]]:
    """Draws the patches that patch dropout keeps.

    Args:
      places: places of all patches.
      fraction: fraction of the patches of each image to drop; at least one is kept.
      key: random key.

    Returns:
      Indices of patches, in random order, with dropped patches last; and the number of
      patches that are kept in each sequence.
    """
    B, N = places.image.shape
    K = places.num_images
    noise = jax.random.uniform(key, (B, N))
    same = places.image[:, :, None] == places.image[:, None]
    # Rank of a patch among the patches of its image.
    rank = (same & (noise[:, None] < noise[:, :, None])).sum(-1)
    left = jnp.maximum(1, jnp.round(same.sum(-1) * (1 - fraction)))
    kept = places.valid & (rank < left)
    order = jnp.argsort(jnp.where(kept, noise, 2.0), axis=1)
    # Because of rounding, one more patch of each image may be kept.
    most = min(N, max(1, round(N * (1 - fraction))) + K - 1)
    return order[:, :most], jnp.maximum(1, kept.sum(1))

"""Attention as the explorer keeps and sends it: a byte for each pair of tokens.

Of each query, layer and map (the heads, then the rollout) there are the attention to
each extra token and the largest attention to a patch, float32, and the attention to
each patch as a whole number, 255 being that largest one. Extra tokens are apart
because they may draw most of the attention, and would leave the patches few levels.
A file of limited size may have fewer levels, or blocks of patches in place of patches.
Letters: N tokens, E of them extra and P patches or blocks, L layers, M maps a layer.
"""

import dataclasses

import numpy as np
from jaxtyping import Float, Float32, UInt8

LEVELS = 255


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where every token of an image looks.

    Attributes:
      scales: attention to the extra tokens, then the largest to a patch.
      levels: attention to the patches, in `steps` of the largest.
      steps: the level that stands for the largest.
      pool: side of the blocks, in patches, whose mean each level stands for.
    """

    scales: Float32[np.ndarray, "N L M E1"]
    levels: UInt8[np.ndarray, "N L M P"]
    steps: int = LEVELS
    pool: int = 1

    @classmethod
    def empty(cls, tokens: int, extra: int, layers: int, maps: int) -> "Rows":
        """Returns rows to be filled by `put`."""
        return cls(
            np.zeros((tokens, layers, maps, extra + 1), np.float32),
            np.zeros((tokens, layers, maps, tokens - extra), np.uint8),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.scales.nbytes + self.levels.nbytes

    def put(self, layer: int, maps: Float[np.ndarray, "M N N"]) -> None:
        """Fills in a layer.

        Args:
          layer: its number.
          maps: from each query (the second axis) to each token (the last).
        """
        extra = self.scales.shape[-1] - 1
        rows = np.swapaxes(maps, 0, 1)
        patches = rows[..., extra:]
        peak = patches.max(axis=-1, keepdims=True)
        self.scales[:, layer, :, :extra] = rows[..., :extra]
        self.scales[:, layer, :, extra:] = peak
        # The divisor of a row of zeros is any.
        share = patches / np.where(peak > 0, peak, 1)
        self.levels[:, layer] = np.rint(share * self.steps)

    def of(self, query: int) -> bytes:
        """Returns where one query looks: all its scales, then all its levels."""
        scales = self.scales[query].astype("<f4", copy=False)
        return scales.tobytes() + self.levels[query].tobytes()

    def coarser(self, steps: int) -> "Rows":
        """Returns the same in fewer steps, which compress better."""
        table = np.rint(np.arange(self.steps + 1) * (steps / self.steps))
        levels = table.astype(np.uint8)[self.levels]
        return Rows(self.scales, levels, steps, self.pool)

    def pooled(self, grid: tuple[int, int], side: int) -> "Rows":
        """Returns the means of blocks of patches, scales rounded to 16 bits.

        A quarter of the bytes if the side is 2, and half of those of the scales, as
        zeros compress to nothing.

        Args:
          grid: patches down and across; none are pooled yet.
          side: of a block, in patches. The last blocks have what is left.
        """
        N, L, M, _ = self.levels.shape
        starts = [np.arange(0, count, side) for count in grid]
        high, wide = (
            np.minimum(side, n - s) for n, s in zip(grid, starts, strict=True)
        )
        sizes = np.outer(high, wide).ravel().astype(np.float32)
        scales = self.scales.copy()
        levels = np.empty((N, L, M, len(sizes)), np.uint8)
        for layer in range(L):
            values = self.levels[:, layer].astype(np.float32).reshape(N, M, *grid)
            sums = np.add.reduceat(values, starts[0], axis=2)
            sums = np.add.reduceat(sums, starts[1], axis=3)
            means = sums.reshape(N, M, -1) / sizes
            peak = means.max(axis=-1, keepdims=True)
            scales[:, layer, :, -1:] *= peak / self.steps
            levels[:, layer] = np.rint(means / np.where(peak > 0, peak, 1) * LEVELS)
        # To the nearest number whose lower half is zeros.
        bits = (scales.view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)
        return Rows(bits.view(np.float32), levels, LEVELS, side)

    def some(self, maps: int) -> "Rows":
        """Returns rows of some maps of any layers, as if they were of one layer.

        Args:
          maps: how many; all if there are fewer.
        """
        N, L, M, _ = self.levels.shape
        chosen = np.random.default_rng(0).permutation(L * M)[:maps]
        scales, levels = (
            array.reshape(N, 1, L * M, -1)[:, :, chosen]
            for array in (self.scales, self.levels)
        )
        return Rows(scales, levels, self.steps, self.pool)

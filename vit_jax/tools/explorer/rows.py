"""Attention as the explorer stores and sends it: one byte per pair of tokens.

Letters: N tokens, E of them extra tokens; P patches or blocks; L layers, M maps per
layer.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from vit_jax.models.network import BlockWindows

LEVELS = 255


@dataclasses.dataclass(frozen=True)
class AttentionRows:
    """Attention from every token of an image, one byte per pair of tokens.

    Each query, layer and map (the heads, then the rollout) has float32 scales and
    integer levels. Extra tokens are stored separately because they may receive most of
    the attention, which would leave few levels for the patches. To limit the size of a
    file, there may be fewer levels, or blocks of patches instead of patches.

    Attributes:
      scales: attention to the extra tokens, then the largest attention to a patch.
      levels: attention to the patches, from 0 to `steps` for the largest.
      steps: level of the largest attention to a patch.
      pool: side of the blocks in patches; each level is the mean of a block.
    """

    scales: Float32[np.ndarray, "N L M E1"]
    levels: UInt8[np.ndarray, "N L M P"]
    steps: int = LEVELS
    pool: int = 1

    @classmethod
    def zeros(cls, tokens: int, extra: int, layers: int, maps: int) -> "AttentionRows":
        """Returns rows of zeros, to be filled by `set_layer`."""
        return cls(
            np.zeros((tokens, layers, maps, extra + 1), np.float32),
            np.zeros((tokens, layers, maps, tokens - extra), np.uint8),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.scales.nbytes + self.levels.nbytes

    @property
    def num_queries(self) -> int:
        """Number of tokens whose attention is stored."""
        return len(self.levels)

    def set_layer(self, layer: int, maps: Float[np.ndarray, "M N N"]) -> None:
        """Sets the attention from each query (second axis) to each token (last axis)."""
        extra = self.scales.shape[-1] - 1
        rows = np.swapaxes(maps, 0, 1)
        peak, self.levels[:, layer] = _quantize(rows[..., extra:])
        self.scales[:, layer] = np.concatenate([rows[..., :extra], peak], axis=-1)

    def to_bytes(self, query: int) -> bytes:
        """Returns the attention from one query: all its scales, then all its levels."""
        scales = self.scales[query].astype("<f4", copy=False)
        return scales.tobytes() + self.levels[query].tobytes()

    def requantize(self, steps: int) -> "AttentionRows":
        """Returns the same attention with fewer levels, which compress better."""
        table = np.rint(np.arange(self.steps + 1) * (steps / self.steps))
        levels = table.astype(np.uint8)[self.levels]
        return AttentionRows(self.scales, levels, steps, self.pool)

    def pool_patches(self, grid: tuple[int, int], side: int) -> "AttentionRows":
        """Returns means over blocks of patches, with scales rounded to 16 bits.

        Blocks of side 2 need a quarter of the bytes. The rounded scales need half as
        many bytes after compression, since half of their bits are zeros.

        Args:
          grid: number of patches down and across, before pooling.
          side: side of a block in patches; the last blocks may be smaller.
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
            peak, levels[:, layer] = _quantize(means)
            scales[:, layer, :, -1:] *= peak / self.steps
        # Rounded to the nearest number whose lower half is zeros.
        bits = (scales.view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)
        return AttentionRows(bits.view(np.float32), levels, LEVELS, side)

    def sample_maps(self, maps: int) -> "AttentionRows":
        """Returns up to `maps` random maps of all layers, as if they were one layer."""
        N, L, M, _ = self.levels.shape
        chosen = np.random.default_rng(0).permutation(L * M)[:maps]
        scales, levels = (
            array.reshape(N, 1, L * M, -1)[:, :, chosen]
            for array in (self.scales, self.levels)
        )
        return AttentionRows(scales, levels, self.steps, self.pool)


class WindowRows:
    """Attention from every patch of an image to the patches in its windows.

    The page has one grid for all layers, that of the first stage. A patch of a later
    stage was merged from several patches of the first: each of these shows the
    attention to it.

    Args:
      blocks: windows of each block, for one image.
    """

    steps, pool = LEVELS, 1  # Full resolution, unlike some AttentionRows.

    def __init__(self, blocks: Sequence[BlockWindows]):
        self._grid = blocks[0].grid
        self._heads = max(block.weights.shape[2] for block in blocks)
        self._blocks = jax.device_get(list(blocks))
        self.num_queries = self._grid[0] * self._grid[1]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(block.weights.nbytes for block in self._blocks)

    def to_bytes(self, query: int) -> bytes:
        """Returns the attention from one patch, see `AttentionRows.to_bytes`.

        For layers with fewer heads than others, the missing heads are zeros.

        Args:
          query: number of the patch in the grid of the first stage.
        """
        scales = np.zeros((len(self._blocks), self._heads, 1), "<f4")
        levels = np.zeros((len(self._blocks), self._heads, self.num_queries), np.uint8)
        for layer, block in enumerate(self._blocks):
            rows = self._rows(block, query)
            scales[layer, : len(rows)], levels[layer, : len(rows)] = _quantize(rows)
        return scales.tobytes() + levels.tobytes()

    def _rows(self, block: BlockWindows, query: int) -> Float[np.ndarray, "H P"]:
        merged = _merged_into(self._grid, block)
        (window,), (position,) = np.nonzero(block.patches == merged[query])
        patches = block.patches[window]
        weights = block.weights[0, window, :, position]
        rows = np.zeros((len(weights), block.grid[0] * block.grid[1]), np.float32)
        rows[:, patches[patches >= 0]] = weights[:, patches >= 0]
        return rows[:, merged]


def _quantize(
    values: Float[np.ndarray, "*M P"],
) -> tuple[Float[np.ndarray, "*M 1"], Float[np.ndarray, "*M P"]]:
    """Returns the largest value of each row, and the values as levels relative to it."""
    peak = values.max(axis=-1, keepdims=True)
    # A row of zeros is divided by 1, since 0 / 0 is not a number.
    return peak, np.rint(values / np.where(peak > 0, peak, 1) * LEVELS)


def _merged_into(grid: tuple[int, int], block: BlockWindows) -> Int[np.ndarray, " P"]:
    """Returns, for each patch of the first stage, the patch that it was merged into."""
    rows, columns = np.indices(grid).reshape(2, -1) >> block.stage
    return rows * block.grid[1] + columns

"""Attention as the explorer keeps and sends it: a byte for each pair of tokens.

Of each query, layer and map (the heads, then the rollout) there are the attention to
each extra token and the largest attention to a patch, float32, and the attention to
each patch as a whole number, 255 being that largest one. Extra tokens are apart
because they may draw most of the attention, and would leave the patches few levels.
Letters: N tokens, E of them extra and P patches, L layers, M maps a layer.
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
    """

    scales: Float32[np.ndarray, "N L M E1"]
    levels: UInt8[np.ndarray, "N L M P"]
    steps: int = LEVELS

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
        levels = np.rint(self.levels * np.float32(steps / self.steps))
        return Rows(self.scales, levels.astype(np.uint8), steps)

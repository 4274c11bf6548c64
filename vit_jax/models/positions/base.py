"""What every kind of position gives to the blocks of an encoder.

Letters: B images, N tokens, P of them before the patches, V visible patches, D model
width, Y by X patches.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

if TYPE_CHECKING:
    from vit_jax.models.patches import Places

PLACEMENTS = ("stem", "every", "shared")  # Values of `posemb_placement`.
# `nn.Module.param`: name, initialiser and its arguments to an array.
Param = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Position:
    """A kind of position; this one gives nothing.

    Attributes:
      config: `EncoderConfig`, which imports this package.
      grid: rows and columns of patches, Y and X.
      num_prefix_tokens: P.
      num_register_tokens: number of prefix tokens, the last ones, without a position.
      of_pairs: whether it is of pairs of tokens: it needs all patches of one grid, and an
        attention that computes logits.
    """

    config: Any
    grid: tuple[int, int]
    num_prefix_tokens: int
    num_register_tokens: int = 0

    of_pairs: ClassVar[bool] = False

    @classmethod
    def describe(cls, config: Any) -> str:
        """Returns the key that chooses this kind and its value, for messages."""
        return cls.__name__

    @classmethod
    def in_blocks(cls, config: Any) -> str:
        """Returns the key and value of positions that every block uses; "" if none does.

        Tokens cannot be merged with such positions.
        """
        return cls.describe(config) if cls.of_pairs else ""

    @staticmethod
    def check(config: Any) -> None:
        """Raises UserError if keys of the encoder do not fit this kind."""

    def by_block(
        self,
        module: nn.Module,
        places: "Places | None" = None,
        keys: Sequence[Key[Array, ""] | None] = (),
    ) -> list[dict[str, Array]]:
        """Returns what it gives to each block.

        "added" (B, N, D), or of one image, is added to the tokens before the block. Other
        names are fields of `attention.Positions`: "angles", "bias" and "relative".

        Args:
          module: encoder, in a compact method: its parameters are created there.
          places: places of the patches in images of any size; None if they are `grid`.
          keys: random key of each block, or None outside training.
        """
        return [{}] * self.config.depth

    @staticmethod
    def resize(
        name: str,
        values: Array | np.ndarray,
        old_grid: tuple[int, int],
        grid: tuple[int, int],
        method: str,
    ) -> Array | np.ndarray:
        """Returns the parameter of a name for another grid; unchanged if not this kind's.

        Args:
          name: last part of its path.
          values: NumPy stays NumPy.
          old_grid, grid: rows and columns of patches before and after.
          method: a key of `resizing.RESIZE_METHODS`.
        """
        return values


def take(
    given: Mapping[str, Array], visible: Int[Array, "B V"], num_prefix_tokens: int
) -> dict[str, Array]:
    """Returns what `Position.by_block` gives to a block, for some patches of each image."""
    P, left = num_prefix_tokens, dict(given)
    if "added" in given:
        left["added"] = take_tokens(given["added"], visible, P)
    if "angles" in given:
        angles = given["angles"]
        angles = angles if angles.ndim == 4 else angles[None]
        left["angles"] = take_tokens(angles, visible[:, None], P)
    return left


def take_tokens(
    x: Float[Array, "..."], visible: Int[Array, "*B V"], num_prefix_tokens: int
) -> Float[Array, "..."]:
    """Returns the prefix tokens and the visible patches of x (*B, N, D); B may be 1 in x."""
    P = num_prefix_tokens
    patches = jnp.take_along_axis(x[..., P:, :], visible[..., None], axis=-2)
    prefix = jnp.broadcast_to(
        x[..., :P, :], (*patches.shape[:-2], P, patches.shape[-1])
    )
    return jnp.concatenate([prefix, patches], axis=-2)

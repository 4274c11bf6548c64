"""The interface of positions: the inputs that they provide to the blocks of an encoder.

Letters: B images, N tokens, P prefix tokens, V visible patches, D model width, Y by X
patches.
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
# Type of `nn.Module.param`: (name, initialiser, its arguments) -> array.
Param = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Position:
    """Base class of positions, without any position.

    Attributes:
      config: `EncoderConfig`.
      grid: rows and columns of patches, Y and X.
      num_prefix_tokens: number of tokens before the patches, P.
      num_register_tokens: number of registers, the last prefix tokens, which do not
        have positions.
      of_pairs: whether the positions depend on pairs of tokens. They then need all
        patches of one grid, and an attention that computes logits.
    """

    config: Any
    grid: tuple[int, int]
    num_prefix_tokens: int
    num_register_tokens: int = 0

    of_pairs: ClassVar[bool] = False

    @classmethod
    def describe(cls, config: Any) -> str:
        """Returns the key that chooses this kind, with its value, for messages."""
        return cls.__name__

    @classmethod
    def in_blocks(cls, config: Any) -> str:
        """Returns key and value if blocks use the positions; "" if only the stem does.

        If blocks use the positions, tokens cannot be merged.
        """
        return cls.describe(config) if cls.of_pairs else ""

    @staticmethod
    def check(config: Any) -> None:
        """Raises UserError if keys of the encoder do not fit this kind of position."""

    def by_block(
        self,
        module: nn.Module,
        places: "Places | None" = None,
        keys: Sequence[Key[Array, ""] | None] = (),
    ) -> list[dict[str, Array]]:
        """Returns a dict of inputs for each block.

        "added" (B, N, D) or (1, N, D) is added to the tokens before the block. Other
        entries are fields of `attention.Positions`: "angles", "bias" and "relative".

        Args:
          module: encoder, called from a compact method, in which parameters are
            created.
          places: places of the patches in images of any size; None for patches of
            `grid`.
          keys: random key of each block; None outside training.
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
        """Resizes a parameter to another grid if it belongs to this kind of position.

        Args:
          name: last part of the path of the parameter.
          values: values of the parameter; NumPy arrays stay NumPy arrays.
          old_grid, grid: rows and columns of patches before and after.
          method: a key of `resizing.RESIZE_METHODS`.
        """
        return values


def take(
    given: Mapping[str, Array], visible: Int[Array, "B V"], num_prefix_tokens: int
) -> dict[str, Array]:
    """Returns the inputs of `Position.by_block` for the visible patches of each image.

    Args:
      given: inputs for one block.
      visible: indices of the visible patches.
      num_prefix_tokens: P.
    """
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
    """Returns the prefix tokens and the visible patches.

    Args:
      x: tokens, (*B, N, D); B may be 1.
      visible: indices of the visible patches.
      num_prefix_tokens: P.
    """
    P = num_prefix_tokens
    patches = jnp.take_along_axis(x[..., P:, :], visible[..., None], axis=-2)
    prefix = jnp.broadcast_to(
        x[..., :P, :], (*patches.shape[:-2], P, patches.shape[-1])
    )
    return jnp.concatenate([prefix, patches], axis=-2)

"""Rotary position embeddings: positions of patches rotate queries and keys.

The product of two rotated vectors depends only on the offset of their patches. Feature
i of a head is rotated together with feature i + K/2. Checkpoints in which neighbouring
features form pairs, or columns come before rows, are reordered when they are read.
Letters: Y by X patches, N patches, K head width, J half of the head width.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.positions import ROTARY
from vit_jax.models.positions.base import Position

if TYPE_CHECKING:
    from vit_jax.models.patches import Places


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig(EncoderConfig):
    """An encoder with optional rotary positions."""

    rope: str = key(
        "none",
        'Rotary position embeddings: "none", "axial" (EVA-02), "centered" (DINOv3) or '
        '"mixed" (learned directions, arXiv:2403.13298).',
        choices=tuple(ROTARY),
    )
    rope_temperature: float = key(
        100.0,
        "Ratio of the longest to the shortest wavelength of rotary positions; EVA-02 "
        "uses 10,000.",
    )
    rope_reference: int = key(
        0,
        "Grid size in patches per side to which rotary positions of other grids are "
        "scaled; 0 is off.",
        reason="weights of EVA-02 (arXiv:2303.11331)",
        below=10_000,
    )
    rope_shift: float = key(
        0.0,
        'Maximum random shift of "centered" rotary positions in training, drawn for '
        "each block; 0 is off.",
        reason="pos_embed_rope_shift_coords of DINOv3 (arXiv:2508.10104)",
        training_only=True,
    )
    rope_jitter: float = key(
        1.0,
        'Maximum factor for randomly stretching or shrinking "centered" rotary '
        "positions in training, separately in height and width; 1 is off.",
        reason="pos_embed_rope_jitter_coords of DINOv3 (arXiv:2508.10104)",
        at_least=1,
        training_only=True,
    )
    rope_rescale: float = key(
        1.0,
        'Maximum factor for randomly stretching or shrinking "centered" rotary '
        "positions in training, equally in height and width; 1 is off, DINOv3 uses 2.",
        at_least=1,
        training_only=True,
    )

    @property
    def positions(self) -> tuple[type[Position], ...]:
        return (ROTARY[self.rope], *super().positions)

    @property
    def is_random(self) -> bool:
        return super().is_random or self.jitters_rope

    @property
    def jitters_rope(self) -> bool:
        """Whether rotary positions are changed at random in training."""
        return (self.rope_shift, self.rope_jitter, self.rope_rescale) != (0, 1, 1)

    def layer_of(self, path: str) -> int | range:
        if path.endswith("/rope_frequencies"):
            return range(1, self.depth + 1)
        return super().layer_of(path)

    def check(self) -> None:
        super().check()
        if self.jitters_rope and self.rope != "centered":
            raise UserError(
                f"model.rope={self.rope!r}: model.rope_shift, model.rope_jitter and "
                "model.rope_rescale need 'centered' positions: set "
                "model.rope='centered', or leave them out"
            )


class Rotary(Position):
    """Angles of rows and columns; the key `rope` chooses the unit of positions."""

    @classmethod
    def in_blocks(cls, config):
        return f"model.rope={config.rope!r}"

    @staticmethod
    def check(config):
        K = config.width // config.num_heads
        if K % 4:
            raise UserError(
                f"heads have {K} features, not a multiple of 4 as needed for "
                f"model.rope={config.rope!r}: change model.num_heads or model.rope"
            )

    def by_block(self, module, places=None, keys=()):
        config = self.config
        K, temperature = config.width // config.num_heads, config.rope_temperature
        how = K, temperature, config.rope_reference
        if places is None:
            fixed = angles(config.rope, self.grid, *how)
        else:
            fixed = angles_at(config.rope, places, *how)
        by_block = [fixed] * config.depth
        if config.jitters_rope and keys[0] is not None:
            how = config.rope_shift, config.rope_jitter, config.rope_rescale
            by_block = [jittered_angles(k, fixed, temperature, *how) for k in keys]
        return [{"angles": self.pad_prefix(layer)} for layer in by_block]

    def pad_prefix(
        self, angles: Float[Array | np.ndarray, "... M J"]
    ) -> Float[Array, "... N J"]:
        """Returns zeros for the prefix tokens, then the angles of the patches."""
        pad = ((self.num_prefix_tokens, 0), (0, 0))
        return jnp.pad(angles, ((0, 0),) * (angles.ndim - 2) + pad)


def angles(
    kind: str,
    grid: tuple[int, int],
    head_width: int,
    temperature: float,
    reference: int = 0,
) -> Float[np.ndarray, "1 N J"]:
    """Returns the angles of each patch in radians, of its row, then of its column.

    Args:
      kind: unit of positions: "axial", in patches (EVA-02, arXiv:2303.11331), or
        "centered", from -1 to 1 along each side of the image (DINOv3,
        arXiv:2508.10104).
      grid: rows and columns of patches, Y and X.
      head_width: features per head K, a multiple of 4.
      temperature: approximate ratio of the longest to the shortest wavelength.
      reference: side of the pretraining grid in patches, to which positions of an
        "axial" grid of another size are scaled; 0 for no scaling.
    """
    place = np.indices(grid, np.float64).reshape(2, -1).T
    positions = _positions(kind, place, np.asarray(grid)[None], reference)
    turned = positions[..., None] * _bands(head_width, temperature)
    return turned.reshape(1, len(place), -1).astype(np.float32)


def angles_at(
    kind: str,
    places: "Places",
    head_width: int,
    temperature: float,
    reference: int = 0,
) -> Float[Array, "B 1 N J"]:
    """Returns the angles of patches in images of any size.

    Args:
      kind, head_width, temperature, reference: see `angles`.
      places: places of the patches.
    """
    positions = _positions(kind, places.place, places.sides, reference)
    bands = _bands(head_width, temperature).astype(np.float32)
    turned = positions[..., None] * bands[None, None, None]
    return turned.reshape(*positions.shape[:2], -1)[:, None]


def _positions(kind: str, place, sides, reference: int):
    """Returns rows and columns in the unit of `kind`."""
    if kind == "centered":
        return 2 * np.pi * (2 * (place + 0.5) / sides - 1)
    return place / sides * reference if reference else place


def _bands(head_width: int, temperature: float) -> Float[np.ndarray, " bands"]:
    return temperature ** -np.linspace(0, 1, head_width // 4, endpoint=False)


def jittered_angles(
    key: Key[Array, ""],
    plain: Float[Array | np.ndarray, "... N J"],
    temperature: float,
    shift: float,
    jitter: float,
    rescale: float,
) -> Float[Array, "... N J"]:
    """Returns the angles of randomly shifted and stretched "centered" positions.

    The position p of a row or column in [-1, 1] becomes (p + s) j r, as in DINOv3's
    code.

    Args:
      key: random key.
      plain: "centered" angles.
      temperature: see `angles`.
      shift: maximum of |s|; s is drawn uniformly for rows and for columns.
      jitter: maximum of j; j is drawn log-uniformly between the inverse of the maximum
        and the maximum, for rows and for columns.
      rescale: maximum of r, which is drawn like j, but once for both.
    """
    *_, J = plain.shape
    sides = jnp.asarray(plain).reshape(-1, 2, J // 2)
    shift_key, jitter_key, rescale_key = jax.random.split(key, 3)

    def draw(key, sides):
        return jax.random.uniform(key, (1, sides, 1), minval=-1)

    bands = _bands(2 * J, temperature)[None, None].astype(np.float32)
    moved = sides + bands * (2 * np.pi * shift) * draw(shift_key, 2)
    factor = math.log(jitter) * draw(jitter_key, 2)
    factor += math.log(rescale) * draw(rescale_key, 1)
    return (moved * jnp.exp(factor)).reshape(plain.shape)

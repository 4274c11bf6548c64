"""Rotary position embeddings: queries and keys are rotated by their patches' positions.

The product of two rotated vectors depends on the offset of their patches. Feature i of a
head is rotated together with feature i + K/2; features of files that pair neighbours, or
have the column before the row, are reordered when they are read.
Letters: Y by X patches, N patches or tokens, H heads, K head width, J its half.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.models.patches import Places

KINDS = ("none", "axial", "centered", "mixed")


def angles(
    kind: str,
    grid: tuple[int, int],
    head_width: int,
    temperature: float,
    reference: int = 0,
) -> Float[np.ndarray, "1 N J"]:
    """Returns the angles of each patch in radians, of its row, then of its column.

    Args:
      kind: unit of positions: "axial", patches (EVA-02, arXiv:2303.11331), or "centered",
        from -1 to 1 along each side of the image (DINOv3, arXiv:2508.10104).
      grid: Y and X.
      head_width: K, a multiple of 4.
      temperature: approximate ratio of the longest wavelength to the shortest.
      reference: side of the pretraining grid in patches, to which an "axial" grid of
        another size is stretched; 0 for no stretching.
    """
    place = np.indices(grid, np.float64).reshape(2, -1).T
    positions = _positions(kind, place, np.asarray(grid)[None], reference)
    turned = positions[..., None] * _bands(head_width, temperature)
    return turned.reshape(1, len(place), -1).astype(np.float32)


def angles_at(
    kind: str,
    places: Places,
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


def of_blocks(
    config: object,
    grid: tuple[int, int],
    head_width: int,
    keys: Sequence[Key[Array, ""] | None],
    places: Places | None = None,
) -> list[
    Float[np.ndarray, "1 N J"] | Float[Array, "#B 1 N J"] | Float[Array, "1 N J"]
]:
    """Returns the angles of each block, which are random in training if so configured.

    Args:
      config: config of an encoder, with `rope`, `rope_temperature` and the like.
      grid, head_width: see `angles`.
      keys: random key of each block, or None.
      places: places of patches in images of any size, instead of `grid`.
    """
    how = head_width, config.rope_temperature, config.rope_reference
    if places is None:
        fixed = angles(config.rope, grid, *how)
    else:
        fixed = angles_at(config.rope, places, *how)
    if not config.jitters_rope or keys[0] is None:
        return [fixed] * len(keys)
    how = config.rope_shift, config.rope_jitter, config.rope_rescale
    return [jittered_angles(key, fixed, config.rope_temperature, *how) for key in keys]


def jittered_angles(
    key: Key[Array, ""],
    plain: Float[Array, "... N J"],
    temperature: float,
    shift: float,
    jitter: float,
    rescale: float,
) -> Float[Array, "... N J"]:
    """Returns the angles of randomly moved and stretched "centered" positions.

    A row's or column's position p in [-1, 1] becomes (p + s) j r, as in DINOv3's code.

    Args:
      key: random key.
      plain: "centered" angles.
      temperature: see `angles`.
      shift: largest |s|, drawn uniformly for each side.
      jitter: largest j, drawn log-uniformly from its inverse on for each side.
      rescale: largest r, drawn in the same way, the same for both sides.
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


def mixed_angles(
    frequencies: Float[Array, "2 H J"],
    grid: tuple[int, int],
    places: Places | None = None,
) -> Float[Array, "H N J"] | Float[Array, "B H N J"]:
    """Returns the angles of learnt directions (RoPE-Mixed, arXiv:2403.13298).

    Args:
      frequencies: a layer's frequencies down and across, in radians per patch.
      grid: Y and X.
      places: places of patches in images of any size, instead of `grid`.
    """
    down, across = jnp.asarray(frequencies)[:, :, None]
    if places is not None:
        at = places.place[:, None, :, :, None].astype(jnp.float32)
        return at[..., 0, :] * down[None] + at[..., 1, :] * across[None]
    rows, columns = np.indices(grid, dtype=np.float32).reshape(2, 1, -1, 1)
    return rows * down + columns * across


def initial_frequencies(
    random: Float[Array, "depth H"], head_width: int, temperature: float
) -> Float[Array, "depth 2 H J"]:
    """Returns initial frequencies of RoPE-Mixed: two orthogonal directions per head.

    Args:
      random: directions as fractions of a full turn.
      head_width: K.
      temperature: see `angles`.
    """
    bands = temperature ** -jnp.linspace(0, 1, head_width // 4, endpoint=False)
    bands = bands.reshape(1, 1, -1)
    turns = 2 * jnp.pi * random[..., None]
    right = turns + jnp.pi / 2
    down, across = (
        jnp.concatenate([bands * of(turns), bands * of(right)], axis=-1)
        for of in (jnp.cos, jnp.sin)
    )
    return jnp.stack([down, across], axis=1)


def rotate(
    x: Float[Array, "B H N K"], turned: Float[Array, "*BH N J"]
) -> Float[Array, "B H N K"]:
    """Rotates queries or keys.

    Args:
      x: queries or keys, head-major.
      turned: angles in radians; 0 for tokens without a position.
    """
    turned = turned if turned.ndim == x.ndim else turned[None]
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    both = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(both, axis=-1).astype(x.dtype)

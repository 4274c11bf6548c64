"""Where a network looks: its attention, and how far it reaches.

Letters: L layers, B images, H heads, N tokens, P patches, Y by X pixels, C channels.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.models import Model, Params


def maps(
    model: Model, params: Params, images: Float[Array, "B Y X C"]
) -> Iterator[Float[Array, "B H N N"]]:
    """Yields each layer's attention, computed when it is asked for and not kept.

    One layer's is in memory if the caller drops it before the next.

    Args:
      model: with attention.
      params: its parameters, in either layout.
      images: normalised.

    Yields:
      How much each token (third axis) looks at each (fourth), float32, of sum 1.

    Raises:
      UserError: the network has no attention.
    """
    # Not a generator, whose frame would keep the layer before.
    return map(operator.attrgetter("attention"), model.inside(params, images))


def of_query(
    model: Model,
    params: Params,
    images: Float[Array, "B Y X C"],
    *,
    layer: int,
    query: int = 0,
    head: int | None = None,
) -> Float[Array, "B N"]:
    """Returns what one token looks at in one layer; later layers are not computed.

    Args:
      model, params, images: as of `maps`.
      layer: from 0; from -1 downwards counted from the last.
      query: which token asks; those in front of the patches come first.
      head: from 0; None is the mean of all.

    Raises:
      UserError: the network has no attention, or there is no such layer, token or head.
    """
    depth, heads = (model.options.get(name, 0) for name in ("depth", "heads"))
    tokens = model.extra + model.grid[0] * model.grid[1]
    found = maps(model, params, images)
    for name, value, least, count in (
        ("layer", layer, -depth, depth),
        ("query", query, 0, tokens),
        ("head", head or 0, 0, heads),
    ):
        if not least <= value < count:
            raise UserError(
                f"{name}={value} is not one of the {count} of the model: choose one "
                f"from {least} to {count - 1}"
            )
    weights = next(itertools.islice(found, layer % depth, None))[:, :, query]
    return weights.mean(1) if head is None else weights[:, head]


def distance(
    maps: Iterable[Float[Array, "B H N N"]],
    grid: tuple[int, int],
    patch: int,
    extra: int,
) -> Float[np.ndarray, "L H"]:
    """Returns how far each head looks, the mean over images and asking patches.

    Of many images take `distances` of each batch, which can be averaged.

    Args:
      maps: each layer's attention, as from `maps`.
      grid: patches down and across.
      patch: side of a patch, in pixels.
      extra: tokens in front of the patches.

    Returns:
      Pixels.
    """
    return distances(maps, grid, patch, extra).mean(0)


def distances(
    maps: Iterable[Float[Array, "B H N N"]],
    grid: tuple[int, int],
    patch: int,
    extra: int,
) -> Float[np.ndarray, "B L H"]:
    """Returns how far each head looks in each image, in pixels; see `distance`.

    The mean distance from the centre of an asking patch to those of the patches looked
    at, each as much as it is looked at (arXiv:2010.11929, appendix D.7, figure 11). Of
    tokens that are no patches neither asking nor being looked at counts.
    """
    between = jnp.asarray(between_patches(grid, patch))
    found = []
    for weights in maps:
        found.append(np.asarray(reach(weights, between, extra)))
        del weights  # Before the next layer's are there.
    return np.stack(found, axis=1)


def between_patches(grid: tuple[int, int], patch: int) -> Float[np.ndarray, "P P"]:
    """Returns the distances of all pairs of patches, centre to centre, in pixels."""
    rows, columns = np.indices(grid, np.float32).reshape(2, -1)
    return patch * np.hypot(rows[:, None] - rows, columns[:, None] - columns)


@functools.partial(jax.jit, static_argnums=2)
def reach(
    weights: Float[Array, "B H N N"], between: Float[Array, "P P"], extra: int
) -> Float[Array, "B H"]:
    """Returns how far the heads of one layer look; see `distances`.

    Args:
      weights: attention.
      between: distances of patches, from `between_patches`.
      extra: tokens in front of the patches.
    """
    weights = weights[:, :, extra:, extra:]
    total = weights.sum(-1)
    far = jnp.einsum("bhnm,nm->bhn", weights, between, precision="highest")
    # A patch that looks at no patch is left out: it has no distance.
    seen = total > 0
    far = jnp.where(seen, far / jnp.where(seen, total, 1), 0)
    return far.sum(-1) / jnp.maximum(seen.sum(-1), 1)

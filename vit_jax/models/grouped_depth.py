"""Stochastic depth that does not compute what it drops (DINOv2, arXiv:2304.07193, section 5).

Letters: B images, S of them are kept, N tokens, D model width.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models.attention import Positions
from vit_jax.models.encoder import Block, split_over_devices
from vit_jax.models.encoder_config import EncoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedDepthConfig(EncoderConfig):
    """An encoder whose stochastic depth may be of groups of images."""

    drop_path_group: int = key(
        0,
        "Group size for batched stochastic depth (DINOv2): in every group of this many "
        "images, each block computes only the images that it keeps, a fixed number. "
        'Needs drop_path_schedule="constant"; a divisor of the images per device '
        "avoids communication. 0 is off.",
        training_only=True,
    )

    @property
    def block(self) -> type[Block]:
        return GroupedBlock if self.drop_path_group else super().block

    def check(self) -> None:
        super().check()
        if self.drop_path_group and self.drop_path_schedule != "constant":
            raise UserError(
                f"model.drop_path_group={self.drop_path_group}: every block must drop the "
                "same number of images: set model.drop_path_schedule='constant', or it to 0"
            )

    def check_rows(self, rows: int, devices: int, platform: str) -> str:
        """Checks that no group lies on two GPUs, and that the rows are whole groups.

        XLA would place the rows that a group keeps on some of the GPUs, over which cuDNN's
        attention cannot be split.
        """
        group = self.drop_path_group
        if not group:
            return super().check_rows(rows, devices, platform)
        each, size = rows // devices, math.gcd(rows, group)
        if platform == "gpu" and each % size:
            raise UserError(
                f"model.drop_path_group={group}: {devices} GPUs have {each} images or "
                "crops each, which is not a whole number of groups: set batch_size to a multiple of "
                f"{devices * group}"
            )
        if size == group:
            return ""
        return (
            f"model.drop_path_group={group} does not divide them: groups have {size}"
            f"{', so no branch is dropped' if size == 1 else ''}"
        )


class GroupedBlock(Block):
    """A block that computes its branches for random images alone."""

    def __call__(
        self,
        x: Float[Array, "B N D"],
        positions: Positions | None = None,
        rate: Float[Array, ""] | float | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N D"]:
        """Transforms tokens, see `Block`; the drop rate is that of the config."""
        if rate is None or key is None:
            return super().__call__(x, positions, rate, key)
        keys = jax.random.split(key, 4)
        kept = self._draw(x, keys[1])
        given = None if positions is None else kept.take_positions(positions)
        x = kept.add(x, self.attend(kept.take(x), given, keys[0]))
        x = split_over_devices(x)
        kept = self._draw(x, keys[3])
        x = kept.add(x, self.transform(kept.take(x), keys[2]))
        return split_over_devices(x)

    def _draw(self, x, key):
        config = self.config
        return draw(len(x), config.drop_path_rate, config.drop_path_group, key)


class Kept(NamedTuple):
    """The images of a batch whose branch is computed.

    Attributes:
      order: images of each group in random order.
      count: number of images that are kept of each group, the first in this order.
    """

    order: Int[Array, "groups size"]
    count: int

    def take(self, rows: Float[Array, "B ..."]) -> Float[Array, "S ..."]:
        """Returns the rows of the kept images."""
        # Within groups, so that a batch that is split over devices stays where it is.
        groups = rows.reshape(-1, self.order.shape[1], *rows.shape[1:])
        index = self.order[:, : self.count]
        index = index.reshape(-1, self.count, *(1,) * (rows.ndim - 1))
        return jnp.take_along_axis(groups, index, axis=1).reshape(-1, *rows.shape[1:])

    def take_positions(self, positions: Positions) -> Positions:
        """Returns the positions of the kept images; most kinds are the same for all."""
        per_image = {
            name: self.take(x)
            for name, x in positions._asdict().items()
            if x is not None and (name in ("lengths", "segments") or x.ndim == 4)
        }
        return positions._replace(**per_image)

    def add(
        self, x: Float[Array, "B N D"], branch: Float[Array, "S N D"]
    ) -> Float[Array, "B N D"]:
        """Adds the branch of the kept images, scaled up, to the tokens of all."""
        place = jnp.argsort(self.order, axis=1)[..., None, None]
        y = branch * (self.order.shape[1] / self.count)
        y = y.reshape(-1, self.count, *y.shape[1:])
        y = jnp.take_along_axis(y, place.clip(0, self.count - 1), axis=1)
        return x + jnp.where(place < self.count, y, 0).reshape(x.shape)


def draw(images: int, rate: float, group: int, key: Key[Array, ""]) -> Kept:
    """Draws the images that are kept.

    Args:
      images: B.
      rate: drop rate. Of each group the whole number of images below
        `(1 - rate) * group` is kept, at least one.
      group: number of consecutive images that form a group; if B is not a multiple of it,
        groups have the greatest common divisor of both.
      key: random key.
    """
    size = math.gcd(images, group)
    count = max(1, math.floor(size * (1 - rate) + 1e-9))
    order = jnp.argsort(jax.random.uniform(key, (images // size, size)), axis=1)
    return Kept(order, count)

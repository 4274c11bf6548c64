"""Batched stochastic depth, which skips dropped images (arXiv:2304.07193, section 5).

Letters: B images, S images that are kept, N tokens, D model width.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Num

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models.attention import Positions
from vit_jax.models.encoder import Block, split_over_devices
from vit_jax.models.encoder_config import EncoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedDepthConfig(EncoderConfig):
    """An encoder with optional stochastic depth by groups of images."""

    drop_path_group: int = key(
        0,
        "Group size for batched stochastic depth (DINOv2): in every group of this many "
        "images, each block computes only the images that it keeps, a fixed number. It "
        'needs model.drop_path_schedule="constant". A divisor of the number of images '
        "per device avoids communication. 0 is off.",
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
                "same number of images: set model.drop_path_schedule='constant' or "
                "model.drop_path_group=0"
            )

    def check_rows(self, rows: int, devices: int, platform: str) -> str:
        """Checks that the rows, and those of each GPU, are whole groups.

        With a split group, XLA would place its kept rows on some of the GPUs only, and
        cuDNN's attention cannot be split in this way.
        """
        group = self.drop_path_group
        if not group:
            return super().check_rows(rows, devices, platform)
        each, size = rows // devices, math.gcd(rows, group)
        if platform == "gpu" and each % size:
            raise UserError(
                f"model.drop_path_group={group}: each of the {devices} GPUs has {each} "
                "images or crops, which is not a multiple of the group size: set "
                f"batch_size to a multiple of {devices * group}"
            )
        if size == group:
            return ""
        return (
            f"model.drop_path_group={group} does not divide them: the group size is {size}"
            f"{', so no branch is dropped' if size == 1 else ''}"
        )


class GroupedBlock(Block):
    """A block that computes its branches only for random images."""

    def __call__(
        self,
        x: Float[Array, "B N D"],
        positions: Positions | None = None,
        rate: Float[Array, ""] | float | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N D"]:
        """Transforms tokens, see `Block`; the drop rate of the config is used."""
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
    """The images of a batch that are kept: their branch is computed.

    Attributes:
      order: random order of the images of each group.
      count: number of images that are kept in each group, the first ones in this order.
    """

    order: Int[Array, "groups size"]
    count: int

    def take(self, rows: Num[Array, "B ..."]) -> Num[Array, "S ..."]:
        """Returns the rows of the kept images."""
        # Indexed within groups, so that a batch that is split over devices is not
        # moved.
        groups = rows.reshape(-1, self.order.shape[1], *rows.shape[1:])
        index = self.order[:, : self.count]
        index = index.reshape(-1, self.count, *(1,) * (rows.ndim - 1))
        return jnp.take_along_axis(groups, index, axis=1).reshape(-1, *rows.shape[1:])

    def take_positions(self, positions: Positions) -> Positions:
        """Returns the positions of the kept images, if they depend on the image."""
        per_image = {
            name: self.take(x)
            for name, x in positions._asdict().items()
            if x is not None and (name in ("lengths", "segments") or x.ndim == 4)
        }
        return positions._replace(**per_image)

    def add(
        self, x: Float[Array, "B N D"], branch: Float[Array, "S N D"]
    ) -> Float[Array, "B N D"]:
        """Adds the branch of the kept images, scaled up, to the tokens."""
        place = jnp.argsort(self.order, axis=1)[..., None, None]
        y = branch * (self.order.shape[1] / self.count)
        y = y.reshape(-1, self.count, *y.shape[1:])
        y = jnp.take_along_axis(y, place.clip(0, self.count - 1), axis=1)
        return x + jnp.where(place < self.count, y, 0).reshape(x.shape)


def draw(images: int, rate: float, group: int, key: Key[Array, ""]) -> Kept:
    """Draws the images that are kept.

    Args:
      images: number of images B.
      rate: drop rate. In each group, `(1 - rate) * group` images are kept, rounded
        down, but at least one.
      group: number of consecutive images that form a group; if B is not a multiple of
        it, the group size is the greatest common divisor of both.
      key: random key.
    """
    size = math.gcd(images, group)
    count = max(1, math.floor(size * (1 - rate) + 1e-9))
    order = jnp.argsort(jax.random.uniform(key, (images // size, size)), axis=1)
    return Kept(order, count)

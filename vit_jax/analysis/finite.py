"""Numbers that are none: what a damaged checkpoint, or one that diverged, leads to."""

import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError


def check(
    values: Float[np.ndarray, "..."] | Float[Array, "..."] | np.floating, what: str
) -> None:
    """Refuses to look into what is not finite.

    Args:
      values: that a checkpoint holds, or leads to.
      what: names them, as "B/16's output for a.png".

    Raises:
      UserError: one of them is not finite.
    """
    if not np.isfinite(values).all():
        raise UserError(
            f"{what} is not finite: the checkpoint is damaged, or diverged in training"
        )

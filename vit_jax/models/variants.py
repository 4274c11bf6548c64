"""Sizes of the encoders, and how a variant string such as "B/16" is read."""

import dataclasses
import re

from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Size:
    """Numbers of one encoder size.

    Attributes:
      width: features a token.
      depth: encoder blocks.
      heads: attention heads a block.
      mlp_dim: hidden units of the MLP.
    """

    width: int
    depth: int
    heads: int
    mlp_dim: int


SIZES = {
    "Ti": Size(192, 12, 3, 768),  # DeiT (arXiv:2012.12877), table 1.
    "S": Size(384, 12, 6, 1536),  # DeiT, table 1.
    "B": Size(768, 12, 12, 3072),  # ViT (arXiv:2010.11929), table 1.
    "L": Size(1024, 24, 16, 4096),  # ViT, table 1.
    "H": Size(1280, 32, 16, 5120),  # ViT, table 1.
}


def parse(variant: str) -> tuple[Size, int]:
    """Reads a variant string.

    Args:
      variant: size letter and patch side in pixels, as "B/16".

    Returns:
      The size and the patch side.

    Raises:
      UserError: not of this form, or no such size.
    """
    match = re.fullmatch(r"(\w+)/(\d+)", variant)
    if not match or match[1] not in SIZES or int(match[2]) < 1:
        raise UserError(
            f"model.variant={variant!r} is not SIZE/PATCH with a size out of "
            f"{', '.join(SIZES)}, as 'B/16'"
        )
    return SIZES[match[1]], int(match[2])

"""Data sets named on a command line: NAME[@DIR][#SPLIT]."""

import dataclasses
import os
import re

from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_unchecked
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Spec:
    """One split of a data set.

    Attributes:
      name: as `config.data.name`.
      data_dir: as `config.data.data_dir`, with ~ resolved.
      split: as `config.data.split`.
      image_key: as `config.data.image_key`; the text has no place for it.
    """

    name: str
    data_dir: str
    split: str
    image_key: str = "image"

    def __str__(self) -> str:
        where = f"@{self.data_dir}" if self.data_dir else ""
        return f"{self.name}{where}#{self.split}"

    def open(self) -> Source:
        """Opens the split without its labels; raises UserError if it does not exist."""
        data = DataConfig(**dataclasses.asdict(self), num_classes=0)
        # Nothing is trained, so that the checks against a config's sizes do not apply.
        return open_unchecked(data, self.split)


def parse(text: str, default_split: str) -> Spec:
    """Reads NAME[@DIR][#SPLIT].

    Args:
      text: as "cifar10#test", "folder@/data/flowers#val", "cifar10@~/data#train[:98%]".
        The name ends at the first "@", the folder at the last "#".
      default_split: where the text names none.

    Raises:
      UserError: the name, the folder or the split is empty.
    """
    # A split has no "#", but a folder may.
    rest, hash_sign, split = text.rpartition("#")
    if not hash_sign:
        rest, split = text, default_split
    name, at, data_dir = rest.partition("@")
    if not name.strip() or (at and not data_dir) or not split.strip():
        raise UserError(
            f"{text!r} is not NAME[@DIR][#SPLIT]: write as cifar10#test or "
            "folder@/data/flowers#val"
        )
    return Spec(name.strip(), os.path.expanduser(data_dir), split.strip())


def parse_several(text: str, default_split: str) -> list[Spec]:
    """Reads specs between commas; those inside parentheses belong to a split.

    Args and Raises: as `parse`.
    """
    return [parse(one, default_split) for one in re.split(r",(?![^(]*\))", text)]

"""A requested data set, to be made from the files of a folder."""

import dataclasses
import pathlib
import re
from collections.abc import Callable

from vit_jax.data.config import MAX_MEGAPIXELS
from vit_jax.data.sources import key_of
from vit_jax.errors import UserError
from vit_jax.tools.preparing.build import Job
from vit_jax.tools.preparing.metadata import DatasetName

_VERSION = "1.0.0"


@dataclasses.dataclass(frozen=True)
class Request:
    """A data set to make from files, as requested by the flags of vit_jax.prepare.

    Attributes:
      kind: kind of the folder, a key of `KINDS`.
      source: folder of the files.
      name: name of the new set, with a version.
      splits: splits to read; all if empty.
      shard_bytes: approximate size of a shard.
      on_error: "raise" or "skip", for records that are damaged or incomplete.
      decode: whether each image is decoded, which detects damage.
      max_megapixels: size of the largest image to decode, see `data.max_megapixels`.
      caption: source of the captions; "" if the kind has none, or determines it.
    """

    kind: str
    source: pathlib.Path
    name: DatasetName
    splits: tuple[str, ...] = ()
    shard_bytes: int = 2**28
    on_error: str = "raise"
    decode: bool = True
    caption: str = ""
    max_megapixels: float = MAX_MEGAPIXELS

    def plan(self) -> dict:
        """Returns the parts of the set's plan (`build.Job`) known before reading."""
        values = dataclasses.asdict(self) | {"name": str(self.name)}
        values.pop("max_megapixels")  # It may be raised before a resume.
        values |= {"source": str(self.source), "splits": list(self.splits)}
        return {key: value for key, value in values.items() if value not in ("", [])}


# Functions that return the job for each kind of folder; modules add to it.
KINDS: dict[str, Callable[[Request], Job]] = {}


def new_name(text: str, source: pathlib.Path) -> DatasetName:
    """Returns the name and version of a new set.

    Args:
      text: value of --name; "" for the name of the folder.
      source: folder of the files.

    Raises:
      UserError: TFDS or vit_jax would not find a set with this name.
    """
    text = text or re.sub(r"\W+", "_", source.name.lower(), flags=re.ASCII).strip("_")
    name = DatasetName.parse(text, "--name")
    if name.dataset != name.dataset.lower():
        raise UserError(
            f"--name={text} has capitals, and TFDS finds no such set: write "
            f"{text.lower()}"
        )
    # A set with several configs, such as "vtab/one", must not look like another source.
    if any(key_of(n) for n in (name.dataset, f"{name.dataset}/")):
        raise UserError(f"--name={text} is the name of another source: choose another")
    return dataclasses.replace(name, version=name.version or _VERSION)

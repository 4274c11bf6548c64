"""Targets: one number or several per image, such as an age or a weight.

Letters: N records, T targets.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from vit_jax.data import captions
from vit_jax.data.config import DataConfig, names_in
from vit_jax.data.fields.base import Field
from vit_jax.data.sources.base import Beside, Source, name_of, read_all
from vit_jax.errors import UserError

NAME = "targets"  # Name in a record and in a batch.
_LOST = 1e-3  # Largest rounding to float32, in standard deviations.
# Texts of a table that stand for a missing number, as in pandas.
_MISSING = {"", "na", "n/a", "nan", "null", "none", "<na>"}


@dataclasses.dataclass(frozen=True)
class Target(Field):
    """The numbers of an image, float32 (T,); NaN if a number is missing."""

    name = NAME
    blank: ClassVar[float] = math.nan
    in_eval = True

    names: tuple[str, ...]

    @classmethod
    def of(cls, data, source):
        return cls(data.targets)

    @classmethod
    def part(cls, data):
        return NAME

    @classmethod
    def missing(cls, data):
        return (
            "data.target_key='': numbers are not read, but this task learns from them: "
            "set it to their columns or features, such as age"
        )

    def spec(self, size):
        return (len(self.names),), "float32"

    def read(self, record, size):
        return np.array(self.numbers(record), np.float32)

    def numbers(self, record: Mapping) -> list[float]:
        """Returns the numbers of a record, NaN where missing."""
        if NAME not in record:
            raise UserError(
                f"has no {NAME!r}, which data.target_key={','.join(self.names)!r} needs: "
                "use a table, a data set of TFDS, Parquet or tar files, or a source whose "
                f"records have {NAME!r}, one number or several"
            )
        values = np.ravel(record[NAME])
        if len(values) != len(self.names):
            raise UserError(
                f"has {len(values)} {NAME}, but data.target_key="
                f"{','.join(self.names)!r} has {len(self.names)} names: make them equal"
            )
        pairs = zip(self.names, values.tolist(), strict=True)
        return [number(value, name) for name, value in pairs]

    def column(self, source):
        return source.targets


@dataclasses.dataclass(frozen=True)
class TargetValues(Beside):
    """The targets of image files; `values` has those of each path."""

    name = part = NAME

    values: Mapping[str, tuple[float, ...]]

    def read(self, root, path):
        return self.values[path]

    def entries(self, root, paths):
        return [self.values[path] for path in paths]


@dataclasses.dataclass(frozen=True)
class TargetFiles(Beside):
    """The targets of image files as fields of metadata.jsonl; `key` is the config's."""

    name = part = NAME

    key: str

    def read(self, root, path):
        row = captions.metadata_of(root, path) or {}
        try:
            return numbers_in(row, names_in(self.key))
        except UserError as error:
            raise UserError(f"{path} {error}") from error

    def entries(self, root, paths):
        return [self.read(root, path) for path in paths]


def check_config(data: DataConfig) -> None:
    """Raises UserError if names of targets are empty or equal."""
    names = data.targets
    if not all(names) or len({*names}) < len(names):
        raise UserError(
            f"data.target_key={data.target_key!r}: give different names, separated by "
            "commas, such as age,weight"
        )


def number(value: object, name: str) -> float:
    """Returns a value as a number, NaN if it is missing.

    Args:
      value: a number, a text with one, or None; texts such as "NA" are missing.
      name: name of the target, for the message.

    Raises:
      UserError: it is not a finite number.
    """
    if value is None:
        return math.nan
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str) and value.strip().lower() in _MISSING:
        return math.nan
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.inf
    if math.isinf(result):
        raise UserError(
            f"has {value!r} in {name!r}, which is not a number: write it like 3.5, or "
            "leave it empty if it is unknown"
        )
    return result


def numbers_in(cells: Mapping, names: Iterable[str]) -> tuple[float, ...]:
    """Returns the numbers of a row or record by their names, NaN where missing."""
    return tuple(number(cells.get(name), name) for name in names)


def check_precision(values: Float[np.ndarray, " N"], name: str) -> None:
    """Raises UserError if float32, the type in batches, cannot tell numbers apart.

    Args:
      values: numbers of images, float64.
      name: name of the target, for the message.
    """
    with np.errstate(over="ignore"):
        lost = np.abs(values - values.astype(np.float32)).max()
    if lost > _LOST * values.std() and np.ptp(values):
        raise UserError(
            f"{name} has numbers from {values.min():.10g} to {values.max():.10g}, which "
            f"float32 rounds by up to {lost:.2g}: subtract a number from all of them, or "
            "choose another unit"
        )


def read_targets(source: Source, names: Sequence[str]) -> Float[np.ndarray, "N T"]:
    """Returns the targets of all records; reads the records if needed.

    Raises:
      UserError: a record has no targets, or a target is not a number.
    """
    if (known := source.known_targets()) is not None:
        return np.asarray(known, np.float64)
    field, rows = Target(tuple(names)), []
    for i, record in enumerate(read_all(source)):
        try:
            rows.append(field.numbers(record))
        except UserError as error:
            raise UserError(f"{name_of(source, i)} {error}") from error
    return np.array(rows, np.float64)

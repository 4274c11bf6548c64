"""Image files and their labels by a table: CSV, TSV, JSON Lines or Parquet.

`data.data_dir` is the file, or a folder with one file a split: train.csv, val.csv. Its
column `data.image_key` has paths, relative to the table's folder, and `data.label_key` the
names or numbers of classes. A column named "split" says which split a row is of; without
one, a single file is one split named "all". With `data.multi_label` a row has several
labels, or none: a list, or names with "|", ";" or "," between them.
"""

import collections
import csv
import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vit_jax.data import splits
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import SOURCES, SourceType
from vit_jax.data.sources.folder import WHOLE, FolderSource, in_order
from vit_jax.errors import NoLabels, UserError

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
SPLIT = "split"  # Column that says which split a row is of.
_BETWEEN = re.compile(r"[|;,]")  # Between the labels of a row.


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of a table.

    Attributes:
      path: of its file.
      columns: their names.
      rows: column to value, in the order of the file.
    """

    path: pathlib.Path
    columns: tuple[str, ...]
    rows: list[dict]

    def check_column(self, key: str, column: str, error: type = UserError) -> None:
        """Raises an error if a column is missing.

        Args:
          key: of `config.data` that names it.
          column: its name.
          error: to raise.
        """
        if column not in self.columns:
            raise error(
                f"data.{key}={column!r}: {self.path} has no such column; it has "
                f"{', '.join(self.columns) or 'none'}"
            )


def open_table(data: DataConfig, split: str) -> FolderSource:
    """Lists the images of a split of a table.

    Records stand in an order hashed from their paths, as those of folders do.

    Args:
      data: `config.data`; the classes are those of the first split of `data.split`.
      split: split expression.

    Raises:
      NoSplit: there is none of that name.
      NoLabels: no column of labels.
      UserError: the table cannot be read, lacks a column, or names a file that is missing.
    """
    tables = read_splits(data.data_dir)
    rows = collections.defaultdict(list)
    first = splits.names(data.split)[0]
    used = {WHOLE, first, *splits.names(split)}
    for name, table in tables.items():
        if name in used:  # Others may lack labels.
            table.check_column("image_key", data.image_key)
            if data.num_classes:
                table.check_column("label_key", data.label_key, NoLabels)
        for number, row in enumerate(table.rows, 1):
            # Of a file that is a split, the column says nothing more.
            of = str(row[SPLIT]) if name == WHOLE and SPLIT in row else name
            rows[of].append((table, number, row))
    sizes = {name: len(found) for name, found in rows.items()}
    classes = ()
    if data.num_classes:
        splits.select(first, sizes, data.data_dir)  # It may be missing.
        classes = class_names(data, (row for _, _, row in rows[first]))
    root = _root(data.data_dir)
    files = {
        name: in_order([_file(data, root, classes, *row) for row in rows[name]])
        for name in splits.names(split)
        if name in rows
    }
    chosen = [
        files[name][i]
        for name, numbers in splits.select(split, sizes, data.data_dir)
        for i in numbers
    ]
    return FolderSource(
        root=str(root),
        paths=[path for path, _, _ in chosen],
        labels_of_paths=[label for _, label, _ in chosen] if classes else None,
        class_names=tuple(classes),
        sizes=np.array([size for _, _, size in chosen], np.int64),
    )


def class_names(data: DataConfig, rows: Iterable[Mapping]) -> list[str]:
    """Returns the classes that rows name: as numbers if all are, else by the alphabet."""
    found = {name for row in rows for name in _labels(data, row[data.label_key])}
    if not found:
        raise NoLabels(f"data.label_key={data.label_key!r}: this column is empty")
    return sorted(found, key=_number if all(map(_is_number, found)) else None)


def read_splits(place: str) -> dict[str, Table]:
    """Returns the tables of a file or folder by split; of a file, as `WHOLE`.

    Raises:
      UserError: there is none, or one cannot be read.
    """
    path = pathlib.Path(place).expanduser()
    if path.is_file():
        return {WHOLE: read(str(path), path.stat().st_mtime_ns)}
    there = sorted(path.iterdir()) if path.is_dir() else []
    found = {each.stem: each for each in there if each.suffix.lower() in EXTENSIONS}
    if not found:
        raise UserError(
            f"data.data_dir={place!r} is no table, nor a folder of tables "
            f"({', '.join(EXTENSIONS)}): data.name='table' reads paths and labels from one"
        )
    return {
        name: read(str(each), each.stat().st_mtime_ns) for name, each in found.items()
    }


@functools.lru_cache(maxsize=8)  # A run opens the same file for each of its splits.
def read(path: str, changed: int) -> Table:
    """Reads a table.

    Args:
      path: of its file; the ending tells its format.
      changed: when it was written last.

    Raises:
      UserError: it cannot be read.
    """
    file = pathlib.Path(path)
    try:
        match file.suffix.lower():
            case ".parquet":
                import pyarrow.parquet as pq

                rows = pq.read_table(path).to_pylist()
            case ".jsonl" | ".ndjson":
                lines = file.read_text("utf-8-sig").splitlines()
                rows = [json.loads(line) for line in lines if line.strip()]
            case _:
                tabs = file.suffix.lower() == ".tsv"
                with file.open(encoding="utf-8-sig", newline="") as text:
                    reader = csv.DictReader(text, delimiter="\t" if tabs else ",")
                    rows = list(reader)
        columns = tuple(dict.fromkeys(str(key) for row in rows for key in row))
    except (OSError, ValueError, csv.Error, TypeError) as error:
        reason = (str(error).splitlines() or ["damaged"])[0]
        raise UserError(
            f"the table {path} cannot be read ({reason}): write it anew as CSV, TSV, "
            "JSON Lines or Parquet, with the names of its columns"
        ) from error
    if not rows:
        raise UserError(f"the table {path} has no rows: give one with a row an image")
    return Table(file, columns, rows)


def _file(
    data: DataConfig,
    root: pathlib.Path,
    classes: Sequence[str],
    table: Table,
    number: int,
    row: Mapping,
) -> tuple[str, int | list[int] | None, int]:
    """Returns (path relative to root, label, bytes) of a row."""
    where = f"{table.path} row {number}"
    stated = row.get(data.image_key)
    path = os.path.join(table.path.parent, str(stated))
    try:
        size = os.stat(path).st_size if stated else -1
    except OSError:
        size = -1
    if size < 0 or not os.path.isfile(path):
        raise UserError(
            f"{where} names the image {stated!r}, and there is no file {path}: paths are "
            "relative to the table's folder; mend or remove that row"
        )
    path = os.path.relpath(path, root)
    if not classes:
        return path, None, size
    names = _labels(data, row.get(data.label_key))
    for name in names:
        if name not in classes:
            raise UserError(
                f"{where} has class {name!r}, which the training split {data.split!r} "
                f"lacks: its classes are {', '.join(classes)}"
            )
    if data.multi_label:
        return path, [classes.index(name) for name in names], size
    if not names:
        raise UserError(
            f"{where} has no label in column {data.label_key!r}: add it or remove the row"
        )
    return path, classes.index(names[0]), size


def _labels(data: DataConfig, value: object) -> list[str]:
    """Returns the names of the classes in a cell."""
    if value is None:
        return []
    if not data.multi_label:
        return [_text(value)] if _text(value) else []
    if isinstance(value, str):
        value = _BETWEEN.split(value)
    values = value if isinstance(value, list | tuple) else [value]
    return list(dict.fromkeys(filter(None, map(_text, values))))


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def _is_number(name: str) -> bool:
    return bool(re.fullmatch(r"-?\d+", name))


def _number(name: str) -> int:
    return int(name)


def _root(place: str) -> pathlib.Path:
    path = pathlib.Path(place).expanduser().resolve()
    return path.parent if path.is_file() else path


SOURCES["table"] = SourceType(
    open=open_table,
    pattern="table",
    help="Image files by a CSV, TSV, JSON Lines or Parquet file, `data.data_dir`.",
    numbered=False,
)

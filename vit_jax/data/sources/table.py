"""Image files and labels listed in a table: CSV, TSV, JSON, JSON Lines or Parquet.

`data.data_dir` is the file, or a folder with one file per split: train.csv, val.csv.
The column `data.image_key` has paths, relative to the table's folder or to
`data.image_dir`, and `data.label_key` the names or numbers of classes. A column "split"
has the split of each row, and rows without a split are left out; without that column, a
single file is one split named "all". With `data.multi_label` a row has any number of
labels: a list, also as JSON or Python text, or names separated by
`data.label_separator`, by default "|", ";" or ",". If `data.label_key` lists several
columns, separated by ",", each column is a class, with values 1 (the image has the
class), 0, -1 (uncertain, as in CheXpert) or empty. The column `data.mask_key` has the
paths of masks, relative to the table's folder. The columns `data.target_key` have
numbers. A cell is missing if it is None, NaN or blank.
"""

import collections
import csv
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence

from vit_jax.config import fields
from vit_jax.data import groups, splits, tags
from vit_jax.data.config import DataConfig
from vit_jax.data.fields.target import TargetValues, numbers_in
from vit_jax.data.masks import MaskFiles
from vit_jax.data.sources.base import (
    SourceType,
    SplitRequest,
    check_known,
    composed,
    warn,
    warn_of_twins,
)
from vit_jax.data.sources.folder import EXTENSIONS as IMAGES
from vit_jax.data.sources.folder import (
    WHOLE,
    FolderSource,
    in_order,
    visible_folders,
)
from vit_jax.errors import NoLabels, UserError

_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_USUAL = (*splits.TRAIN, *splits.VALIDATION, *splits.TEST)
SPLIT = "split"  # Column with the split of each row.
_DELIMITERS = ",;\t"  # In CSV files; spreadsheets also write the last two.
_PATH, _CLASSES = 300, 20  # Most characters of a path, and most classes, in messages.


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of the table in the file `path`, as dicts from column to value."""

    path: pathlib.Path
    columns: tuple[str, ...]
    rows: list[dict]


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row of a table; `number` counts from 1."""

    table: Table
    number: int
    cells: Mapping

    def __str__(self) -> str:
        return f"{self.table.path} row {self.number}"


def open_table(data: DataConfig, split: str) -> FolderSource:
    """Lists the images of a table's split, each once, ordered by hashes of their paths.

    Raises:
      NoSplit: no row has that split.
      NoLabels: the column of labels is missing or empty.
      UserError: the table cannot be read, lacks a column, names a missing file, has two
        labels or masks for a file, or lists a training file for validation.
    """
    tables = read_splits(data.data_dir)
    rows = _rows_of_splits(tables)
    first = splits.names(data.split)[0]
    used = {WHOLE, first, *splits.names(split)}
    for name, table in tables.items():
        if name in used:  # Other splits may lack labels.
            keys = {"image_key": [data.image_key]}
            if data.has_labels:
                keys["label_key"] = label_columns(data.label_key, table.columns)
            if data.mask_key:
                keys["mask_key"] = [data.mask_key]
            if data.target_key:
                keys["target_key"] = data.targets
            if data.group_key and not _by_rule(data, table.columns):
                keys["group_key"] = [data.group_key]
            for key, columns in keys.items():
                check_known(key, columns, table.columns, table.path)
            _check_lines(table, [SPLIT, *itertools.chain(*keys.values())])
    if without := rows.pop("", []):
        warn(
            f"{data.data_dir}: {len(without):,} rows are empty in column {SPLIT!r}, "
            f"such as row {without[0].number}: they are left out"
        )
    warn_of_twins("splits", rows)
    paths = _Paths.of(data, tables)
    _check_apart(paths, rows)
    classes = {}
    if data.has_labels:
        splits.select(first, dict.fromkeys(rows, 1), data.data_dir)  # Raises NoSplit.
        names = _class_names(data, rows[first])
        warn_of_twins("classes", names)
        classes = {name: number for number, name in enumerate(names)}
    files = {
        name: in_order(_files(data, paths, classes, rows[name]))
        for name in splits.names(split)
        if name in rows
    }
    sizes = {name: len(files.get(name, rows[name])) for name in rows}
    beside, read_rows = (), [row for name in files for row in rows[name]]
    group_of, parts_of = None, None
    if data.group_key:
        group_of = {}
        for name in files:
            group_of |= _groups(data, paths, rows[name])
        parts_of = groups.of_splits(files, group_of, data.group_key)
    chosen = splits.select(split, sizes, data.data_dir, parts_of)
    if data.mask_key:
        beside = (MaskFiles(_masks(data, paths, tables, read_rows)),)
    if data.target_key:
        beside += (TargetValues(_targets(data, paths, read_rows)),)
    return FolderSource.of_splits(
        paths.root, files, list(classes), chosen, beside, group_of
    )


def _by_rule(data: DataConfig, columns: Collection[str]) -> bool:
    """Returns whether `data.group_key` is a rule on file names, not a column."""
    return data.group_key not in columns and groups.rule(data.group_key) is not None


def _groups(data: DataConfig, paths: "_Paths", rows: Sequence[_Row]) -> dict[str, str]:
    """Returns the group of each file of a split, by its name.

    Raises:
      UserError: two rows of a file have different groups, or no row has a group.
    """
    names = [paths.name(row.cells) for row in rows]
    if _by_rule(data, rows[0].table.columns):
        found = groups.of_paths(data.group_key, names, data.data_dir)
    else:
        cells = [text_of(row.cells.get(data.group_key)) for row in rows]
        found = groups.named(data.group_key, cells, names, data.data_dir)
    group_of = {}
    for name, group, row in zip(names, found, rows, strict=True):
        if group_of.setdefault(name, group) != group:
            raise UserError(
                f"{row} gives {name} the group {group!r}, and an earlier row "
                f"{group_of[name]!r}: keep one row for each image"
            )
    return group_of


def _check_lines(table: Table, columns: Sequence[str]) -> None:
    """Raises UserError for a cell of several lines: a quote is probably unbalanced."""
    for number, cells in enumerate(table.rows, 1):
        for column in columns:
            value = cells.get(column)
            if isinstance(value, str) and len(value.splitlines()) > 1:
                raise UserError(
                    f"{_Row(table, number, cells)} has {fields.shown(value)} in column "
                    f'{column!r}, with a line break: a quote (") opens that cell and ends in '
                    "another row; remove or double it"
                )


def label_columns(label_key: str, columns: Collection[str]) -> list[str]:
    """Returns the columns in `data.label_key`: one, or one per class."""
    if label_key in columns:
        return [label_key]
    return [column.strip() for column in label_key.split(",")]


def _class_names(data: DataConfig, rows: Sequence[_Row]) -> list[str]:
    """Returns the classes of rows.

    Columns of classes keep their order. Names are sorted, as numbers if all are
    numbers.
    """
    if len(columns := label_columns(data.label_key, rows[0].cells)) > 1:
        return columns
    names = {name for row in rows for name in _labels(data, row)}
    if not names:
        raise NoLabels(f"data.label_key={data.label_key!r}: this column is empty")
    numbers = all(re.fullmatch(r"-?\d+", name) for name in names)
    # "1" and "01" are equal as numbers, and a set has no order.
    return sorted(sorted(names), key=int if numbers else None)


def text_of(cell: object) -> str:
    """Returns a cell as composed text (NFC) without outer spaces.

    The result is "" if the cell is missing: None, NaN or blank.
    """
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return composed(str(cell).strip())


def flag(value: object) -> int | None:
    """Returns the value of a cell in a column of a class: 0 (also if empty), 1 or -1.

    The result is None for any other value.
    """
    try:
        number = float(text_of(value) or 0)
    except ValueError:
        return None
    return int(number) if number in (0, 1, -1) else None


def read_splits(place: str) -> dict[str, Table]:
    """Returns the tables of a folder by split, or the table of a file under `WHOLE`.

    Raises:
      UserError: no table exists, or one cannot be read.
    """
    path = pathlib.Path(place).expanduser()
    if path.is_file():
        return {WHOLE: read(str(path), path.stat().st_mtime_ns)}
    paths = tables_in(path) if path.is_dir() else {}
    if not paths:
        raise UserError(
            f"data.data_dir={place!r} is neither a table nor a folder of tables "
            f"({', '.join(_EXTENSIONS)}, or train.json): data.name='table' reads paths "
            "and labels from a table"
        )
    return {
        name: read(str(each), each.stat().st_mtime_ns) for name, each in paths.items()
    }


def tables_in(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the tables of a folder by name without file extension.

    JSON files are tables only if they have the name of a split.
    """
    files = [each for each in sorted(folder.iterdir()) if each.is_file()]
    ending = lambda file: file.suffix.lower()
    named = [each for each in files if splits.first_of(_USUAL, [each.stem])]
    of_json = {each.stem: each for each in named if ending(each) == ".json"}
    return of_json | {each.stem: each for each in files if ending(each) in _EXTENSIONS}


def is_table(path: pathlib.Path) -> bool:
    """Returns whether a file has the extension of a table."""
    return path.suffix.lower() in (*_EXTENSIONS, ".json")


def split_names(place: str) -> list[str]:
    """Returns the splits of a file or folder in order; [WHOLE] without splits."""
    return list(split_sizes(place))


def split_sizes(place: str) -> dict[str, int]:
    """Returns the number of rows of each split of a file or folder."""
    rows = _rows_of_splits(read_splits(place))
    return {name: len(each) for name, each in rows.items() if name}


def _rows_of_splits(tables: Mapping[str, Table]) -> dict[str, list[_Row]]:
    """Returns the rows of each split, and under "" the rows without a split.

    If each file is a split, or the column "split" is empty, the column is not used.
    """
    rows = collections.defaultdict(list)
    for name, table in tables.items():
        by_column = name == WHOLE and any(text_of(row.get(SPLIT)) for row in table.rows)
        for number, cells in enumerate(table.rows, 1):
            split = text_of(cells.get(SPLIT)) if by_column else name
            rows[split].append(_Row(table, number, cells))
    return dict(rows)


@functools.lru_cache(maxsize=8)  # A run opens the same file for each of its splits.
def read(path: str, changed: int) -> Table:
    """Reads a table; raises UserError if it is damaged.

    `changed`, the time of modification, keeps the cache from returning an old table.
    """
    file = pathlib.Path(path)
    try:
        rows = _rows(file)
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a row is not an object with names of columns")
        columns = tuple(dict.fromkeys(str(key) for row in rows for key in row))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = (str(error).splitlines() or ["damaged"])[0]
        raise UserError(
            f"the table {path} cannot be read ({reason}): write it again as CSV, TSV, "
            "JSON Lines or Parquet, in UTF-8 and with the names of its columns"
        ) from error
    if not rows:
        raise UserError(f"the table {path} has no rows: give one with a row per image")
    return Table(file, columns, rows)


def _rows(file: pathlib.Path) -> list:
    """Returns the rows of a file, by its ending."""
    match file.suffix.lower():
        case ".parquet":
            import pyarrow.parquet as pq

            return pq.read_table(file).to_pylist()
        case ".json" | ".jsonl" | ".ndjson":
            text = file.read_text("utf-8-sig")
            try:
                return _rows_of_json(json.loads(text))
            except json.JSONDecodeError as error:
                if error.msg != "Extra data":  # Raised for a second line.
                    raise
            return [json.loads(line) for line in text.splitlines() if line.strip()]
    with file.open(encoding="utf-8-sig", newline="") as text:
        head = text.readline()
        text.seek(0)
        tabs = file.suffix.lower() == ".tsv"
        delimiter = "\t" if tabs else max(_DELIMITERS, key=head.count)
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise ValueError(
                f'a quote (") up to line {reader.line_num} is unbalanced, {error}'
            ) from error
    for number, row in enumerate(rows, 1):
        if any(row.pop(None, ())):
            raise ValueError(f"row {number} has more cells than the header")
    return rows


def _rows_of_json(value: object) -> list:
    """Returns the rows of a list of records, of one record, or of columns.

    Columns are lists, or objects with one value per row, as pandas writes them.
    """
    if not isinstance(value, dict):
        return value if isinstance(value, list) else [value]
    columns = [list(c.values()) if isinstance(c, dict) else c for c in value.values()]
    if not all(isinstance(column, list) for column in columns):
        return [value]
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Paths:
    """Paths and names of the images of a table.

    Paths are relative to `folder`. Names are relative to `root`: this is `folder`, or
    with absolute paths the common folder of all images. So names, and the order that
    depends on them, do not change when the images are moved.
    """

    folder: str
    root: str
    key: str
    suffix: str

    @classmethod
    def of(cls, data: DataConfig, tables: Mapping[str, Table]) -> "_Paths":
        place = os.path.abspath(os.path.expanduser(data.data_dir))
        folder = os.path.dirname(place) if os.path.isfile(place) else place
        folder = os.path.join(folder, os.path.expanduser(data.image_dir))
        folder = os.path.normpath(folder)
        paths = cls(folder, folder, data.image_key, data.image_suffix)
        rows = (row for table in tables.values() for row in table.rows)
        written = [str(row[paths.key]) for row in rows if text_of(row.get(paths.key))]
        if not any(map(os.path.isabs, written)):
            return paths
        above = {os.path.dirname(os.path.join(folder, path)) for path in written}
        root = os.path.commonpath(list(map(os.path.normpath, above)))
        return dataclasses.replace(paths, root=root)

    def path(self, cells: Mapping) -> str:
        """Returns the path of a row's image."""
        return os.path.join(self.folder, self._written(cells))

    def name(self, cells: Mapping) -> str:
        """Returns the path of a row's image relative to `root`."""
        if self.root != self.folder:
            # Without `relpath` for paths below the root: 34 instead of 48 us per row.
            path, above = os.path.normpath(self.path(cells)), f"{self.root}{os.sep}"
            name = path.removeprefix(above)
            if name == path:
                name = os.path.relpath(path, self.root)
        else:  # As written, because the table may have ../photos/a.jpg.
            name = os.path.normpath(self._written(cells))
        return pathlib.PurePath(name).as_posix()

    def _written(self, cells: Mapping) -> str:
        written = f"{cells.get(self.key)}{self.suffix}"
        if "\\" in written and not os.path.lexists(os.path.join(self.folder, written)):
            return written.replace("\\", "/")  # Written on Windows.
        return written


def _check_apart(paths: _Paths, rows: Mapping[str, list[_Row]]) -> None:
    """Refuses training files that are for validation too; warns if for testing."""
    train, validation, test = (
        {
            paths.name(row.cells): row
            for row in rows.get(splits.first_of(usual, rows), ())
            if text_of(row.cells.get(paths.key))
        }
        for usual in (splits.TRAIN, splits.VALIDATION, splits.TEST)
    )
    for name in sorted(train.keys() & validation.keys()):
        raise UserError(
            f"{train[name]} lists {name} to train on, and {validation[name]} lists it to "
            "validate on: remove one of the two rows"
        )
    if both := train.keys() & test.keys():
        warn(
            f"{len(both):,} files to train on are also listed to test on, such as "
            f"{min(both)} in {test[min(both)]}"
        )


def _files(
    data: DataConfig, paths: _Paths, classes: Mapping[str, int], rows: Sequence[_Row]
) -> list[tuple]:
    """Returns (path relative to root, label, bytes) of the files of rows, each once."""
    files, first = {}, {}
    for row in rows:
        name, label, size = _file(data, paths, classes, row)
        if name in files and files[name][1] != label:
            column = data.label_key
            raise UserError(
                f"{row} gives {name} the label {fields.shown(row.cells.get(column))}, and "
                f"{first[name]} another, {fields.shown(first[name].cells.get(column))}: keep "
                "one row for each image; write several labels in one row, as a|b with "
                "data.multi_label=True"
            )
        files[name] = name, label, size
        first.setdefault(name, row)
    if twice := len(rows) - len(files):
        warn(
            f"{data.data_dir}: {twice:,} rows list a file again; each file counts once"
        )
    return list(files.values())


def _file(
    data: DataConfig, paths: _Paths, classes: Mapping[str, int], row: _Row
) -> tuple[str, int | list[int] | None, int]:
    """Returns (path relative to root, label, bytes) of a row."""
    written, path = row.cells.get(paths.key), paths.path(row.cells)
    if not text_of(written):
        raise UserError(_empty(row, "path", data.image_key))
    size = _size(path)
    if size is None:
        raise UserError(_missing(data, row, written, path))
    name = paths.name(row.cells)
    if not classes:
        return name, None, size
    names = _labels(data, row)
    for each in names:
        if each not in classes:
            known = list(classes)
            more = ", ..." * (len(known) > _CLASSES)
            raise UserError(
                f"{row} has class {fields.shown(each)}, which the training split "
                f"{data.split!r} lacks: its classes are "
                f"{', '.join(known[:_CLASSES])}{more}"
            )
    if data.multi_label:
        return name, [classes[each] for each in names], size
    if not names:
        raise UserError(_empty(row, "label", data.label_key))
    if len(names) > 1:
        raise UserError(
            f"{row} has the labels {', '.join(names)}: set --config.data.multi_label=True "
            "for several labels per image"
        )
    return name, classes[names[0]], size


def _masks(
    data: DataConfig,
    paths: _Paths,
    tables: Mapping[str, Table],
    rows: Sequence[_Row],
) -> dict[str, tuple[str, int]]:
    """Returns, by image name, path relative to root and bytes of the image's mask."""
    of_masks = {"image_key": data.mask_key, "image_dir": "", "image_suffix": ""}
    mask_paths = _Paths.of(dataclasses.replace(data, **of_masks), tables)
    masks, first = {}, {}
    for row in rows:
        written = row.cells.get(data.mask_key)
        path, name = mask_paths.path(row.cells), paths.name(row.cells)
        if not text_of(written):
            raise UserError(_empty(row, "mask", data.mask_key))
        size = _size(path)
        if size is None:
            raise UserError(
                f"{row} has {fields.shown(written)} in column {data.mask_key!r}, which is "
                "not a file: paths of masks are relative to the table's folder; mend "
                "or remove that row"
            )
        mask = pathlib.PurePath(os.path.relpath(path, paths.root)).as_posix(), size
        if masks.setdefault(name, mask) != mask:
            raise UserError(
                f"{row} gives {name} the mask {fields.shown(written)}, and {first[name]} "
                "another: keep one row for each image"
            )
        first.setdefault(name, row)
    return masks


def _targets(
    data: DataConfig, paths: _Paths, rows: Sequence[_Row]
) -> dict[str, tuple[float, ...]]:
    """Returns the numbers of each image, by the name of the image."""
    targets, first = {}, {}
    for row in rows:
        name = paths.name(row.cells)
        try:
            values = numbers_in(row.cells, data.targets)
        except UserError as error:
            raise UserError(f"{row} {error}") from error
        # As text, because NaN differs from itself.
        if repr(targets.setdefault(name, values)) != repr(values):
            raise UserError(
                f"{row} gives {name} the numbers {values}, and {first[name]} others, "
                f"{targets[name]}: keep one row for each image"
            )
        first.setdefault(name, row)
    return targets


def _size(path: str) -> int | None:
    """Returns the bytes of a file; None if it does not exist."""
    try:
        return os.stat(path).st_size if os.path.isfile(path) else None
    except (OSError, ValueError):  # A path may hold a NUL byte.
        return None


def _empty(row: _Row, what: str, column: str) -> str:
    return f"{row} has no {what} in column {column!r}: add it or remove the row"


def _missing(data: DataConfig, row: _Row, written: object, path: str) -> str:
    """Returns the message about a row whose image does not exist."""
    if not isinstance(written, str | int | None):
        return (
            f"{row} has {fields.shown(written)} in column {data.image_key!r}, not a path: "
            "name the column of paths by data.image_key; images inside Parquet files are "
            "read by data.name='parquet'"
        )
    remedy = "mend or remove that row"
    folder = os.path.dirname(row.table.path)
    for inside in (*visible_folders(folder), data.image_dir):
        for suffix in (*IMAGES, ""):
            if os.path.isfile(os.path.join(folder, inside, f"{written}{suffix}")):
                keys = {"image_dir": inside, "image_suffix": suffix}
                flags = [f"--config.data.{k}={v}" for k, v in keys.items() if v]
                remedy = f"set {' '.join(flags)}"
    return (
        f"{row} names the image {fields.shown(written)}, but the file "
        f"{repr(os.path.normpath(path))[1:-1][:_PATH]} does not exist: paths are "
        f"relative to the table's folder, or to data.image_dir; {remedy}"
    )


def _labels(data: DataConfig, row: _Row) -> list[str]:
    """Returns the names of the classes in a row."""
    columns = label_columns(data.label_key, row.cells)
    if len(columns) > 1:
        flags = {column: flag(row.cells.get(column)) for column in columns}
        for column, value in flags.items():
            if value is None:
                raise UserError(
                    f"data.label_key: {fields.shown(row.cells[column])} in column {column!r} "
                    "is not 1, 0, -1 or empty, as in columns of classes"
                )
        if -1 in flags.values():
            warn(
                f"{data.data_dir}: labels of -1 (uncertain) count as 0; write 1 "
                "instead to count them"
            )
        return [column for column, value in flags.items() if value == 1]
    value = row.cells.get(data.label_key)
    if isinstance(value, bytes | Mapping):
        raise UserError(
            f"data.label_key={data.label_key!r}: {fields.shown(value)} in this column is not "
            "the name or number of a class: name another column"
        )
    if isinstance(value, list) and not all(map(text_of, value)):
        raise UserError(
            f"{row} has {fields.shown(value)} in column {data.label_key!r}, with an "
            "item that is missing: remove that item"
        )
    values = [value]
    if data.multi_label or isinstance(value, list):
        values = tags.labels_in(value, data.label_separator)
    return list(dict.fromkeys(filter(None, map(text_of, values))))


def _eval_splits(
    data: DataConfig, request: SplitRequest
) -> tuple[Sequence[str], DataConfig]:
    wanted, names = request.splits, split_names(data.data_dir)
    named = request.given or request.trained
    if request.model_classes and names == [WHOLE] and not named:
        wanted = [WHOLE]
    existing = [each for each in wanted if splits.names(each)[0] in names]
    if existing and splits.names(data.split)[0] not in names:
        data = dataclasses.replace(data, split=existing[0])  # Defines the classes.
    return wanted, data


TABLE = SourceType(
    open=open_table,
    eval_splits=_eval_splits,
    help="Image files listed in a CSV, TSV, JSON or Parquet file, `data.data_dir`.",
    has_masks=True,
    numbered=False,
)

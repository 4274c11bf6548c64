"""Image data sets in Parquet files, with the layout of the Hugging Face hub.

Data sets on the hub are named hf://datasets/OWNER/NAME, followed by @REVISION and
/FOLDER if needed. Their files are downloaded once to the cache of huggingface_hub,
which can be read without a network.
"""

import dataclasses
import json
import os
import pathlib
import re
import threading
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.command_line.files import download_snapshot
from vit_jax.data import captions, groups, splits, tags
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.fingerprint import Entries
from vit_jax.data.sources.arrays import ArraySource, small_in_memory
from vit_jax.data.sources.base import Numbered, SourceType, check_known, composed
from vit_jax.errors import NoLabels, UserError

_PREFIX = "hf://datasets/"
_NAME = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/@]+))?(/(?P<folder>.+?))?/?"
)
# The hub names the files of a split data/train-00000-of-00005.parquet, followed by a
# hash in older sets; train/0000.parquet in converted ones; or train.parquet.
_SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]{8,})?")
_OPEN_FILES = 64


class _Local(threading.local):
    """Open files and the last row group, per thread: readers are not thread-safe."""

    def __init__(self):
        self.files, self.group, self.columns = {}, None, {}


_local = _Local()


@dataclasses.dataclass(frozen=True)
class ParquetSource(Numbered):
    """Rows of Parquet files; images stay encoded.

    A row group is the smallest part that can be read. Reading a record therefore reads
    its whole group, unless the same thread has just read another record of the group.

    Attributes:
      root: folder of the files.
      files: paths of the files of all splits in use, in order.
      groups: first row of each row group, counted over all files, and the end of the
        last.
      pieces: file of each group, and the group's number in it.
      starts: split -> its first row, counted over all files.
      image_key: column of the images.
      label_key, caption_key, mask_key: columns; None or "" if they are not read.
      numbers: number of each class, if labels are stored as names.
      separator: `data.label_separator`.
      several: whether an image has any number of labels.
      target_names: columns of the targets; () if targets are not read.
    """

    name: str
    root: str
    files: tuple[str, ...]
    groups: Integer[np.ndarray, " G1"]
    pieces: Sequence[tuple[str, int]]
    starts: Mapping[str, int]
    image_key: str
    label_key: str | None
    caption_key: str
    mask_key: str
    class_names: tuple[str, ...]
    numbering: splits.Numbering
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    separator: str = ""
    several: bool = False
    target_names: tuple[str, ...] = ()
    images = labels = None  # Not in memory.

    def __getitem__(self, i: int) -> dict:
        split, _, number = self.record_id(i).rpartition("/")
        row = self.starts[split] + int(number)
        group = int(np.searchsorted(self.groups, row, side="right")) - 1
        columns = self._group(group)
        at = row - int(self.groups[group])
        values = {name: column[at].as_py() for name, column in columns.items()}
        record = {"image": _bytes(values[self.image_key])}
        if self.caption_key:
            record[captions.TEXT] = captions.of_value(values[self.caption_key])
        if self.mask_key:
            record["mask"] = _mask(values[self.mask_key])
        if self.target_names:
            record["targets"] = [values[name] for name in self.target_names]
        if self.label_key is not None:
            record["label"] = values[self.label_key]
            if self.several:
                record["label"] = self._numbers_of(record["label"])
            elif record["label"] is None:
                raise DamagedImage(f"has no label in column {self.label_key!r}")
        return record

    def _numbers_of(self, cell: object) -> list[int]:
        """Returns the numbers of the classes in a cell."""
        labels = _labels(cell, self.separator)
        if not self.numbers:
            return labels
        if unknown := [each for each in labels if each not in self.numbers]:
            raise DamagedImage(
                f"has the label {unknown[0]!r}, which the training split lacks"
            )
        return [self.numbers[each] for each in labels]

    def entries(self) -> Entries:
        names = [os.path.relpath(path, self.root) for path in self.files]
        sizes = np.array([_metadata_sum(path) for path in self.files], np.int64)
        labels, more = None, {}
        if self.label_key is not None:
            sums = [_label_sum(path, self.label_key) for path in self.files]
            labels = np.array(sums, np.int64)
        if self.caption_key:
            sums = (_caption_sum(path, self.caption_key) for path in self.files)
            more["captions"] = list(zip(names, sums, strict=True))
        if self.target_names:
            more["targets"] = [
                [_label_sum(path, name) for name in self.target_names]
                for path in self.files
            ]
        return Entries("shards", names, labels, sizes, more)

    def _group(self, group: int) -> dict:
        """Returns the columns of a row group, by name."""
        path, at = self.pieces[group]
        keys = self.image_key, self.label_key, self.caption_key, self.mask_key
        # A column may be read as label and as target.
        columns = list(dict.fromkeys(filter(None, (*keys, *self.target_names))))
        if _local.group != (path, at, columns):
            try:
                table = _open(path).read_row_group(at, columns=columns)
            except Exception as error:  # Arrow's errors and OSError.
                _local.files.pop(path, None)
                raise DamagedImage(
                    f"cannot be read (row group {at} of {path}: "
                    f"{str(error).splitlines()[0]})"
                ) from error
            _local.columns = {name: table.column(name) for name in columns}
            _local.group = (path, at, columns)
        return _local.columns


def open_parquet(data: DataConfig, split: str) -> ParquetSource | ArraySource:
    """Opens a split of Parquet files, or decodes it into memory if it is small."""
    name = data.name
    root = download(name) if is_hub(name) else os.path.expanduser(data.data_dir)
    files = files_of_splits(root, name) if os.path.isdir(root) else {}
    if not files:
        raise UserError(
            f"data.data_dir={data.data_dir!r} is not a folder: data.name='parquet' reads "
            "data_dir/**/train-00000-of-00005.parquet"
        )
    if data.group_key:
        check_known("group_key", [data.group_key], column_names(_first(files)), name)
    # The names of records need the sizes of all splits, also of those not in use.
    lengths = {
        key: {path: _group_lengths(path, name) for path in files[key]} for key in files
    }
    sizes = {key: sum(map(sum, each.values())) for key, each in lengths.items()}
    parts_of = _grouping(data, files, split) if data.group_key else None
    numbering = splits.Numbering.of(split, sizes, name, parts_of)

    used = [key for key in files if key in splits.names(split)]
    by_file = {path: groups for key in used for path, groups in lengths[key].items()}
    paths = tuple(by_file)
    columns = column_names(paths[0])
    check_known("image_key", [data.image_key], columns, name)
    for key in ("caption_key", "mask_key"):
        if getattr(data, key):
            check_known(key, [getattr(data, key)], columns, name)
    check_known("target_key", data.targets, columns, name)
    label_key = data.label_key if data.has_labels else None
    class_names, numbers = (), {}
    if label_key is not None and data.multi_label:
        class_names, numbers = _tags(files, data)
    elif label_key is not None:
        class_names = _class_names(paths, name, label_key)
    first_rows = np.cumsum([0, *(sizes[key] for key in used)])
    source = ParquetSource(
        name=f"{name} {split}",
        root=root,
        files=paths,
        groups=np.cumsum([0, *(n for groups in by_file.values() for n in groups)]),
        pieces=[(path, i) for path, each in by_file.items() for i in range(len(each))],
        starts=dict(zip(used, first_rows.tolist(), strict=False)),
        image_key=data.image_key,
        label_key=label_key,
        caption_key=data.caption_key,
        mask_key=data.mask_key,
        class_names=class_names,
        numbering=numbering,
        numbers=numbers,
        separator=data.label_separator,
        several=data.multi_label,
        target_names=data.targets,
    )
    return small_in_memory(source, data)


def _first(files: Mapping[str, Sequence[str]]) -> str:
    """Returns the first file of any split."""
    return next(iter(files.values()))[0]


def _grouping(
    data: DataConfig, files: Mapping[str, Sequence[str]], split: str
) -> groups.PartsOf:
    """Returns the function with which `splits.select` keeps groups together."""
    records = {}
    for name in splits.names(split):
        columns = [data.group_key] + [data.label_key] * data.has_labels
        cells, *labels = (
            [value for path in files.get(name, ()) for value in _values(path, key)]
            for key in columns
        )
        numbers = [f"{name}/{i}" for i in range(len(cells))]
        texts = ["" if cell is None else str(cell).strip() for cell in cells]
        found = groups.named(data.group_key, texts, numbers, data.name) if cells else []
        # A record without a label is a damaged one, and its class does not matter.
        labels = labels[0] if labels else None
        if labels and data.multi_label:
            labels = [_labels(each, data.label_separator) for each in labels]
        elif labels:
            labels = [-1 if each is None else each for each in labels]
        records[name] = found, labels
    return groups.parts_of(records, f"data.group_key={data.group_key!r}")


def _labels(cell: object, separator: str) -> list:
    """Returns the labels in a cell: numbers, or names without outer spaces."""
    found = [] if cell is None else tags.labels_in(cell, separator)
    names = (composed(x.strip()) if isinstance(x, str) else x for x in found)
    return list(dict.fromkeys(x for x in names if x not in ("", None)))


def _tags(
    files: Mapping[str, Sequence[str]], data: DataConfig
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Returns the names of several labels, and their numbers if names are stored."""
    train = splits.names(data.split)[0]
    paths = files.get(train) or next(iter(files.values()))
    schema = _parquet().read_schema(paths[0])
    check_known("label_key", [data.label_key], schema.names, data.name)
    cells = (cell for path in paths for cell in _values(path, data.label_key))
    names = {x for cell in cells for x in _labels(cell, data.label_separator)}
    if not names:
        raise NoLabels(f"data.label_key={data.label_key!r}: this column is empty")
    if all(isinstance(each, int) for each in names):
        return _stored_names(schema, data.label_key), {}
    ordered = sorted(map(str, names))
    return tuple(ordered), {each: number for number, each in enumerate(ordered)}


def label_cells(paths: Sequence[str], column: str) -> list:
    """Returns the cells of a column that may hold several labels; [] for numbers."""
    import pyarrow as pa

    if pa.types.is_integer(_parquet().read_schema(paths[0]).field(column).type):
        return []
    return [cell for path in paths for cell in _values(path, column)]


def _values(path: str, column: str) -> list:
    return _column(path, column).to_pylist()


def _parquet():
    """Returns pyarrow.parquet, imported when the first file is read."""
    import pyarrow.parquet

    return pyarrow.parquet


def is_hub(name: str) -> bool:
    """Returns whether data.name is a data set of the hub."""
    return name.startswith(_PREFIX)


def download(name: str) -> str:
    """Downloads a data set's Parquet files unless they are cached; returns their folder.

    Raises:
      UserError: the name is malformed, the set does not exist, or neither the network
        nor the cache has it.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise UserError(
            f"data.name={name!r}: write hf://datasets/OWNER/NAME, with @REVISION and "
            "/FOLDER where needed"
        )
    folder = match["folder"] or ""
    root = download_snapshot(
        f"data.name={name!r}",
        match["repo"],
        repo_type="dataset",
        revision=match["revision"],
        allow_patterns=f"{folder}/**.parquet" if folder else "**.parquet",
    )
    return str(pathlib.Path(root, folder))


def files_of_splits(root: str, name: str) -> dict[str, list[str]]:
    """Returns the Parquet files of each split in a folder, in the order of their numbers.

    Raises:
      UserError: the folder has no files, a file of a split is missing, or several
        folders have files of the same split. The message includes `name`.
    """
    paths = sorted(pathlib.Path(root).rglob("*.parquet"))
    if not paths:
        raise UserError(
            f"data.name={name!r}: no *.parquet files below {root!r}: set data.data_dir "
            "to a folder with files such as train-00000-of-00005.parquet"
        )
    by_split: dict[str, list[pathlib.Path]] = {}
    for path in paths:
        by_split.setdefault(_split_of(path), []).append(path)
    return {split: _ordered(split, group, name) for split, group in by_split.items()}


def _open(path: str):
    """Returns this thread's reader of a file."""
    if path not in _local.files:
        while len(_local.files) >= _OPEN_FILES:
            _local.files.pop(next(iter(_local.files))).close()
        _local.files[path] = _parquet().ParquetFile(path, memory_map=True)
    return _local.files[path]


def _label_sum(path: str, label_key: str) -> int:
    """Returns a checksum of a file's labels."""
    import pyarrow as pa

    labels = _column(path, label_key)
    if not pa.types.is_integer(labels.type) and not pa.types.is_null(labels.type):
        return zlib.crc32(json.dumps(labels.to_pylist()).encode())  # Several labels.
    values = labels.to_numpy().astype(np.float64)  # Integers, or NaN.
    return zlib.crc32(values.tobytes())


def _caption_sum(path: str, caption_key: str) -> int:
    """Returns a checksum of a file's captions."""
    checksum = 0
    for chunk in _column(path, caption_key).chunks:
        texts = [captions.of_value(value) for value in chunk.to_pylist()]
        checksum = zlib.crc32(json.dumps(texts).encode(), checksum)
    return checksum


def _column(path: str, name: str):
    # Arrow's threads, which `read_table` uses, would take six times as long.
    with _parquet().ParquetFile(path, memory_map=True) as reader:
        return reader.read(columns=[name], use_threads=False).column(0)


def _metadata_sum(path: str) -> int:
    """Returns a checksum of a file's size and of its metadata on all columns."""
    with open(path, "rb") as file:
        size = file.seek(-8, os.SEEK_END) + 8
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return zlib.crc32(file.read(length), size)


def _group_lengths(path: str, name: str) -> list[int]:
    import pyarrow as pa

    try:
        metadata = _parquet().read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"data.name={name!r}: {path} is not a whole Parquet file "
            f"({str(error).splitlines()[0]}): download or write it again"
        ) from error
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def column_names(path: str) -> list[str]:
    """Returns the names of the columns of a file."""
    return _parquet().read_schema(path).names


def _class_names(paths: Sequence[str], name: str, label_key: str) -> tuple[str, ...]:
    """Checks the labels; returns the class names that the hub stores with them."""
    import pyarrow as pa

    schema = _parquet().read_schema(paths[0])
    check_known("label_key", [label_key], schema.names, name)
    if not pa.types.is_integer(schema.field(label_key).type):
        raise NoLabels(
            f"data.label_key={label_key!r}: this column of {name} holds "
            f"{schema.field(label_key).type}, not class numbers"
        )
    if all(_is_empty(path, label_key) for path in paths):
        raise NoLabels(
            f"data.label_key={label_key!r}: this column of {name} is empty; name "
            f"another of {', '.join(schema.names)}"
        )
    return _stored_names(schema, label_key)


def _stored_names(schema, label_key: str) -> tuple[str, ...]:
    """Returns the class names that the hub stores, also those of lists of classes."""
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = stored.get("info", {}).get("features", {}).get(label_key, {})
    if isinstance(feature, list):
        feature = feature[0]
    feature = feature.get("feature", feature)
    return tuple(map(composed, feature.get("names") or ()))


def _is_empty(path: str, column: str) -> bool:
    """Returns whether a column has no values, according to a file's statistics."""
    metadata = _parquet().read_metadata(path)
    at = metadata.schema.names.index(column)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    known = [(group.num_rows, group.column(at).statistics) for group in groups]
    return all(
        stats and stats.has_null_count and stats.null_count >= rows
        for rows, stats in known
    )


def _bytes(cell: bytes | Mapping | None) -> bytes:
    data = cell.get("bytes") if isinstance(cell, Mapping) else cell
    if not isinstance(data, bytes):
        raise DamagedImage("has no bytes (the file may only name an image elsewhere)")
    return data


def _mask(cell: object) -> bytes | np.ndarray:
    """Returns the encoded file of a mask, or the array if rows of numbers are stored."""
    if not isinstance(cell, list):
        return _bytes(cell)
    try:
        return np.array(cell)
    except ValueError as error:
        raise DamagedImage("has a mask whose rows differ in length") from error


def _split_of(path: pathlib.Path) -> str:
    if match := _SHARD.fullmatch(path.stem):
        return match["split"]
    return path.parent.name if path.stem.isdecimal() else path.stem


def _ordered(split: str, paths: Sequence[pathlib.Path], name: str) -> list[str]:
    folders = sorted({str(path.parent) for path in paths})
    if len(folders) > 1:
        raise UserError(
            f"data.name={name!r} has split {split!r} in several folders "
            f"({', '.join(folders)}): choose one, by "
            "hf://datasets/OWNER/NAME/FOLDER or data.data_dir"
        )
    matches = filter(None, (_SHARD.fullmatch(path.stem) for path in paths))
    counts = {int(match["count"]) for match in matches}
    if counts and counts != {len(paths)}:
        raise UserError(
            f"data.name={name!r}: split {split!r} has {len(paths)} of "
            f"{max(counts)} files in {folders[0]}: download it again"
        )
    return [str(path) for path in paths]


PARQUET = SourceType(
    open=open_parquet, help="Parquet files below `data.data_dir`.", has_masks=True
)
HUB = SourceType(
    open=open_parquet,
    help="Parquet files of a data set on the Hugging Face hub.",
    has_masks=True,
)

"""Converts TFDS's TFRecord files to ArrayRecord, without TensorFlow.

A record consists of its length (8 bytes, little-endian), the masked CRC-32C of these 8
bytes, its content, and the masked CRC-32C of the content
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence

import google_crc32c

from vit_jax.errors import UserError
from vit_jax.tools.preparing import build, metadata
from vit_jax.tools.preparing.shards import Shard, WrittenShard, divide

_HEADER = 12  # Number of bytes of the length and its checksum.
_FOOTER = 4
_MASK = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C as TFRecord stores it: rotated, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def read(path: pathlib.Path, start: int, stop: int, total: int) -> Iterator[bytes]:
    """Yields records `start` to `stop` of a file; earlier ones are skipped unread.

    `total` is the expected number of records: if `stop` is equal to it, the file must
    end there.

    Raises:
      UserError: a checksum is wrong, or the file has fewer or more records.
    """
    remedy = "copy or prepare this file again"
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for number in range(stop):
            at = file.tell()
            where = f"{path} record {number} (byte {at})"
            header = file.read(_HEADER)
            if not header:
                raise UserError(
                    f"{path} has {number} records, not the {total} of "
                    f"dataset_info.json: {remedy}"
                )
            length = int.from_bytes(header[:8], "little")
            if len(header) < _HEADER:
                raise UserError(f"{where} is truncated: {remedy}")
            if masked_crc(header[:8]) != int.from_bytes(header[8:], "little"):
                raise UserError(
                    f"{where} is damaged, the checksum of its length is wrong: {remedy}"
                )
            if at + _HEADER + length + _FOOTER > size:
                raise UserError(f"{where} is truncated: {remedy}")
            if number < start:
                file.seek(length + _FOOTER, os.SEEK_CUR)
                continue
            data = file.read(length)
            if masked_crc(data) != int.from_bytes(file.read(_FOOTER), "little"):
                raise UserError(
                    f"{where} is damaged, the checksum of its content is wrong: "
                    f"{remedy}"
                )
            yield data
        if stop == total and file.tell() != size:
            raise UserError(
                f"{path} has more than the {total} records of dataset_info.json: "
                f"{remedy}"
            )


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Job: the same records in the same order, as ArrayRecord; see `build.Job`.

    Attributes:
      source: folder of the TFRecord preparation.
      files: (path, number of records) of the files in order, by split.
      others: names of the files that hold no records.
    """

    dataset: str
    source: pathlib.Path
    files: Mapping[str, Sequence[tuple[pathlib.Path, int]]]
    others: Sequence[str]
    shards: Sequence[Shard]
    plan: Mapping
    size: int
    unit = "records"

    def records(self, shard: Shard) -> Iterator[bytes]:
        first = 0  # The number, within the split, of the file's first record.
        for path, total in self.files[shard.split]:
            start, stop = max(shard.start - first, 0), min(shard.stop - first, total)
            # A file without records belongs to the shard that starts there.
            if start < stop or (total == 0 and shard.start <= first < shard.stop):
                yield from read(path, start, stop, total)
            first += total

    def describe(
        self, folder: pathlib.Path, splits: Mapping[str, Sequence[WrittenShard]]
    ) -> None:
        for name in self.others:
            shutil.copyfile(self.source / name, folder / name)
        metadata.convert_info(self.source, folder, splits)


def open_conversion(
    source: pathlib.Path, split_names: Sequence[str], shard_bytes: int
) -> Conversion:
    """Returns the job that converts a TFRecord preparation.

    Args:
      source: folder with dataset_info.json, features.json and the TFRecord files.
      split_names: splits to convert; all if empty.
      shard_bytes: approximate size of a shard.

    Raises:
      UserError: the folder is not a TFRecord preparation, or lacks a file or a split.
    """
    info = metadata.read_info(source)
    if info.file_format != "tfrecord":
        hint = {"array_record": ", which needs no conversion"}.get(info.file_format, "")
        raise UserError(
            f"--from={source} is prepared as {info.file_format}{hint}: only tfrecord can "
            "be converted"
        )
    wanted = set(split_names or info.splits)
    if unknown := sorted(wanted - info.splits.keys()):
        raise UserError(
            f"--splits: {source} has no split {unknown[0]!r}; "
            f"it has {', '.join(info.splits)}"
        )
    files = {name: info.splits[name] for name in info.splits if name in wanted}
    stats = [_stat(path) for split in files.values() for path, _ in split]
    shards = []
    for name, split in files.items():
        size = sum(path.stat().st_size for path, _ in split)
        shards += divide(name, sum(n for _, n in split), size, shard_bytes)
    records = {path.name for split in info.splits.values() for path, _ in split}
    # A manifest has checksums of the TFRecord files.
    excluded = records | {"dataset_info.json", metadata.MANIFEST}
    names = {path.name for path in source.iterdir() if path.is_file()}
    others = sorted(names - excluded)
    plan = {
        "kind": "tfrecord",
        "source": str(source),
        "splits": list(files),
        "files": build.digest(stats),
        "shard_bytes": shard_bytes,
    }
    size = sum(size for _, size, _ in stats)
    return Conversion(info.name.dataset, source, files, others, shards, plan, size)


def _stat(path: pathlib.Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; --from needs all files of the preparation"
        ) from error
    return path.name, stat.st_size, stat.st_mtime_ns

"""Shards of a data set: their records, and ArrayRecord files written and checked."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator

import google_crc32c

from vit_jax.errors import UserError

# As in TFDS's files: each record can be read individually.
_WRITE = "group_size:1"
# No threads and no readahead, because a shard is read once, in order.
_READ = "readahead_buffer_size:0,max_parallelism:0"
_READ_AT_ONCE = 2**24  # Approximate number of bytes per read.
PART = ".part"


class DamagedShard(Exception):
    """A shard's file is missing or damaged; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Records `start` to `stop` of a split, written as file `number` of `count`.

    If the job uses another unit, they are, for example, bytes instead of records.
    """

    split: str
    number: int
    count: int
    start: int
    stop: int

    def file_name(self, dataset: str) -> str:
        """Returns the file's name in TFDS."""
        return (
            f"{dataset}-{self.split}.array_record-{self.number:05d}-of-{self.count:05d}"
        )


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Replaces a record that cannot be used.

    Attributes:
      record: path of the record's file, or of the record in it, below the input folder.
      kind: kind of the reason, in a few words, for counting.
      reason: text that follows the path in messages.
    """

    record: str
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class WrittenShard:
    """Counts and checksums of a finished shard.

    Attributes:
      file: file name in the data set's folder.
      records: number of records.
      record_bytes: sum of the records' lengths, before compression.
      records_crc32c: CRC-32C over the length (8 bytes, little-endian) and content of
        every record, in hexadecimal; independent of the file format.
      file_bytes: size of the file.
      sha256: SHA-256 of the file, in hexadecimal.
    """

    file: str
    records: int
    record_bytes: int
    records_crc32c: str
    file_bytes: int
    sha256: str


@dataclasses.dataclass
class _Tally:
    records: int = 0
    record_bytes: int = 0
    crc: int = 0

    def add(self, record: bytes) -> None:
        self.records += 1
        self.record_bytes += len(record)
        for part in (len(record).to_bytes(8, "little"), record):
            self.crc = google_crc32c.extend(self.crc, part)


def divide(split: str, records: int, size: int, shard_bytes: int) -> list[Shard]:
    """Divides a split of `size` bytes into shards with nearly equal record counts."""
    count = max(1, min(records, -(-size // shard_bytes)))
    ends = [records * i // count for i in range(count + 1)]
    return [Shard(split, i, count, ends[i], ends[i + 1]) for i in range(count)]


def write(path: pathlib.Path, records: Iterable[bytes]) -> WrittenShard:
    """Writes a shard under a temporary name, reads it back, and renames it.

    Returns:
      Counts and checksums of the file, computed when it was read back.

    Raises:
      UserError: the file cannot be written, as on a full disk, or cannot be read back.
    """
    # The name includes the process id, because a process of an interrupted run may
    # still be writing the same shard.
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        written = _write_and_read_back(path, part, records)
        with open(part, "rb") as file:
            _write_or_fail(path, os.fsync, file.fileno())
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)  # Makes room for other shards on a full disk.
        raise
    return dataclasses.replace(written, file=path.name)


def _write_and_read_back(path, part, records):
    from array_record.python import array_record_module

    tally = _Tally()
    writer = array_record_module.ArrayRecordWriter(str(part), _WRITE)
    for record in records:
        tally.add(record)
        _write_or_fail(path, writer.write, record)
    _write_or_fail(path, writer.close)
    try:
        written = check(part)
    except DamagedShard as error:
        raise UserError(
            f"{path} was written but cannot be read back ({error}): check the disk"
        ) from error
    if (written.records, written.records_crc32c) != (tally.records, f"{tally.crc:08x}"):
        raise UserError(
            f"{path} holds other records than were written to it: check the disk"
        )
    return written


def check(path: pathlib.Path) -> WrittenShard:
    """Reads a whole shard; returns its counts and checksums.

    Raises:
      DamagedShard: the file is missing, truncated or damaged.
    """
    tally = _Tally()
    for record in read(path):
        tally.add(record)
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            size = file.tell()
    except OSError as error:
        raise DamagedShard(error.strerror) from error
    return WrittenShard(
        file=path.name,
        records=tally.records,
        record_bytes=tally.record_bytes,
        records_crc32c=f"{tally.crc:08x}",
        file_bytes=size,
        sha256=digest.hexdigest(),
    )


def read(path: pathlib.Path) -> Iterator[bytes]:
    """Yields the records of an ArrayRecord file in order.

    Raises:
      DamagedShard: the file is missing, truncated or damaged.
    """
    from array_record.python import array_record_module

    if not path.is_file():
        raise DamagedShard("is missing")
    reader = array_record_module.ArrayRecordReader(str(path), _READ)
    # A truncated file has no end marker: it opens, but appears empty.
    if not reader.ok():
        raise DamagedShard("is truncated or not an ArrayRecord file")
    count = reader.num_records()
    step = max(1, _READ_AT_ONCE * count // max(1, path.stat().st_size))
    for start in range(0, count, step):
        try:
            yield from reader.read(start, min(start + step, count))
        except RuntimeError as error:  # Only the first line is the message.
            raise DamagedShard(str(error).splitlines()[0][:200]) from error
    reader.close()


def cannot_write(path: pathlib.Path, error: BaseException) -> UserError:
    """Returns the error for a file that cannot be written, as on a full disk."""
    reason = getattr(error, "strerror", None) or str(error).partition(";")[0]
    reason = reason.removeprefix("write() failed: ").removeprefix("open() failed: ")
    return UserError(
        f"cannot write {path}: {reason}; finished shards are kept: make room or fix it, "
        "and repeat the command"
    )


def _write_or_fail(path, function, *args):
    try:
        function(*args)
    except (OSError, RuntimeError) as error:
        raise cannot_write(path, error) from error

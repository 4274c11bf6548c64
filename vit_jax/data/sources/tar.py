"""Tar shards of WebDataset, img2dataset and timm, read in any order: data.name="tar".

`data.data_dir` is a tar file, a folder of tar files, or a folder with a folder of tar
files for each split. Files outside of folders belong to the split that is named in
their names, or else to "train". A sample is a sequence of members KEY.jpg, KEY.cls,
KEY.txt, KEY.json with the same KEY: the path up to the first dot in its last part
(https://github.com/webdataset/webdataset, `base_plus_ext`). Samples without an image
are left out.

The class of a sample is its member KEY.cls, or with `data.label_key="json:FIELD"` a
field of KEY.json: a number, or one of the lines of `data_dir`/classnames.txt. Captions
are the member `data.caption_key`, such as "txt", or "json:FIELD". The numbers of
`data.target_key` are fields of KEY.json.

A tar file has no index. The positions of its members are read from all their headers
once, without the content, and kept in the cache of this package.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeVar

import numpy as np
from jaxtyping import Integer

from vit_jax.command_line import files
from vit_jax.data import captions, class_names, splits
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.fields import target
from vit_jax.data.fingerprint import Entries
from vit_jax.data.sources import folder
from vit_jax.data.sources.arrays import ArraySource, small_in_memory
from vit_jax.data.sources.base import Numbered, SourceType, warn
from vit_jax.errors import NoLabels, UserError

T = TypeVar("T")

ENDINGS = (".tar", ".tar.gz", ".tgz")
CLASS_NAMES = "classnames.txt"  # The name in CLIP Benchmark's sets.
CAPTION, LABEL, JSON = "txt", "cls", "json"
_IMAGES = tuple(ending.removeprefix(".") for ending in folder.EXTENSIONS)
# Hidden files, such as macOS adds, do not belong to a sample.
_MEMBER = re.compile(r"(?:\./)*(?P<key>(?:.*/)?[^./][^./]*)\.(?P<ending>[^/]+)")
_FIELDS = 10  # Number of field names in a message.
_USUAL = (*splits.TRAIN, *splits.VALIDATION, *splits.TEST)
_OTHER_PACKING = re.compile(r".+\.tar\.\w+")
_PADDING = 2**20  # Bytes read after the end of an archive; programs pad by 10 KiB.
_THREADS = 8  # For headers: most of the time passes in waiting for a disk.
_VERSION = "1"  # Part of the names of files of positions in the cache.
_LABEL_KEY = "label"  # Default of `data.label_key`.


class DamagedTar(Exception):
    """A tar file is damaged or truncated; the message is the reason."""


class Unusable(DamagedImage):
    """A sample is incomplete or damaged.

    The message is the reason, and `kind` the same in a few words, for counting.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(kind, reason)  # All arguments, for pickle.
        self.kind = kind

    def __str__(self) -> str:
        return self.args[1]


@dataclasses.dataclass(frozen=True)
class Positions:
    """The members of a tar file that belong to samples: S samples, M members.

    Attributes:
      keys: keys of the samples, separated by line breaks.
      endings: file extensions without the first dot, in lower case.
      sample: number of each member's sample.
      ending: index into `endings` of each member.
      start: first byte of each member's content.
      size: number of bytes of each member.
    """

    keys: bytes
    endings: tuple[str, ...]
    sample: Integer[np.ndarray, " M"]
    ending: Integer[np.ndarray, " M"]
    start: Integer[np.ndarray, " M"]
    size: Integer[np.ndarray, " M"]

    @functools.cached_property
    def ends(self) -> Integer[np.ndarray, " S"]:
        """End of each sample's key in `keys`."""
        return np.flatnonzero(np.frombuffer(self.keys, np.uint8) == ord("\n"))

    def key(self, sample: int) -> str:
        """Returns the key of a sample."""
        start = int(self.ends[sample - 1]) + 1 if sample else 0
        return os.fsdecode(self.keys[start : self.ends[sample]])

    def members(self, endings: Sequence[str]) -> Integer[np.ndarray, " S"]:
        """Returns the member of each sample with the first ending it has; -1 if none."""
        members = np.full(len(self.ends), -1, np.int64)
        for ending in reversed(endings):
            if ending in self.endings:
                chosen = self.ending == self.endings.index(ending)
                members[self.sample[chosen]] = np.flatnonzero(chosen)
        return members


@dataclasses.dataclass(frozen=True)
class TarSource(Numbered):
    """Samples of tar files: N samples.

    Attributes:
      root: folder of the data set, for names.
      files: paths of the tar files in use.
      positions: members of each file.
      file: index into `files` of each record.
      image: member of each record's image.
      parts: wanted parts of a record, "label", captions or targets: member of each
        record, -1 if it is missing, and the ending or "json:FIELD" that it is read from.
      target_names: fields of KEY.json with the targets.
    """

    name: str
    root: str
    files: tuple[str, ...]
    positions: Sequence[Positions]
    file: Integer[np.ndarray, " N"]
    image: Integer[np.ndarray, " N"]
    parts: Mapping[str, tuple[Integer[np.ndarray, " N"], str]]
    class_names: tuple[str, ...]
    numbering: splits.Numbering
    target_names: tuple[str, ...] = ()
    images = labels = None  # Not in memory.

    def __getitem__(self, i: int) -> dict:
        if not 0 <= i < len(self):
            raise IndexError(i)
        with self._opened(i) as stream:
            record = {"image": self._content(stream, i, self.image[i])}
            for name in self.parts:
                record[name] = self._part(stream, i, name)
        return record

    def describe(self, i: int) -> str:
        positions = self.positions[self.file[i]]
        member = self.image[i]
        key = positions.key(positions.sample[member])
        ending = positions.endings[positions.ending[member]]
        return f"{self.files[self.file[i]]}/{key}.{ending}"

    def known_labels(self) -> np.ndarray | None:
        if "label" not in self.parts:
            return None
        try:
            return self._labels
        except (DamagedImage, OSError):  # Reading records finds which.
            return None

    def entries(self) -> Entries:
        names = [os.path.relpath(path, self.root) for path in self.files]
        sums = [_sum(each) for each in self.positions]
        labels = None
        if "label" in self.parts and (known := self.known_labels()) is not None:
            of_files = (known[self.file == i] for i in range(len(self.files)))
            labels = np.array([zlib.crc32(each.tobytes()) for each in of_files])
        return Entries("shards", names, labels, np.array(sums, np.int64))

    @functools.cached_property
    def _labels(self) -> Integer[np.ndarray, " N"]:
        labels = np.empty(len(self), np.int64)
        for i in range(len(self)):
            with self._opened(i) as stream:
                labels[i] = self._part(stream, i, "label")
        return labels

    def _opened(self, i: int) -> IO[bytes]:
        return open(self.files[self.file[i]], "rb", buffering=0)

    def _content(self, stream: IO[bytes], i: int, member: int) -> bytes:
        positions = self.positions[self.file[i]]
        size = int(positions.size[member])
        stream.seek(int(positions.start[member]))
        content = stream.read(size)
        if len(content) < size:
            raise DamagedImage("is truncated: its tar file has become shorter")
        return content

    def _part(self, stream: IO[bytes], i: int, name: str) -> object:
        members, place = self.parts[name]
        ending, sample = place.partition(":")[0], {}
        if members[i] >= 0:
            sample[ending] = self._content(stream, i, members[i])
        if name == "label":
            return label_of(sample, place, self.class_names)
        if name == target.NAME:
            return target.numbers_in(fields_of(sample), self.target_names)
        return captions.of_value(caption_of(sample, place))


def open_tar(data: DataConfig, split: str) -> TarSource | ArraySource:
    """Opens a split of tar files, or decodes it into memory if its images are small.

    Raises:
      NoSplit: the split has no files.
      NoLabels: no sample of the split has the member of the classes.
      UserError: no tar files exist, or one is damaged or compressed.
    """
    root = pathlib.Path(data.data_dir).expanduser()
    setting = f"data.data_dir={data.data_dir!r}"
    if not data.data_dir or not root.exists():
        raise UserError(
            f"{setting} does not exist: data.name='tar' reads a tar file, or a folder "
            "with *.tar or SPLIT/*.tar"
        )
    by_split = find(root, setting)
    folder_of = root if root.is_dir() else root.parent
    paths = [path for each in by_split.values() for path in each]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        positions = dict(zip(paths, pool.map(_positions, paths), strict=True))
    # The names of records need the sizes of all splits, also of those not in use.
    members = {path: positions[path].members(_IMAGES) for path in paths}
    lacking = sum(int((each < 0).sum()) for each in members.values())
    if lacking:
        warn(f"{setting}: samples without an image, which are left out: {lacking:,}")
    sizes = {
        name: sum(int((members[path] >= 0).sum()) for path in each)
        for name, each in by_split.items()
    }
    numbering = splits.Numbering.of(split, sizes, str(root))
    used = [name for name in by_split if name in dict(numbering.parts)]
    chosen = [path for name in used for path in by_split[name]]
    kept = {path: np.flatnonzero(members[path] >= 0) for path in chosen}
    starts = dict(
        zip(used, np.cumsum([0, *(sizes[name] for name in used)]), strict=False)
    )
    rows = np.concatenate(
        [starts[name] + np.asarray(part) for name, part in numbering.parts]
    )
    of_rows = lambda values: np.concatenate(values)[rows]
    parts = {}
    for name, place in _wanted(data).items():
        ending = place.partition(":")[0]
        numbers = [positions[path].members([ending])[kept[path]] for path in chosen]
        parts[name] = of_rows(numbers), place
    if "label" in parts and (parts["label"][0] < 0).all():
        raise NoLabels(
            f"data.label_key={data.label_key!r}: no sample of {root} has a member "
            f"{parts['label'][1].partition(':')[0]}"
        )
    source = TarSource(
        name=f"{root} {split}",
        root=str(folder_of),
        files=tuple(map(str, chosen)),
        positions=[positions[path] for path in chosen],
        file=of_rows([np.full(len(kept[p]), i) for i, p in enumerate(chosen)]),
        image=of_rows([members[path][kept[path]] for path in chosen]),
        parts=parts,
        class_names=class_names_in(folder_of) if data.has_labels else (),
        numbering=numbering,
        target_names=data.targets,
    )
    return small_in_memory(source, data)


def _wanted(data: DataConfig) -> dict[str, str]:
    """Returns the ending, or "json:FIELD", that the parts of a record are read from."""
    wanted = {}
    if data.has_labels:
        wanted["label"] = LABEL if data.label_key == _LABEL_KEY else data.label_key
    if data.caption_key:
        wanted[captions.TEXT] = data.caption_key
    if data.target_key:
        wanted[target.NAME] = JSON
    return wanted


def _positions(path: pathlib.Path) -> Positions:
    """Returns the members of a tar file, from the cache if it was read before."""
    about = path.stat()
    return _cached(str(path.resolve()), about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=100_000)  # A run opens a file for each of its splits.
def _cached(path: str, size: int, changed: int) -> Positions:
    name = f"{_VERSION} {path} {size} {changed}".encode("utf-8", "surrogateescape")
    stored = files.cache_folder() / "tar" / f"{hashlib.sha256(name).hexdigest()}.npz"
    # A damaged file of the cache is written again.
    with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
        with np.load(stored) as arrays:
            keys, endings = (arrays[name].tobytes() for name in ("keys", "endings"))
            rest = {
                name: arrays[name] for name in ("sample", "ending", "start", "size")
            }
        return Positions(keys, tuple(endings.decode().split("\n")), **rest)
    positions = read_positions(pathlib.Path(path))
    stream = io.BytesIO()
    arrays = dataclasses.asdict(positions)
    arrays["keys"] = np.frombuffer(positions.keys, np.uint8)
    endings = "\n".join(positions.endings).encode()
    np.savez(stream, **arrays | {"endings": np.frombuffer(endings, np.uint8)})
    with contextlib.suppress(OSError):  # Of a home that cannot be written.
        stored.parent.mkdir(parents=True, exist_ok=True)
        files.replace_bytes(stored, stream.getvalue())
    return positions


def read_positions(path: pathlib.Path) -> Positions:
    """Reads the headers of a tar file.

    Raises:
      UserError: the file is damaged, truncated or compressed.
    """
    if not path.name.endswith(".tar"):
        raise UserError(
            f"{path} is compressed, and training reads records in any order: unpack it "
            "to .tar"
        )
    keys, endings, rows = [], {}, []
    seen: set[str] = set()
    try:
        for name, start, size in _headers(path):
            match = _MEMBER.fullmatch(name)
            if not match:
                continue
            key, ending = match["key"], match["ending"].lower()
            if not keys or key != keys[-1] or ending in seen:
                keys.append(key)
                seen = set()
            seen.add(ending)
            number = endings.setdefault(ending, len(endings))
            rows.append((len(keys) - 1, number, start, size))
    except DamagedTar as error:
        raise UserError(
            f"{path} {error}: write or download it again, or remove it"
        ) from error
    sample, ending, start, size = np.array(rows, np.int64).reshape(-1, 4).T
    text = "".join(f"{key}\n" for key in keys).encode("utf-8", "surrogateescape")
    return Positions(text, tuple(endings), sample, ending, start, size)


def _sum(positions: Positions) -> int:
    """Returns a checksum of the names, positions and sizes of a tar file's members."""
    checksum = zlib.crc32(
        "\n".join(positions.endings).encode(), zlib.crc32(positions.keys)
    )
    for values in (positions.sample, positions.ending, positions.start, positions.size):
        checksum = zlib.crc32(values.astype("<i8").tobytes(), checksum)
    return checksum


def read(path: pathlib.Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields key, and content by ending, of each sample of a tar file, in order.

    Raises:
      DamagedTar: the file is damaged or truncated; samples before that are yielded.
    """
    key, sample = "", {}
    for name, content in _contents(path):
        match = _MEMBER.fullmatch(name)
        if not match:
            continue
        ending = match["ending"].lower()
        if match["key"] != key or ending in sample:
            if sample:
                yield key, sample
            key, sample = match["key"], {}
        sample[ending] = content
    if sample:
        yield key, sample


def _contents(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of the files in a tar file, compressed or not."""
    of_file = lambda tar, member: (member.name, tar.extractfile(member).read())
    return _members(path, "r", of_file)


def _headers(path: pathlib.Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, first byte and size of the files in a tar file."""
    of_file = lambda _, member: (member.name, member.offset_data, member.size)
    return _members(path, "r:", of_file)


def _members(
    path: pathlib.Path,
    mode: str,
    of_file: Callable[[tarfile.TarFile, tarfile.TarInfo], T],
) -> Iterator[T]:
    """Yields `of_file` of each file in a tar file; `mode` is that of `tarfile.open`."""
    try:
        with tarfile.open(path, mode) as tar:
            while member := tar.next():
                tar.members.clear()  # Otherwise, every header stays in memory.
                if member.isfile():
                    yield of_file(tar, member)
            # For tarfile, the end of the file or a damaged header also ends the
            # archive.
            tar.fileobj.seek(tar.offset)
            rest = tar.fileobj.read(_PADDING)
            if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
                raise DamagedTar(f"is damaged or truncated at byte {tar.offset:,}")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DamagedTar(f"is damaged or truncated ({reason.rstrip(':')})") from error


def fields_of(sample: Mapping[str, bytes]) -> dict:
    """Returns the fields of a sample's json; raises Unusable if it is damaged."""
    try:
        about = json.loads(sample[JSON])
    except KeyError:
        raise Unusable("no caption", "has no json") from None
    except (ValueError, RecursionError) as error:
        raise Unusable("damaged json", f"has damaged json ({error})") from error
    return about if isinstance(about, dict) else {}


def image_in(sample: Mapping[str, bytes]) -> str | None:
    """Returns the ending of a sample's image; arrays, perhaps its features, come last."""
    return next((ending for ending in _IMAGES if ending in sample), None)


def caption_of(sample: Mapping[str, bytes], place: str) -> bytes:
    """Returns the caption of a sample.

    Args:
      sample: content by ending.
      place: ending of the member with the caption, or "json:FIELD".

    Raises:
      Unusable: the caption is missing, empty or damaged.
    """
    ending, _, field = place.partition(":")
    if ending == JSON:
        text = _field(sample, field, "no caption")
        if not isinstance(text, str):
            kind = type(text).__name__
            raise Unusable("no caption", f"field {field!r} of its json is a {kind}")
    else:
        if ending not in sample:
            raise Unusable("no caption", f"has no {ending}{_only(sample)}")
        try:
            text = sample[ending].decode()
        except UnicodeDecodeError as error:
            reason = f"has a {ending} that is not UTF-8"
            raise Unusable("no caption", reason) from error
    if not text.strip():
        raise Unusable("empty caption", "has an empty caption")
    # The JSON of a truncated text may end with half a character.
    return text.strip().encode(errors="replace")


def label_of(
    sample: Mapping[str, bytes], place: str, class_names: Sequence[str]
) -> int:
    """Returns the class number of a sample.

    Args:
      sample: content by ending.
      place: ending of the member with the class, or "json:FIELD".
      class_names: names of the classes, which may be used instead of numbers.

    Raises:
      Unusable: the class is missing, or is not one of the classes.
    """
    ending, _, field = place.partition(":")
    if ending == JSON:
        text = str(_field(sample, field, "no label"))
    elif ending not in sample:
        raise Unusable("no label", f"has no {ending}{_only(sample)}")
    else:
        text = sample[ending].decode("utf-8", "replace")
    # Up to 18 digits fit into int64.
    number = re.fullmatch(r"\s*([0-9]{1,18})\s*", text)
    label = int(number[1]) if number else -1
    if not number and text.strip() in class_names:
        label = list(class_names).index(text.strip())
    if label < 0 or (class_names and label >= len(class_names)):
        known = f" from 0 to {len(class_names) - 1}" if class_names else ""
        what = f"{ending} {text[:20]!r}" if ending != JSON else f"{field} {text[:20]!r}"
        raise Unusable("no label", f"has the {what}, not a class{known}")
    return label


def _field(sample: Mapping[str, bytes], name: str, kind: str) -> object:
    """Returns a field of a sample's json; raises Unusable if it is missing."""
    about = fields_of(sample)
    if about.get(name) is None:
        known = ", ".join(list(about)[:_FIELDS])
        what = "is empty" if name in about else f"is missing; it has {known}"
        raise Unusable(kind, f"field {name!r} of its json {what}")
    return about[name]


def _only(sample: Mapping[str, bytes]) -> str:
    return f", only {', '.join(sample)}" if sample else ""


def find(root: pathlib.Path, setting: str) -> dict[str, list[pathlib.Path]]:
    """Returns the tar files of each split, sorted by path.

    Args:
      root: tar file, or folder of tar files or of folders with tar files.
      setting: flag or key with its value, for messages.

    Raises:
      UserError: no tar file exists, or only some of them are in folders.
    """
    below = {}
    if root.is_file():
        loose = tar_files([root])
    else:
        loose = tar_files(root.iterdir())
        below = {
            name: paths
            for name in folder.visible_folders(root)
            if (paths := tar_files((root / name).rglob("*")))
        }
    if loose and below:
        raise UserError(
            f"{setting} has tar files, such as {loose[0].name}, and also some in "
            f"{', '.join(below)}: move them into folders of splits, such as {root}/train"
        )
    for path in loose:
        words = re.split(r"[^a-z]+", path.name.lower())
        split = next((word for word in words[::-1] if word in _USUAL), "train")
        below.setdefault(split, []).append(path)
    if not below:
        raise UserError(
            f"{setting} has no tar files ({', '.join(ENDINGS)}): it must look like "
            f"{root}/*.tar or {root}/train/*.tar"
        )
    return below


def tar_files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the tar files among the paths, sorted."""
    chosen = []
    for path in sorted(paths):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.name.endswith(ENDINGS):
            chosen.append(path)
        elif _OTHER_PACKING.fullmatch(path.name):
            raise UserError(
                f"{path} is not one of {', '.join(ENDINGS)}: unpack it to .tar or remove it"
            )
    return chosen


def class_names_in(root: pathlib.Path) -> tuple[str, ...]:
    """Returns the class names, one per line of a file in the folder of the splits."""
    path = root / CLASS_NAMES
    if not path.is_file():
        return ()
    names = class_names.read(path, str(path))
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"{path} has two classes named {twice[0]!r}: make them differ")
    return tuple(names)


TAR = SourceType(
    open=open_tar,
    help="Tar shards of WebDataset, `data.data_dir`/*.tar or SPLIT/*.tar.",
)

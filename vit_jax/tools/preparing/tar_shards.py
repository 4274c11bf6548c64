"""The job that converts tar shards to a TFDS data set.

Shards are those of WebDataset (https://github.com/webdataset/webdataset,
`base_plus_ext`), as written by img2dataset and timm. A sample is a sequence of members
KEY.jpg, KEY.txt, KEY.json, KEY.cls with the same KEY: the path up to the first dot in
its last part.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vit_jax.command_line.printing import print_line
from vit_jax.data import bands, class_names, splits
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources import folder
from vit_jax.errors import UserError
from vit_jax.tools.preparing import build, metadata
from vit_jax.tools.preparing.examples import ExampleFormat
from vit_jax.tools.preparing.request import KINDS, Request
from vit_jax.tools.preparing.shards import Shard, Skipped, WrittenShard

ENDINGS = (".tar", ".tar.gz", ".tgz")
CLASS_NAMES = "classnames.txt"  # The name in CLIP Benchmark's sets.
_IMAGES = tuple(ending.removeprefix(".") for ending in folder.EXTENSIONS)
_CAPTION, _LABEL, _JSON = "txt", "cls", "json"
# Hidden files, such as macOS adds, do not belong to a sample.
_MEMBER = re.compile(r"(?:\./)*(?P<key>(?:.*/)?[^./][^./]*)\.(?P<ending>[^/]+)")
_LOOKED_AT = 100  # Number of samples that determine the features of a set.
_FIELDS = 10  # Number of field names in a message.
_USUAL = (*splits.TRAIN, *splits.VALIDATION, *splits.TEST)
_OTHER_PACKING = re.compile(r".+\.tar\.\w+")
_PADDING = 2**20  # Bytes read after the end of an archive; programs pad by 10 KiB.


class DamagedTar(Exception):
    """A tar file is damaged or truncated; the message is the reason."""


class _Unusable(Exception):
    """A sample is incomplete; the arguments are those of `Skipped` after the record."""


@dataclasses.dataclass(frozen=True)
class TarShards:
    """Job: unchanged images, with path and label, caption or both; see `build.Job`.

    Attributes:
      files: (path, number of bytes) of the tar files in order, by split.
      caption: file ending of the members with captions, or "json:FIELD"; "" for none.
    """

    request: Request
    files: Mapping[str, Sequence[tuple[pathlib.Path, int]]]
    format: ExampleFormat
    caption: str
    shards: Sequence[Shard]
    plan: Mapping
    size: int
    unit = "B"

    @property
    def dataset(self) -> str:
        """TFDS name."""
        return self.request.name.dataset

    def records(self, shard: Shard) -> Iterator[bytes | Skipped]:
        serialize, first = self.format.serializer(), 0
        for path, size in self.files[shard.split]:
            if shard.start <= first < shard.stop:
                for record in self._records_of(path):
                    yield serialize(record) if isinstance(record, dict) else record
            first += size

    def _records_of(self, path: pathlib.Path) -> Iterator[dict | Skipped]:
        """Yields the features of each sample of a tar file."""
        name, keys = path.relative_to(self.request.source).as_posix(), set()
        try:
            for key, sample in read(path):
                try:
                    if key in keys:
                        why = "has the name of an earlier sample of this tar file"
                        raise _Unusable("name there twice", why)
                    keys.add(key)
                    yield self._features(f"{name}/{key}", sample)
                except _Unusable as lack:
                    yield Skipped(f"{name}/{key}", *lack.args)
        except DamagedTar as error:
            yield Skipped(name, "damaged tar", str(error))

    def _features(self, where: str, sample: Mapping[str, bytes]) -> dict:
        _check_download(sample)
        ending = _image_in(sample)
        if not ending:
            raise _Unusable("no image", f"has no image, only {', '.join(sample)}")
        record = {"image": sample[ending], "path": os.fsencode(f"{where}.{ending}")}
        if self.format.captioned:
            record["text"] = _caption(sample, self.caption)
        if self.format.labelled:
            record["label"] = _label(sample, self.format.class_names)
        if self.request.decode:
            try:
                bands.check(record["image"], self.request.max_megapixels)
            except DamagedImage as error:
                raise _Unusable("damaged image", str(error)) from error
        return record

    def describe(
        self, folder: pathlib.Path, splits: Mapping[str, Sequence[WrittenShard]]
    ) -> None:
        text = (
            "Made from tar files by vit_jax.prepare; the images' bytes are unchanged."
        )
        features = self.format.features()
        metadata.write_info(folder, self.request.name, features, splits, text)


def read(path: pathlib.Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields key, and content by ending, of each sample of a tar file, in order.

    Raises:
      DamagedTar: the file is damaged or truncated; samples before that are yielded.
    """
    key, sample = "", {}
    for name, content in _members(path):
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


def _members(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of the files in a tar file, compressed or not."""
    try:
        with tarfile.open(path) as tar:
            while member := tar.next():
                tar.members.clear()  # Otherwise, every header stays in memory.
                if member.isfile():
                    yield member.name, tar.extractfile(member).read()
            # For tarfile, the end of the file or a damaged header also ends the
            # archive.
            tar.fileobj.seek(tar.offset)
            rest = tar.fileobj.read(_PADDING)
            if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
                raise DamagedTar(f"is damaged or truncated at byte {tar.offset:,}")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DamagedTar(f"is damaged or truncated ({reason.rstrip(':')})") from error


def _check_download(sample: Mapping[str, bytes]) -> None:
    """Raises _Unusable if img2dataset recorded that the download failed."""
    if b'"error_message"' not in sample.get(_JSON, b""):
        return  # Not written by img2dataset.
    about = _json(sample)
    status, message = about.get("status", "success"), about.get("error_message")
    if status != "success":
        raise _Unusable("status not success", f"has the status {status!r} ({message})")


def _json(sample: Mapping[str, bytes]) -> dict:
    try:
        about = json.loads(sample[_JSON])
    except KeyError:
        raise _Unusable("no caption", "has no json") from None
    except (ValueError, RecursionError) as error:
        raise _Unusable("damaged json", f"has damaged json ({error})") from error
    return about if isinstance(about, dict) else {}


def _image_in(sample: Mapping[str, bytes]) -> str | None:
    """Returns the ending of a sample's image; arrays, perhaps its features, come last."""
    return next((ending for ending in _IMAGES if ending in sample), None)


def _caption(sample: Mapping[str, bytes], place: str) -> bytes:
    ending, _, field = place.partition(":")
    if ending == _JSON:
        about = _json(sample)
        if about.get(field) is None:
            known = ", ".join(list(about)[:_FIELDS])
            what = "is empty" if field in about else f"is missing; it has {known}"
            raise _Unusable("no caption", f"field {field!r} of its json {what}")
        text = about[field]
        if not isinstance(text, str):
            kind = type(text).__name__
            raise _Unusable("no caption", f"field {field!r} of its json is a {kind}")
    else:
        if ending not in sample:
            raise _Unusable("no caption", f"has no {ending}, only {', '.join(sample)}")
        try:
            text = sample[ending].decode()
        except UnicodeDecodeError as error:
            raise _Unusable(
                "no caption", f"has a {ending} that is not UTF-8"
            ) from error
    if not text.strip():
        raise _Unusable("empty caption", "has an empty caption")
    # The JSON of a truncated text may end with half a character.
    return text.strip().encode(errors="replace")


def _label(sample: Mapping[str, bytes], class_names: Sequence[str]) -> int:
    if _LABEL not in sample:
        raise _Unusable("no label", f"has no {_LABEL}, only {', '.join(sample)}")
    # Up to 18 digits fit into int64.
    number = re.fullmatch(rb"\s*(\d{1,18})\s*", sample[_LABEL])
    label = int(number[1]) if number else -1
    if label < 0 or (class_names and label >= len(class_names)):
        shown = sample[_LABEL][:20].decode("utf-8", "replace")
        known = f" from 0 to {len(class_names) - 1}" if class_names else ""
        raise _Unusable("no label", f"has the {_LABEL} {shown!r}, not a class{known}")
    return label


def open_tar_shards(request: Request) -> TarShards:
    """Returns the job that converts <source>/<split>/**.tar or <source>/*.tar.

    Files outside of folders belong to the split that is named in their names, or else
    to "train". The first samples determine the features of the set: a label if there is
    a cls, and the requested caption, or the txt if there is one. A shard holds one or
    more whole tar files.

    Raises:
      UserError: no such files exist, or none in a requested split.
    """
    root = request.source
    by_split = _find(root, request.splits)
    files = {
        split: [(path, max(1, path.stat().st_size)) for path in paths]
        for split, paths in by_split.items()
    }
    first = splits.first_of(splits.TRAIN, files) or next(iter(files))
    samples = list(itertools.islice(_with_image(by_split[first]), _LOOKED_AT))
    has = lambda ending: any(ending in sample for sample in samples)
    caption = request.caption or (_CAPTION if has(_CAPTION) else "")
    names = _class_names(root) if has(_LABEL) else ()
    shape = ExampleFormat(names, has(_LABEL), bool(caption))
    _tell(root, shape, samples)
    shards = []
    for split, sized in files.items():
        shards += _group(split, [size for _, size in sized], request.shard_bytes)
    stats = [_stat(root, path) for paths in by_split.values() for path in paths]
    return TarShards(
        request,
        files,
        shape,
        caption,
        shards,
        plan=request.plan() | {"splits": list(files), "files": build.digest(stats)},
        size=sum(size for sized in files.values() for _, size in sized),
    )


def _tell(root: pathlib.Path, shape: ExampleFormat, samples: Sequence[Mapping]) -> None:
    """Prints the features of the set, before hours are spent on unwanted ones."""
    hint, of_json = "", [sample for sample in samples if _JSON in sample]
    if of_json and not shape.captioned:
        with contextlib.suppress(_Unusable):
            fields = ", ".join(list(_json(of_json[0]))[:_FIELDS])
            hint = f"; for captions set --caption=json:FIELD, one of {fields}"
    print_line(f"{root}: records have {', '.join(shape.features())}{hint}")


def _find(root: pathlib.Path, names: Sequence[str]) -> dict[str, list[pathlib.Path]]:
    """Returns the tar files of each split, or of the requested splits, sorted by path."""
    loose = _tar_files(root.iterdir())
    below = {
        name: paths
        for name in folder.visible_folders(root)
        if (paths := _tar_files((root / name).rglob("*")))
    }
    if loose and below:
        raise UserError(
            f"--from={root} has tar files, such as {loose[0].name}, and also some in "
            f"{', '.join(below)}: move them into folders of splits, such as {root}/train"
        )
    for path in loose:
        words = re.split(r"[^a-z]+", path.name.lower())
        split = next((word for word in words[::-1] if word in _USUAL), "train")
        below.setdefault(split, []).append(path)
    if not below:
        raise UserError(
            f"--from={root} has no tar files ({', '.join(ENDINGS)}): it must look like "
            f"{root}/*.tar or {root}/train/*.tar"
        )
    if unknown := [name for name in names if name not in below]:
        raise UserError(
            f"--splits={unknown[0]}: {root} has no such split; it has {', '.join(below)}"
        )
    return {name: below[name] for name in names or below}


def _tar_files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
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


def _with_image(paths: Iterable[pathlib.Path]) -> Iterator[dict[str, bytes]]:
    """Yields the samples with an image; damaged files are reported later."""
    for path in paths:
        with contextlib.suppress(DamagedTar):
            yield from (sample for _, sample in read(path) if _image_in(sample))


def _class_names(root: pathlib.Path) -> tuple[str, ...]:
    """Returns the class names, one per line of a file in the folder of the splits."""
    path = root / CLASS_NAMES
    if not path.is_file():
        return ()
    names = class_names.read(path, str(path))
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"{path} has two classes named {twice[0]!r}: make them differ")
    return names


def _group(split: str, sizes: Sequence[int], shard_bytes: int) -> list[Shard]:
    """Divides a split's tar files, without cutting any, into shards of bytes."""
    edges, end = [0], 0
    for size in sizes:
        if end > edges[-1] and end + size - edges[-1] > shard_bytes:
            edges.append(end)
        end += size
    parts = list(itertools.pairwise([*edges, end]))
    return [Shard(split, i, len(parts), *part) for i, part in enumerate(parts)]


def _stat(root: pathlib.Path, path: pathlib.Path) -> tuple[str, int, int]:
    stat = path.stat()
    return path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns


KINDS["webdataset"] = open_tar_shards

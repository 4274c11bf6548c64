"""The job that converts tar shards to a TFDS data set; see data/sources/tar.py."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vit_jax.command_line.printing import print_line
from vit_jax.data import bands, splits
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources import tar
from vit_jax.errors import UserError
from vit_jax.tools.preparing import build, metadata
from vit_jax.tools.preparing.examples import ExampleFormat
from vit_jax.tools.preparing.request import KINDS, Request
from vit_jax.tools.preparing.shards import Shard, Skipped, WrittenShard

_LOOKED_AT = 100  # Number of samples that determine the features of a set.
_FIELDS = 10  # Number of field names in a message.


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
            for key, sample in tar.read(path):
                try:
                    if key in keys:
                        why = "has the name of an earlier sample of this tar file"
                        raise tar.Unusable("name there twice", why)
                    keys.add(key)
                    yield self._features(f"{name}/{key}", sample)
                except tar.Unusable as lack:
                    yield Skipped(f"{name}/{key}", lack.kind, str(lack))
        except tar.DamagedTar as error:
            yield Skipped(name, "damaged tar", str(error))

    def _features(self, where: str, sample: Mapping[str, bytes]) -> dict:
        _check_download(sample)
        ending = tar.image_in(sample)
        if not ending:
            raise tar.Unusable("no image", f"has no image, only {', '.join(sample)}")
        record = {"image": sample[ending], "path": os.fsencode(f"{where}.{ending}")}
        if self.format.captioned:
            record["text"] = tar.caption_of(sample, self.caption)
        if self.format.labelled:
            record["label"] = tar.label_of(sample, tar.LABEL, self.format.class_names)
        if self.request.decode:
            try:
                bands.check(record["image"], self.request.max_megapixels)
            except DamagedImage as error:
                raise tar.Unusable("damaged image", str(error)) from error
        return record

    def describe(
        self, folder: pathlib.Path, splits: Mapping[str, Sequence[WrittenShard]]
    ) -> None:
        text = (
            "Made from tar files by vit_jax.prepare; the images' bytes are unchanged."
        )
        features = self.format.features()
        metadata.write_info(folder, self.request.name, features, splits, text)


def _check_download(sample: Mapping[str, bytes]) -> None:
    """Raises Unusable if img2dataset recorded that the download failed."""
    if b'"error_message"' not in sample.get(tar.JSON, b""):
        return  # Not written by img2dataset.
    about = tar.fields_of(sample)
    status, message = about.get("status", "success"), about.get("error_message")
    if status != "success":
        raise tar.Unusable(
            "status not success", f"has the status {status!r} ({message})"
        )


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
    by_split = _requested(tar.find(root, f"--from={root}"), request)
    files = {
        split: [(path, max(1, path.stat().st_size)) for path in paths]
        for split, paths in by_split.items()
    }
    first = splits.first_of(splits.TRAIN, files) or next(iter(files))
    samples = list(itertools.islice(_with_image(by_split[first]), _LOOKED_AT))
    has = lambda ending: any(ending in sample for sample in samples)
    caption = request.caption or (tar.CAPTION if has(tar.CAPTION) else "")
    names = tar.class_names_in(root) if has(tar.LABEL) else ()
    shape = ExampleFormat(names, has(tar.LABEL), bool(caption))
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
    hint, of_json = "", [sample for sample in samples if tar.JSON in sample]
    if of_json and not shape.captioned:
        with contextlib.suppress(tar.Unusable):
            fields = ", ".join(list(tar.fields_of(of_json[0]))[:_FIELDS])
            hint = f"; for captions set --caption=json:FIELD, one of {fields}"
    print_line(f"{root}: records have {', '.join(shape.features())}{hint}")


def _requested(
    by_split: Mapping[str, list[pathlib.Path]], request: Request
) -> dict[str, list[pathlib.Path]]:
    """Returns the tar files of the requested splits; all if none is requested."""
    if unknown := [name for name in request.splits if name not in by_split]:
        raise UserError(
            f"--splits={unknown[0]}: {request.source} has no such split; it has "
            f"{', '.join(by_split)}"
        )
    return {name: by_split[name] for name in request.splits or by_split}


def _with_image(paths: Iterable[pathlib.Path]) -> Iterator[dict[str, bytes]]:
    """Yields the samples with an image; damaged files are reported later."""
    for path in paths:
        with contextlib.suppress(tar.DamagedTar):
            yield from (s for _, s in tar.read(path) if tar.image_in(s))


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

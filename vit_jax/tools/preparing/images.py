"""The job that converts an image folder to a TFDS data set."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from vit_jax.data import bands
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources import folder
from vit_jax.errors import UserError
from vit_jax.tools.preparing import build, metadata
from vit_jax.tools.preparing.examples import ExampleFormat
from vit_jax.tools.preparing.request import KINDS, Request
from vit_jax.tools.preparing.shards import Shard, Skipped, WrittenShard, divide


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Job: the unchanged content of the files, with label and path; see `build.Job`.

    Attributes:
      sources: files by split, in the order of the folder reader.
    """

    request: Request
    sources: Mapping[str, folder.FolderSource]
    shards: Sequence[Shard]
    plan: Mapping
    size: int
    unit = "records"

    @property
    def dataset(self) -> str:
        """TFDS name."""
        return self.request.name.dataset

    @property
    def format(self) -> ExampleFormat:
        """Features of the records."""
        return ExampleFormat(next(iter(self.sources.values())).class_names)

    def records(self, shard: Shard) -> Iterator[bytes | Skipped]:
        source, serialize = self.sources[shard.split], self.format.serializer()
        for i in range(shard.start, shard.stop):
            path = source.record_id(i)
            try:
                record = source[i]
                if self.request.decode:
                    bands.check(record["image"], self.request.max_megapixels)
            except DamagedImage as error:
                yield Skipped(path, "damaged image", str(error))
            except OSError as error:
                reason = f"cannot be read ({error.strerror})"
                yield Skipped(path, "damaged image", reason)
            else:
                yield serialize(record | {"path": os.fsencode(path)})

    def describe(
        self, folder: pathlib.Path, splits: Mapping[str, Sequence[WrittenShard]]
    ) -> None:
        text = "Made from a folder of images by vit_jax.prepare; their bytes are unchanged."
        features = self.format.features()
        metadata.write_info(folder, self.request.name, features, splits, text)


def open_images(request: Request) -> ImageFolder:
    """Returns the job that converts images in <source>/<split>/<class>/**/.

    Raises:
      UserError: the folder has another structure.
    """
    root = request.source
    splits = list(request.splits or folder.splits_of(root))
    if not splits:
        raise UserError(
            f"--from={root} has no folders with images: it must look like "
            f"{root}/train/<class>/*.jpg or {root}/<class>/*.jpg; for tar files with "
            "images set --dataset=webdataset"
        )
    classes_of = "train" if "train" in splits else splits[0]
    sources, shards, stats = {}, [], []
    for split in splits:
        source = sources[split] = folder.open_folder(str(root), split, classes_of)
        files = [_stat(source, i) for i in range(len(source))]
        size = sum(max(0, size) for _, size, _ in files)
        shards += divide(split, len(source), size, request.shard_bytes)
        stats += files
    total = sum(max(0, size) for _, size, _ in stats)
    _check_names(sources[classes_of].class_names)
    plan = request.plan() | {"splits": splits, "files": build.digest(stats)}
    return ImageFolder(request, sources, shards, plan, total)


def _stat(source: folder.FolderSource, i: int) -> tuple[str, int, int]:
    try:
        stat = os.stat(source.describe(i))
    except OSError:  # A broken link; reading it reports the error.
        return source.record_id(i), -1, -1
    return source.record_id(i), stat.st_size, stat.st_mtime_ns


def _check_names(names: Sequence[str]) -> None:
    """Checks that each name fits in a line of TFDS's label file."""
    for name in names:
        one_line = len(name.splitlines()) == 1 and name.isprintable()
        if name != name.strip() or not one_line:
            raise UserError(
                f"class folder {name!r} starts or ends with a space, or has characters "
                "that cannot be printed: rename it"
            )


KINDS["folder"] = open_images

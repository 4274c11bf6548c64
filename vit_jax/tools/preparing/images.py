"""The job of turning an image folder into a TFDS data set."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from vit_jax.data import decode
from vit_jax.data.sources import folder
from vit_jax.errors import UserError
from vit_jax.tools.preparing import build, metadata
from vit_jax.tools.preparing.metadata import DatasetName
from vit_jax.tools.preparing.shards import Shard, WrittenShard, divide


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Job: the files' content unchanged, with label and path; see `build.Job`.

    Attributes:
      name: name of the new data set, with a version.
      sources: split -> its files, in the folder reader's order.
      on_error: "raise" or "skip" for files that are no readable images.
      decode: whether each image is decoded, which detects damage.
    """

    name: DatasetName
    sources: Mapping[str, folder.FolderSource]
    on_error: str
    decode: bool
    shards: Sequence[Shard]
    plan: Mapping
    size: int

    @property
    def dataset(self) -> str:
        """TFDS name."""
        return self.name.dataset

    def records(self, shard: Shard, skipped: list[dict]) -> Iterator[bytes]:
        source = self.sources[shard.split]
        serialize = _serializer(source.class_names)
        for i in range(shard.start, shard.stop):
            try:
                record = source[i]
                if self.decode:
                    decode.decode(record["image"])
            except decode.DamagedImage as error:
                reason = str(error)
            except OSError as error:
                reason = f"cannot be read ({error.strerror})"
            else:
                path = os.fsencode(source.record_id(i))
                yield serialize(record["image"], record["label"], path)
                continue
            if self.on_error == "raise":
                raise UserError(
                    f"{source.describe(i)} {reason}: mend or remove it, or set "
                    "--on_error=skip to leave such images out"
                )
            note = {"record": source.record_id(i), "reason": reason}
            skipped.append({"split": shard.split, **note})

    def describe(
        self, folder: pathlib.Path, splits: Mapping[str, Sequence[WrittenShard]]
    ) -> None:
        features = _features(next(iter(self.sources.values())).class_names)
        text = (
            "Made of a folder of images by vit_jax.prepare; their bytes are unchanged."
        )
        metadata.write_info(folder, self.name, features, splits, text)


def open_images(
    root: pathlib.Path,
    name: DatasetName,
    split_names: Sequence[str],
    shard_bytes: int,
    on_error: str,
    decode: bool,
) -> ImageFolder:
    """Returns the job of turning a folder, root/<split>/<class>/**/, into a data set.

    Args:
      name: name of the new data set, with a version.
      split_names: folders to read; all if empty.
      shard_bytes: approximate size of a shard.
      on_error, decode: see `ImageFolder`.

    Raises:
      UserError: the folder has another layout.
    """
    if not root.is_dir():
        raise UserError(f"--from={root} is not a folder")
    splits = list(split_names or folder.splits_of(root))
    if not splits:
        raise UserError(
            f"--from={root} has no folders with images: it must look like "
            f"{root}/train/<class>/*.jpg or {root}/<class>/*.jpg"
        )
    classes_of = "train" if "train" in splits else splits[0]
    sources, shards, stats = {}, [], []
    for split in splits:
        source = sources[split] = folder.open_folder(str(root), split, classes_of)
        files = [_stat(source, i) for i in range(len(source))]
        size = sum(max(0, size) for _, size, _ in files)
        shards += divide(split, len(source), size, shard_bytes)
        stats += files
    total = sum(max(0, size) for _, size, _ in stats)
    _check_names(sources[classes_of].class_names)
    plan = {
        "kind": "folder",
        "source": str(root),
        "name": str(name),
        "splits": splits,
        "files": build.digest(stats),
        "shard_bytes": shard_bytes,
        "on_error": on_error,
        "decode": decode,
    }
    return ImageFolder(name, sources, on_error, decode, shards, plan, total)


def _stat(source: folder.FolderSource, i: int) -> tuple[str, int, int]:
    try:
        stat = os.stat(source.describe(i))
    except OSError:  # A broken link, which is reported when it is read.
        return source.record_id(i), -1, -1
    return source.record_id(i), stat.st_size, stat.st_mtime_ns


def _check_names(names: Sequence[str]) -> None:
    """Checks that each name fits a line of TFDS's label file."""
    for name in names:
        one_line = len(name.splitlines()) == 1 and name.isprintable()
        if name != name.strip() or not one_line:
            raise UserError(
                f"class folder {name!r} begins or ends with a space, or has characters "
                "that cannot be printed: rename it"
            )


def _features(class_names: Sequence[str]):
    import tensorflow_datasets as tfds

    return tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=list(class_names)),
            "path": tfds.features.Text(doc="File that the image was, in the folder."),
        }
    )


@functools.lru_cache(maxsize=1)
def _serializer(class_names: tuple[str, ...]):
    """Returns a function from image bytes, label and path bytes to a tf.train.Example."""
    from tensorflow_datasets.core import example_serializer

    specs = _features(class_names).get_serialized_info()
    serializer = example_serializer.ExampleSerializer(specs)

    def serialize(image, label, path):
        example = serializer.get_tf_example(
            {"image": image, "label": label, "path": path}
        )
        # Otherwise the order of a map's fields may differ between processes.
        return example.SerializeToString(deterministic=True)

    return serialize

"""TFDS data sets prepared as ArrayRecord, read without TensorFlow."""

import contextlib
import dataclasses
import functools
import json
import operator
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vit_jax.data import captions, decode, splits
from vit_jax.data.config import DataConfig
from vit_jax.data.fingerprint import Entries
from vit_jax.data.sources import SOURCES
from vit_jax.data.sources.arrays import ArraySource, small_in_memory
from vit_jax.data.sources.base import (
    Numbered,
    SourceType,
    check_known,
    default_split,
)
from vit_jax.errors import NoLabels, UserError


@dataclasses.dataclass(frozen=True)
class Feature:
    """Function that returns one feature of a record unchanged."""

    key: str

    def __call__(self, record: Mapping) -> object:
        return record[self.key]


@dataclasses.dataclass(frozen=True)
class TfdsSource(Numbered):
    """Records of a TFDS data set; images stay encoded.

    Attributes:
      records: features of each record, images encoded.
      image: function from a record to encoded bytes or a uint8 (H, W, C) array.
      label: function from a record to its class number; None if labels are not read.
      shards: file -> its number of records, and the bytes of its whole split.
      version: name and version of the data set.
      caption_key: feature of the captions, possibly nested, as in "captions.text"; ""
        if captions are not read.
      mask_key: feature of the masks; "" if masks are not read.
      target_names: features of the targets; () if targets are not read.
    """

    name: str
    records: Sequence
    image: Callable[[Mapping], object]
    label: Callable[[Mapping], int] | None
    class_names: tuple[str, ...]
    numbering: splits.Numbering
    shards: Mapping[os.PathLike, tuple[int, int]]
    version: str
    caption_key: str = ""
    mask_key: str = ""
    target_names: tuple[str, ...] = ()
    images = labels = None  # Not in memory.

    def __getitem__(self, i: int) -> dict:
        if not 0 <= i < len(self):
            raise IndexError(i)
        try:
            record = self.records[i]
        except Exception as error:  # The C++ reader has no error class.
            raise decode.DamagedImage(f"cannot be read ({error})") from error
        return self._named(record)

    def read(self, numbers: range) -> list[dict]:
        """Returns neighbouring records, each four times faster than one by one."""
        try:
            records = self.records.__getitems__(numbers)
        except Exception as error:
            raise decode.DamagedImage(f"cannot be read ({error})") from error
        return [self._named(record) for record in records]

    def read_feature(self, name: str) -> list | None:
        if name not in self.records[0]:
            return None
        numbers = range(len(self))
        parts = (numbers[start : start + 1000] for start in numbers[::1000])
        return [r[name] for part in parts for r in self.records.__getitems__(part)]

    def entries(self) -> Entries:
        # Only from metadata, which is the same on a disk and in a bucket.
        checksums = _checksums(next(iter(self.shards)).parent)
        sums = [
            zlib.crc32(f"{length} {checksums.get(path.name)} {size}".encode())
            for path, (length, size) in self.shards.items()
        ]
        names = [f"{self.version}/{path.name}" for path in self.shards]
        return Entries("shards", names, None, np.array(sums, np.int64))

    def _named(self, record: dict) -> dict:
        named = {"image": self.image(record)}
        if self.label is not None:
            named["label"] = int(self.label(record))
        if self.caption_key:
            path = self.caption_key.split(".")
            texts = functools.reduce(operator.getitem, path, record)
            named[captions.TEXT] = captions.of_value(texts)
        if self.mask_key:
            named["mask"] = record[self.mask_key]
        if self.target_names:
            named["targets"] = [record[name] for name in self.target_names]
        return named

    def known_targets(self) -> np.ndarray | None:
        if not self.target_names:
            return None
        return np.array(
            [np.ravel(self.read_feature(name)) for name in self.target_names]
        ).T


def open_tfds(
    name: str,
    data_dir: str,
    split: str,
    image: str | Callable[[Mapping], object],
    label: str | Callable[[Mapping], int] | None,
    *,
    title: str = "",
    caption_key: str = "",
    mask_key: str = "",
    target_names: Sequence[str] = (),
) -> TfdsSource:
    """Opens a prepared data set from only its files; raises as `SourceType.open`.

    Args:
      name: TFDS name, such as "cifar10", "eurosat/rgb", "eurosat/rgb:2.0.0" or
        "caltech101:3.*.*" for the newest of version 3.
      data_dir: folder or gs://... where it was prepared; "" is TFDS's default.
      split: split expression.
      image: feature with the image, or a function from a record to the image.
      label: feature with the class number, or a function from a record to it; None if
        labels are not read.
      title: name of the data set in messages; "" for `name`.
      caption_key, mask_key, target_names: attributes of `TfdsSource`.
    """
    builder = _builder(name, data_dir)
    features = builder.info.features
    image = _feature("image_key", image, name, features)
    if label is not None:
        label = _feature("label_key", label, name, features)
    if caption_key:
        _feature("caption_key", caption_key.split(".")[0], name, features)
    if mask_key:
        _feature("mask_key", mask_key, name, features)
    for target in target_names:
        _feature("target_key", target, name, features)
    sizes = {key: info.num_examples for key, info in builder.info.splits.items()}
    numbering = splits.Numbering.of(split, sizes, title or name)
    if any(part.step > 1 for _, part in numbering.parts):
        raise UserError(
            f"split {split!r}: TFDS can read only neighbouring records, which are "
            "shuffled; write for example train[80%:] or even_splits(train, 5)[4]"
        )

    used = [builder.info.splits[key] for key in dict(numbering.parts)]
    names = ()
    if isinstance(label, Feature):
        names = getattr(features[label.key], "names", None) or ()
    return TfdsSource(
        f"{title or name} {split}",
        _records(builder, numbering),
        image,
        label,
        tuple(names),
        numbering,
        _shards(name, used),
        builder.info.full_name,
        caption_key,
        mask_key,
        tuple(target_names),
    )


def _records(builder, numbering: splits.Numbering) -> Sequence:
    import tensorflow_datasets as tfds

    instructions = [
        tfds.core.ReadInstruction(key, from_=part.start, to=part.stop, unit="abs")
        for key, part in numbering.parts
        if len(part)
    ]
    # TFDS would decode every image with TensorFlow, even one that is not used.
    decoders = {
        key: tfds.decode.SkipDecoding()
        for key, feature in builder.info.features.items()
        if isinstance(feature, tfds.features.Image)
    }
    return builder.as_data_source(
        functools.reduce(operator.add, instructions), decoders=decoders
    )


def _shards(name: str, used: Sequence) -> dict[os.PathLike, tuple[int, int]]:
    """Returns, for each file of splits, its number of records and its split's bytes."""
    shards = {
        path: (length, info.num_bytes)
        for info in used
        for path, length in zip(info.filepaths, info.shard_lengths, strict=True)
    }
    for path in shards:
        # Checked now, because the reader opens a file when it needs it, possibly hours
        # later; but not in a bucket, where the check would cost a request per file.
        if "://" not in os.fspath(path) and not os.path.exists(path):
            raise UserError(f"data.name={name!r} lacks {path}: prepare it again")
    return shards


def _feature(key, feature, name, features):
    """Returns the function from a record to a feature, which must exist."""
    if callable(feature):
        return feature
    check_known(key, [feature], sorted(features), name, "feature")
    # ClassLabel is a scalar too. A feature with a shape may be an image.
    if key == "label_key" and features[feature].shape != ():
        raise NoLabels(
            f"data.{key}={feature!r}: this feature of {name} is not a class "
            f"number but {type(features[feature]).__name__}; choose another of "
            f"{', '.join(sorted(features))}"
        )
    return Feature(feature)


def _checksums(folder) -> dict[str, str]:
    """Returns the checksum of each file of a set prepared by vit_jax.prepare, else {}."""
    try:
        parts = json.loads((folder / "manifest.json").read_text())["splits"].values()
        return {s["file"]: s["sha256"] for part in parts for s in part["shards"]}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # No manifest, or another format.
        return {}


def find_prepared(name: str, data_dir: str):
    """Returns TFDS's builder of a prepared data set; None if it does not exist.

    Args:
      name, data_dir: arguments of `open_tfds`.

    Raises:
      UserError: the data set is damaged, or the folder is in a bucket and packages for
        buckets are not installed.
    """
    import tensorflow_datasets as tfds
    from google.protobuf import json_format

    find = tfds.core.read_only_builder.builder_from_files
    try:
        with no_foreign_features(name):
            return find(name, data_dir=os.path.expanduser(data_dir) or None)
    except UserError:
        raise
    except ImportError as error:  # Raised by gcsfs, which reads buckets.
        raise UserError(
            f"data.data_dir={data_dir!r}: paths in a bucket need more packages: "
            "pip install -e '.[gcs]' in the clone"
        ) from error
    except (tfds.core.DatasetNotFoundError, ValueError):
        return None
    except json_format.ParseError as error:
        raise UserError(
            f"{name} in {data_dir or 'the default folder'} is damaged: its "
            f"dataset_info.json cannot be read ({str(error).splitlines()[0]}); copy or "
            "prepare it again"
        ) from error


@contextlib.contextmanager
def no_foreign_features(name: str) -> Iterator[None]:
    """Keeps TFDS from importing modules that a data set names in its features.json.

    Feature classes of TFDS and those that are already imported can still be used.

    Raises:
      UserError: the data set names another class.
    """
    from tensorflow_datasets.core.features.feature import FeatureConnector

    resolve = FeatureConnector.cls_from_name

    def resolve_known(python_class_name):
        known = python_class_name in FeatureConnector._registered_features
        if not known and not python_class_name.startswith("tensorflow_datasets."):
            raise UserError(
                f"{name}: its features.json names {python_class_name!r}, a class that is "
                "not of TFDS: if you trust its code, import it before the set is "
                "opened, or prepare the set without that feature"
            )
        return resolve(python_class_name)

    FeatureConnector.cls_from_name = resolve_known
    try:
        yield
    finally:
        FeatureConnector.cls_from_name = resolve


def prepare_command(name: str, data_dir: str) -> str:
    """Returns the command that prepares a data set."""
    if name.partition(":")[0] == "imagenet21k":  # TFDS cannot make it.
        return (
            "register at image-net.org, unpack the archive of each class to "
            "FOLDER/full/<class>, then: python -m vit_jax.prepare --dataset=folder "
            f"--from=FOLDER --name=imagenet21k --data_dir={data_dir}"
        )
    name = name.split(":")[0] if "*" in name else name  # TFDS chooses the version.
    return f"python -m vit_jax.prepare --dataset={name} --data_dir={data_dir}"


def is_readable(builder) -> bool:
    """Returns whether a data set was prepared in the only format with random access."""
    formats = builder.info.available_file_formats()
    return any(each.value == "array_record" for each in formats)


def _builder(name: str, data_dir: str):
    import tensorflow_datasets as tfds

    where = os.path.expanduser(data_dir) or tfds.core.constants.DATA_DIR
    build = prepare_command(name, where)
    builder = find_prepared(name, data_dir)
    if builder is None:
        others = ", ".join(map(repr, sorted(SOURCES)))
        raise UserError(
            f"data.name={name!r}: no such prepared TFDS data set in {where} "
            f"(the other names are {others}). To prepare: {build}"
        )
    if not is_readable(builder):
        formats = builder.info.available_file_formats()
        shown = ", ".join(sorted(f.value for f in formats)) or "an unknown format"
        raise UserError(
            f"data.name={name!r} in {builder.data_dir} is prepared as {shown}, but "
            f"only array_record can be read in any order. To prepare: {build}"
        )
    return builder


def _of_config(data: DataConfig, split: str) -> TfdsSource | ArraySource:
    label_key = data.label_key if data.has_labels else None
    where = data.name, data.data_dir, split, data.image_key, label_key
    more = {"caption_key": data.caption_key, "mask_key": data.mask_key}
    more["target_names"] = data.targets
    return small_in_memory(open_tfds(*where, **more), data)


def _test_split(name: str) -> str:
    """Returns the split that the paper tests on; "" for data sets of no paper."""
    from vit_jax.data import catalogue  # It imports this file for its commands.

    entry = catalogue.ENTRIES.get(name.partition(":")[0])
    return entry.splits.get("test", "") if entry else ""


# Not in SOURCES, because it opens every name that no other kind has.
TFDS = SourceType(
    open=_of_config,
    help="A prepared TFDS data set, such as cifar10 or eurosat/rgb:2.0.0.",
    has_masks=True,
    eval_splits=default_split(_test_split),
)

"""TFDS's description of a data set (dataset_info.json, features.json, label files)."""

import copy
import dataclasses
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence

from vit_jax.data import tfds_source
from vit_jax.data.preparing.shards import Written
from vit_jax.errors import UserError

_NAME = re.compile(
    r"(?P<dataset>[a-zA-Z]\w*)(/(?P<config>[\w.=+-]+))?"
    r"(:(?P<version>\d+\.\d+\.\d+))?"
)


@dataclasses.dataclass(frozen=True)
class Name:
    """A TFDS name, as "cifar10", "eurosat/rgb" or "eurosat/rgb:2.0.0"."""

    dataset: str
    config: str
    version: str

    @classmethod
    def parse(cls, text: str, flag: str = "--dataset") -> "Name":
        """Reads a name; "" stands for a part that is not stated."""
        match = _NAME.fullmatch(text)
        if not match:
            raise UserError(
                f"{flag}={text!r} is not a data set's name: use "
                "name, name/config, name:1.0.0 or name/config:1.0.0"
            )
        return cls(*(match[key] or "" for key in ("dataset", "config", "version")))

    def folder(self, data_dir: pathlib.Path) -> pathlib.Path:
        """Returns where TFDS keeps this version of it."""
        return data_dir / self.dataset / self.config / self.version

    def __str__(self) -> str:
        text = f"{self.dataset}/{self.config}" if self.config else self.dataset
        return f"{text}:{self.version}" if self.version else text


@dataclasses.dataclass(frozen=True)
class Info:
    """What a prepared folder says of itself.

    Attributes:
      name: with configuration and version.
      file_format: "tfrecord", "array_record", ...
      splits: split name -> (path, number of records) of its files in order.
    """

    name: Name
    file_format: str
    splits: Mapping[str, Sequence[tuple[pathlib.Path, int]]]

    @property
    def dataset(self) -> str:
        """Name without configuration and version."""
        return self.name.dataset


def find(source: pathlib.Path, name: Name) -> pathlib.Path:
    """Finds a prepared data set.

    Args:
      source: its own folder, or the `data_dir` it lies in.
      name: which.

    Returns:
      Its folder, the one with dataset_info.json.

    Raises:
      UserError: there is none, or it is another data set.
    """
    if (source / "dataset_info.json").is_file():
        found = read_info(source).name
        for part in ("dataset", "config", "version"):
            stated = getattr(name, part)
            if stated and stated != getattr(found, part):
                raise UserError(
                    f"--dataset={name}, but --from={source} holds {found}: "
                    f"set --dataset={found}"
                )
        return source
    return find_prepared(source, name)


def find_prepared(data_dir: pathlib.Path, name: Name) -> pathlib.Path:
    """Returns the folder of a prepared set; the newest version if none is stated.

    Raises:
      UserError: there is none, or it is damaged.
    """
    builder = tfds_source.find_prepared(str(name), str(data_dir))
    if builder is None:
        raise UserError(
            f"{data_dir} holds no readable {name}: state the data_dir under which it "
            "lies, or the folder with its dataset_info.json and features.json (which "
            "TFDS writes since version 4)"
        )
    return pathlib.Path(builder.data_dir)


def read_info(folder: pathlib.Path) -> Info:
    """Reads the description of a prepared folder.

    Raises:
      UserError: it cannot be read.
    """
    import tensorflow_datasets as tfds

    try:
        with tfds_source.no_foreign_features(str(folder)):
            builder = tfds.builder_from_directory(folder)
    except UserError:
        raise
    except Exception as error:  # JSON, protocol buffers, features: many kinds.
        line = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder} cannot be read as a TFDS data set ({line}): it needs "
            "dataset_info.json and features.json (which TFDS writes since version 4)"
        ) from error
    info = builder.info
    splits = {
        name: [
            (pathlib.Path(path), int(length))
            for path, length in zip(split.filepaths, split.shard_lengths, strict=True)
        ]
        for name, split in info.splits.items()
    }
    return Info(
        name=Name(info.name, info.config_name or "", str(info.version)),
        # Old preparations do not say so.
        file_format=info.file_format.value if info.file_format else "tfrecord",
        splits=splits,
    )


def convert_info(
    source: pathlib.Path,
    folder: pathlib.Path,
    splits: Mapping[str, Sequence[Written]],
) -> None:
    """Writes dataset_info.json: the source's, but for the format and the files."""
    from tensorflow_datasets.core import dataset_info, naming

    proto = dataset_info.read_proto_from_builder_dir(source)
    proto.file_format = "array_record"
    del proto.alternative_file_formats[:]
    kept = [copy.deepcopy(split) for split in proto.splits if split.name in splits]
    del proto.splits[:]
    for split in kept:
        written = splits[split.name]
        split.filepath_template = naming.DEFAULT_FILENAME_TEMPLATE
        split.shard_lengths[:] = [shard.records for shard in written]
        split.num_bytes = sum(shard.record_bytes for shard in written)
        proto.splits.append(split)
    dataset_info.write_dataset_info_proto(proto, dataset_info_dir=folder)


def copy_default_config(
    source: pathlib.Path, data_dir: pathlib.Path, name: Name
) -> None:
    """Keeps TFDS's note of which configuration a bare name means."""
    if name.config:
        note = source.parent.parent / ".config" / "metadata.json"
        copy_to = data_dir / name.dataset / ".config" / "metadata.json"
        if note.is_file() and not copy_to.exists():
            copy_to.parent.mkdir(exist_ok=True)
            shutil.copyfile(note, copy_to)


def write_info(
    folder: pathlib.Path,
    name: Name,
    features,
    splits: Mapping[str, Sequence[Written]],
    description: str,
) -> None:
    """Writes all metadata of a data set that TFDS does not know.

    Args:
      folder: of its files.
      name: with a version.
      features: `tfds.features.FeaturesDict` with an image and a label.
      splits: split name -> its shards.
      description: a sentence for dataset_info.json.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import dataset_info

    identity = dataset_info.DatasetIdentity(
        name=name.dataset,
        version=tfds.core.Version(name.version),
        data_dir=str(folder),
        module_name="",
        config_name=name.config or None,
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        description=description,
        features=features,
        supervised_keys=("image", "label"),
    )
    info.set_file_format("array_record")
    info.set_splits(
        tfds.core.splits.SplitDict(
            [
                tfds.core.SplitInfo(
                    name=split,
                    shard_lengths=[shard.records for shard in written],
                    num_bytes=sum(shard.record_bytes for shard in written),
                )
                for split, written in splits.items()
            ]
        )
    )
    info.write_to_directory(folder)

"""Files next to the records: TFDS's description of a data set, and the manifest.

TFDS reads dataset_info.json, features.json and label files. manifest.json has counts
and checksums of all files, to verify the set later.
"""

import collections
import copy
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

from vit_jax.command_line.files import replace_bytes
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.errors import UserError
from vit_jax.tools.preparing import shards
from vit_jax.tools.preparing.shards import WrittenShard

MANIFEST = "manifest.json"
_FORMAT = 1
_VERSIONS_OF = ("vit_jax", "tensorflow-datasets", "array_record")

_NAME = re.compile(
    r"(?P<dataset>[a-zA-Z]\w*)(/(?P<config>[\w.=+-]+))?"
    r"(:(?P<version>\d+\.\d+\.\d+))?"
)


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """A TFDS name, such as "cifar10", "eurosat/rgb" or "eurosat/rgb:2.0.0"."""

    dataset: str
    config: str
    version: str

    @classmethod
    def parse(cls, text: str, flag: str = "--dataset") -> "DatasetName":
        """Parses a name; a missing part is "".

        Raises:
          UserError: `text` is not a name; the message names `flag`.
        """
        match = _NAME.fullmatch(text)
        if not match:
            raise UserError(
                f"{flag}={text!r} is not a data set's name: use "
                "name, name/config, name:1.0.0 or name/config:1.0.0"
            )
        return cls(*(match[key] or "" for key in ("dataset", "config", "version")))

    def folder(self, data_dir: pathlib.Path) -> pathlib.Path:
        """Returns the folder in which TFDS keeps this version."""
        return data_dir / self.dataset / self.config / self.version

    def __str__(self) -> str:
        text = f"{self.dataset}/{self.config}" if self.config else self.dataset
        return f"{text}:{self.version}" if self.version else text


@dataclasses.dataclass(frozen=True)
class PreparedInfo:
    """TFDS's description of a prepared folder.

    Attributes:
      file_format: format of the records: "tfrecord", "array_record", ...
      splits: (path, number of records) of the files in order, by split name.
    """

    name: DatasetName
    file_format: str
    splits: Mapping[str, Sequence[tuple[pathlib.Path, int]]]


def find(source: pathlib.Path, name: DatasetName) -> pathlib.Path:
    """Returns the folder with dataset_info.json of a prepared data set.

    Args:
      source: the folder with dataset_info.json, or the `data_dir` above it.
      name: name of the set; empty parts match anything.

    Raises:
      UserError: the set does not exist, or the folder holds another one.
    """
    if not (source / "dataset_info.json").is_file():
        return find_prepared(source, name)
    held = read_info(source).name
    for part in ("dataset", "config", "version"):
        wanted = getattr(name, part)
        if wanted and wanted != getattr(held, part):
            raise UserError(
                f"--dataset={name}, but --from={source} holds {held}: "
                f"set --dataset={held}"
            )
    return source


def find_prepared(data_dir: pathlib.Path, name: DatasetName) -> pathlib.Path:
    """Returns the folder of a prepared set, by default of the newest version.

    Raises:
      UserError: the set does not exist or is damaged.
    """
    builder = tfds_source.find_prepared(str(name), str(data_dir))
    if builder is None:
        raise UserError(
            f"{data_dir} holds no readable {name}: give the data_dir above it, or the "
            "folder with its dataset_info.json and features.json (which TFDS writes "
            "since version 4)"
        )
    return pathlib.Path(builder.data_dir)


def read_info(folder: pathlib.Path) -> PreparedInfo:
    """Reads the description of a prepared folder.

    Raises:
      UserError: the description cannot be read.
    """
    import tensorflow_datasets as tfds

    try:
        with tfds_source.no_foreign_features(str(folder)):
            builder = tfds.builder_from_directory(folder)
    except UserError:
        raise
    except Exception as error:  # Parsers of JSON, protocol buffers and features differ.
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
    return PreparedInfo(
        name=DatasetName(info.name, info.config_name or "", str(info.version)),
        # Old preparations do not record it.
        file_format=info.file_format.value if info.file_format else "tfrecord",
        splits=splits,
    )


def convert_info(
    source: pathlib.Path,
    folder: pathlib.Path,
    splits: Mapping[str, Sequence[WrittenShard]],
) -> None:
    """Writes the source's dataset_info.json with another format and other files."""
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
    source: pathlib.Path, data_dir: pathlib.Path, name: DatasetName
) -> None:
    """Copies TFDS's note on the default configuration of a data set."""
    if name.config:
        note = source.parent.parent / ".config" / "metadata.json"
        copy_to = data_dir / name.dataset / ".config" / "metadata.json"
        if note.is_file() and not copy_to.exists():
            copy_to.parent.mkdir(exist_ok=True)
            replace_bytes(copy_to, note.read_bytes())


def write_info(
    folder: pathlib.Path,
    name: DatasetName,
    features,
    splits: Mapping[str, Sequence[WrittenShard]],
    description: str,
) -> None:
    """Writes TFDS's description of a data set for which TFDS has no builder.

    `features` is a `tfds.features.FeaturesDict` with an image and perhaps a label;
    `description` is a sentence for dataset_info.json.
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
        supervised_keys=("image", "label") if "label" in features else None,
    )
    info.set_file_format("array_record")
    infos = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=[shard.records for shard in written],
            num_bytes=sum(shard.record_bytes for shard in written),
        )
        for split, written in splits.items()
    ]
    info.set_splits(tfds.core.splits.SplitDict(infos))
    info.write_to_directory(folder)


def save_json(path: pathlib.Path, value) -> None:
    """Writes a JSON file that is complete or absent, even after a power cut.

    Raises:
      UserError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{shards.PART}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise shards.cannot_write(path, error) from error


def write_manifest(
    folder: pathlib.Path,
    made_from: Mapping,
    splits: Mapping[str, Sequence[WrittenShard]],
    skipped: Sequence[Mapping],
) -> None:
    """Writes the manifest of a folder whose other files are complete.

    Args:
      folder: folder of the data set.
      made_from: input and options of the data set, as plain values.
      splits: shards in order, by split name.
      skipped: {"split", "record", "kind", "reason"} of each skipped record.
    """
    known = {shard.file for written in splits.values() for shard in written} | {
        MANIFEST
    }
    others = sorted(p for p in folder.iterdir() if p.is_file())
    content = {
        "format": _FORMAT,
        "made_from": dict(made_from),
        "versions": {name: _version(name) for name in _VERSIONS_OF},
        "splits": {
            name: {
                "records": sum(shard.records for shard in written),
                "shards": [dataclasses.asdict(shard) for shard in written],
            }
            for name, written in splits.items()
        },
        "skipped": list(skipped),
        "skipped_counts": collections.Counter(note["kind"] for note in skipped),
        "other_files": {p.name: _sha256(p) for p in others if p.name not in known},
    }
    save_json(folder / MANIFEST, content)


def verify(
    folder: pathlib.Path, progress: Callable[[int], object] = lambda n: None
) -> dict:
    """Checks every file of a data set against its manifest; returns the manifest.

    `progress` is called with the number of records of each checked shard.

    Raises:
      UserError: the manifest is missing, or a file differs from it.
    """
    content = load_manifest(folder)
    wrong = []
    for name, digest in content["other_files"].items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif _sha256(path) != digest:
            wrong.append(f"{name} has changed")
    for name, split in content["splits"].items():
        for expected in split["shards"]:
            try:
                actual = dataclasses.asdict(shards.check(folder / expected["file"]))
            except shards.DamagedShard as error:
                wrong.append(f"{expected['file']}: {error}")
            else:
                wrong += _differences(expected, actual)
            progress(expected["records"])
        if split["records"] != sum(s["records"] for s in split["shards"]):
            wrong.append(f"{MANIFEST} contradicts itself about split {name}")
    wrong += _metadata_differences(folder, content)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"{folder} has changed since it was prepared: {wrong[0]}{more}; remove it "
            "and prepare it again"
        )
    return content


def load_manifest(folder: pathlib.Path) -> dict:
    """Reads the manifest.

    Raises:
      UserError: the manifest is missing, damaged or in another format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} has no {MANIFEST} to verify it by: it was not prepared by "
            "python -m vit_jax.prepare"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): remove {folder} and prepare it again"
        ) from error
    if version != _FORMAT:
        raise UserError(f"{path} has format {version}, not {_FORMAT}")
    return content


def _differences(expected: Mapping, actual: Mapping) -> list[str]:
    for key in ("records", "file_bytes", "sha256", "records_crc32c"):
        if expected[key] != actual[key]:
            was, now = expected[key], actual[key]
            return [f"{expected['file']} has {key} {now}, not {was}"]
    return []


def _metadata_differences(folder: pathlib.Path, content: Mapping) -> list[str]:
    """Compares the counts in the manifest with those in dataset_info.json."""
    try:
        info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        lengths = {
            s["name"]: [int(n) for n in s["shardLengths"]] for s in info["splits"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"dataset_info.json cannot be read ({error})"]
    counted = {
        name: [shard["records"] for shard in split["shards"]]
        for name, split in content["splits"].items()
    }
    return [] if lengths == counted else ["dataset_info.json has other counts"]


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # For a checkout that was not installed.

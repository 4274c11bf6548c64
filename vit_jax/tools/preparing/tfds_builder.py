"""Data sets that TFDS downloads and prepares; most of them need TensorFlow."""

import collections
import difflib
import importlib
import importlib.util
import pathlib
import re
import shutil
from collections.abc import Sequence

from vit_jax.command_line import progress
from vit_jax.errors import UserError
from vit_jax.tools.preparing import metadata, shards
from vit_jax.tools.preparing.build import begin, refuse_existing
from vit_jax.tools.preparing.metadata import DatasetName
from vit_jax.tools.preparing.shards import WrittenShard

_INSTALL = "pip install -e '.[prepare]' in the clone"


def build_with_tfds(
    name: DatasetName,
    data_dir: pathlib.Path,
    *,
    imports: Sequence[str] = (),
    manual_dir: str = "",
    shard_bytes: int = 2**28,
) -> tuple[pathlib.Path, dict]:
    """Runs TFDS's download and preparation, checks the set and renames it.

    Downloads stay in data_dir/downloads, even after an interruption. TFDS cannot resume
    a preparation, which therefore starts from the beginning.

    Args:
      name: name of the set; the newest version if its version is "".
      data_dir: folder of the prepared sets.
      imports: Python modules with the user's builders.
      manual_dir: folder of files that the user has to download; "" for
        data_dir/downloads/manual.
      shard_bytes: approximate size of a shard.

    Returns:
      The set's folder, and its manifest.

    Raises:
      Exists: the set exists and was made with these arguments.
      UserError: the set is unknown, TensorFlow is missing, a file that the user has
        to download is missing, a download fails, or the disk is full.
    """
    _import_all(imports)
    builder_class = _find(name)
    _need_tensorflow(name, builder_class)
    builder = _open(name, builder_class, data_dir)
    config = builder.builder_config.name if builder.builder_config else ""
    full = DatasetName(builder.name, config, str(builder.version))
    target = full.folder(data_dir)
    plan = {"kind": "tfds", "name": str(full), "shard_bytes": shard_bytes}
    refuse_existing(target, plan)
    manual = pathlib.Path(manual_dir or data_dir / "downloads" / "manual").expanduser()
    fetched = manual.is_dir() and any(manual.iterdir())
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS and not fetched:
        raise _fetch_by_hand(builder, full, manual)
    with begin(target, plan) as staging:
        inner = staging.folder / "tfds"
        made = full.folder(inner)
        if not (staging.folder / metadata.MANIFEST).exists():
            if not (made / metadata.MANIFEST).exists():
                _drop_unfinished(made)
                builder = _open(full, builder_class, inner)
                _prepare(builder, data_dir / "downloads", full, manual, shard_bytes)
                metadata.write_manifest(made, plan, _count(made, staging.folder), [])
            _move_up(made, staging.folder)
        # This file contains the name of the default configuration.
        default = inner / full.dataset / ".config"
        if default.is_dir():
            common = data_dir / full.dataset / ".config"
            shutil.copytree(default, common, dirs_exist_ok=True)
        shutil.rmtree(inner, ignore_errors=True)
        return target, staging.finish()


def _count(made: pathlib.Path, staging: pathlib.Path) -> dict[str, list]:
    """Reads the files that TFDS wrote; returns the shards of each split."""
    info = metadata.read_info(made)
    splits = collections.defaultdict(list)
    total = sum(n for files in info.splits.values() for _, n in files)
    with progress.bar(total, "verify", "records") as bar:
        for name, files in info.splits.items():
            for path, length in files:
                splits[name].append(_check(path, length, staging))
                bar.update(length)
    return splits


def _check(path: pathlib.Path, length: int, staging: pathlib.Path) -> WrittenShard:
    try:
        shard = shards.check(path)
    except shards.DamagedShard as error:
        raise UserError(f"{path} {error}: remove {staging}") from error
    if shard.records != length:
        raise UserError(
            f"{path} has {shard.records} records, not {length}: remove {staging} and try "
            "again"
        )
    return shard


def _move_up(made: pathlib.Path, folder: pathlib.Path) -> None:
    """Moves a set's files, with the manifest last, which marks the set as complete."""
    for path in sorted(made.iterdir(), key=lambda path: path.name == metadata.MANIFEST):
        path.rename(folder / path.name)


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"--imports={module}: {error}; is it on PYTHONPATH?"
            ) from error


def _find(name: DatasetName):
    import tensorflow_datasets as tfds

    try:
        return tfds.builder_cls(name.dataset)
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        near = difflib.get_close_matches(name.dataset, known, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"--dataset={name}: TFDS has no such set; {hint}Add --imports=MODULE for "
            "your builder, or --from=FOLDER for a prepared TFRecord set"
        ) from error
    except ImportError as error:
        raise _missing_module(name, error) from error


def _need_tensorflow(name, builder_class) -> None:
    of_tfds = builder_class.__module__.startswith("tensorflow_datasets.")
    if of_tfds and importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            f"--dataset={name}: TFDS needs TensorFlow to prepare it: {_INSTALL} "
            "(training does not need it). To convert an existing TFRecord preparation "
            "without it, add --from=FOLDER"
        )


def _missing_module(name, error: ImportError) -> UserError:
    # TFDS may have wrapped it in an error with a text that contains a whole example.
    match = re.search(r"No module named '([\w.]+)'", str(error))
    missing = error.name or (match[1] if match else str(error)[-200:])
    install = _INSTALL if missing.startswith("tensorflow") else f"pip install {missing}"
    return UserError(f"--dataset={name} needs {missing} to be prepared: {install}")


def _open(name, builder_class, data_dir):
    """Returns a builder that writes to a folder in data_dir."""
    known = sorted(builder_class.builder_configs)
    if name.config and name.config not in known:
        raise UserError(
            f"--dataset={name}: no configuration {name.config!r}; "
            f"it has {', '.join(known) or 'none'}"
        )
    try:
        return builder_class(
            data_dir=data_dir,
            config=name.config or None,
            version=name.version or None,
            file_format="array_record",
        )
    except ImportError as error:
        raise _missing_module(name, error) from error
    except (ValueError, AssertionError) as error:
        line = " ".join(str(error).split())[:300]
        raise UserError(f"--dataset={name}: {line}") from error


def _fetch_by_hand(builder, name, manual) -> UserError:
    text = " ".join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())
    return UserError(
        f"--dataset={name} needs files that you have to download yourself; put them in "
        f"{manual} (or set --manual_dir). TFDS says: {text}"
    )


def _drop_unfinished(made: pathlib.Path) -> None:
    """Removes files of an interrupted preparation, which TFDS would not reuse."""
    for path in made.parent.glob("incomplete.*"):
        shutil.rmtree(path)
    for path in made.glob(f"*{shards.PART}"):
        path.unlink()


def _prepare(builder, downloads, name, manual, shard_bytes):
    """Runs TFDS; errors that the user can fix become UserErrors."""
    import tensorflow_datasets as tfds

    config = tfds.download.DownloadConfig(
        manual_dir=str(manual),
        try_download_gcs=False,  # Prepared sets on GCS are TFRecord.
        min_shard_size=shard_bytes // 2,
        max_shard_size=shard_bytes,
    )
    try:
        builder.download_and_prepare(
            download_dir=str(downloads), download_config=config
        )
    except ImportError as error:
        raise _missing_module(name, error) from error
    except Exception as error:  # Builders raise many types of exceptions.
        line = " ".join(str(error).split())[:300]
        if builder.MANUAL_DOWNLOAD_INSTRUCTIONS and str(manual) in str(error):
            missing = _fetch_by_hand(builder, name, manual)
            raise UserError(f"{missing} (it failed with: {line})") from error
        kind = type(error).__name__
        if "No space left" in line or "File too large" in line or "disk space" in line:
            raise UserError(
                f"--dataset={name}: no room on the disk ({line}); downloads are kept: "
                "make room and repeat the command"
            ) from error
        if kind in ("DownloadError", "NonMatchingChecksumError", "ConnectionError"):
            raise UserError(f"--dataset={name}: download failed ({line})") from error
        raise

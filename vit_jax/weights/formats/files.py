"""Reads weight files of every kind, recognised by content, as one dict of arrays.

Also writes every .safetensors file of this project.
"""

import dataclasses
import json
import math
import mmap
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.errors import UserError
from vit_jax.weights.formats import flax_file, torch_file

# File names in a folder, best first; after these, any single file with a known suffix.
_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "flax_model.msgpack.index.json",
    "flax_model.msgpack",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_SUFFIXES = (".safetensors", ".npz", ".bin", ".pth", ".pt", ".msgpack")

# JSON files with these names describe the weights if they have one of these keys.
ADAPTER = "adapter_config.json"
_SIDECARS = {
    "config.json": ("architectures", "model_type", "architecture", "pretrained_cfg"),
    "open_clip_config.json": ("model_cfg",),
    ADAPTER: ("peft_type",),
    "processor_config.json": ("image_processor",),
    "preprocessor_config.json": ("image_mean", "size", "do_resize", "do_normalize"),
}

# First bytes of files that are often mistaken for weights.
_HINTS = {
    b"version https://git-lfs": "it is a Git LFS pointer: run `git lfs pull` there",
    b"<": "it is a web page: download the file itself",
}

# float16 and bfloat16 become float32, which holds all their values.
_WIDENED = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Content of a file or folder, under the names in the file.

    Attributes:
      flat: arrays by name; those of a safetensors file may be read-only views of the
        mapped file, which must not be truncated meanwhile.
      metadata: metadata in the safetensors header.
      sidecars: content of the JSON files that describe the weights, by file name.
      path: path of the file or folder.
      image_size: height and width in pixels that the caller assumes if the file does
        not determine them; None if unknown.
      use_ema: whether averaged arrays are read instead of the raw ones.
      notes: a line for each thing that was left out.
    """

    flat: dict[str, np.ndarray]
    metadata: dict[str, str]
    sidecars: dict[str, dict]
    path: str
    image_size: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    use_ema: bool = True

    @property
    def config(self) -> dict:
        """Content of config.json; empty without one."""
        return self.sidecars.get("config.json", {})


def read(path: str | os.PathLike, *, use_ema: bool = True) -> Tensors:
    """Reads an .npz, .safetensors, PyTorch or Flax file, or a folder with one model.

    Args:
      path: local path of a file, of a folder with one such file, or of a folder with the
        shards of one model and their index.
      use_ema: whether averaged arrays are read instead of the raw ones.

    Returns:
      The content; float16 and bfloat16 are widened to float32.

    Raises:
      UserError: there are no weights or more than one model, or a file is damaged.
    """
    path = pathlib.Path(path)
    parts, indexed = _folder(path) if path.is_dir() else ([path], ())
    flat, metadata, described, notes = {}, {}, False, []
    for part in parts:
        kind, arrays, header = _read_file(part, use_ema, notes.append)
        flat |= {name: _widen(value) for name, value in arrays.items()}
        metadata |= header
        described |= kind != "npz"
    # For an array with several names, safetensors.torch.save_model keeps one of them.
    flat |= {n: flat[kept] for n, kept in metadata.items() if kept in flat}
    if missing := sorted(set(indexed) - flat.keys()):
        raise UserError(
            f"{path} lacks {len(missing)} arrays that its index names, such as "
            f"{missing[0]}: download all its parts of one version"
        )
    if not flat:
        raise UserError(f"{path} holds no arrays: give a file with weights")
    try:
        flat = flax_file.torch_names(flat)
    except ValueError as error:
        raise UserError(f"{path} is not a model of transformers: {error}") from error
    folder = path if path.is_dir() else path.parent
    sidecars = _sidecars(folder) if described else {}
    return Tensors(
        flat, metadata, sidecars, str(path), notes=tuple(notes), use_ema=use_ema
    )


def write_safetensors(
    path: str | os.PathLike,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes a .safetensors file atomically, and reads it back to compare.

    Raises:
      UserError: the file cannot be written, or other numbers are read back.
    """
    # safetensors 0.8.0 writes memory in its physical order, which garbles transposed
    # views.
    arrays = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    path = pathlib.Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        safetensors.numpy.save_file(arrays, part, dict(metadata))
        with safetensors.safe_open(part, framework="np") as file:
            for name, value in arrays.items():
                if file.get_tensor(name).tobytes() != value.tobytes():
                    raise UserError(
                        f"{path} cannot be written: {name} differs when it is read back; "
                        "check the disk and the version of safetensors"
                    )
        os.replace(part, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def write_folder(
    folder: str | os.PathLike,
    arrays: Mapping[str, np.ndarray],
    contents: Mapping[str, dict],
    weights: str = "model.safetensors",
) -> None:
    """Writes weights for PyTorch libraries, and JSON files, to an existing folder.

    Raises:
      UserError: the weights cannot be written, or other numbers are read back.
    """
    folder = pathlib.Path(folder)
    write_safetensors(folder / weights, arrays, {"format": "pt"})
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _folder(path: pathlib.Path) -> tuple[list[pathlib.Path], tuple[str, ...]]:
    """Returns the weight files of a folder, and the array names in their index."""
    for name in _FOLDER:
        file = path / name
        if file.is_file() and name.endswith(".index.json"):
            parts = _json(file).get("weight_map")
            if not isinstance(parts, dict) or not all(
                isinstance(part, str) and part == pathlib.PurePath(part).name
                for part in parts.values()
            ):
                raise UserError(
                    f"{file} has no weight_map from names to files of this folder: "
                    "download it again"
                )
            shards = [path / part for part in sorted(set(parts.values()))]
            if lost := [shard.name for shard in shards if not shard.exists()]:
                raise UserError(
                    f"{path} lacks {len(lost)} of the {len(shards)} files that {name} "
                    f"names, such as {lost[0]}: download all of them"
                )
            return shards, tuple(parts)
        if file.is_file():
            return [file], ()
    files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in _SUFFIXES)
    if not files:
        raise UserError(
            f"{path} holds no weights ({', '.join(_SUFFIXES)}): give the workdir of a "
            "finished run, a file with weights or a folder with one"
        )
    if len(files) > 1:
        raise UserError(
            f"{path} holds {', '.join(p.name for p in files)}: give the path of one"
        )
    return files, ()


def _read_file(
    path: pathlib.Path, use_ema: bool, tell: Callable[[str], None]
) -> tuple[str, dict[str, np.ndarray], dict[str, str]]:
    """Returns the kind, the arrays and the header of one file."""
    kind = "weights"
    try:
        kind = _kind(path)
        if kind == "safetensors":
            with safetensors.safe_open(path, framework="np") as file:
                mapped = _map(path)
                names = file.keys()
                arrays = {name: _array(file, name, path, mapped) for name in names}
                return kind, arrays, file.metadata() or {}
        if kind == "npz":
            with zipfile.ZipFile(path) as archive:
                expanded = sum(member.file_size for member in archive.infolist())
            torch_file.check_expansion(expanded, path.stat().st_size, "its arrays")
            with np.load(path, allow_pickle=False) as file:
                return kind, dict(file), {}
        if kind == "msgpack":
            return kind, flax_file.read(path), {}
    except UserError:
        raise
    except Exception as error:  # A damaged or malicious header can raise anything.
        what = f".{kind} checkpoint" if kind != "weights" else "weights file"
        raise UserError(
            f"{path} is not a readable {what}: {error or type(error).__name__}"
        ) from error
    return kind, torch_file.read(path, use_ema=use_ema, tell=tell), {}


def _array(
    file, name: str, path: pathlib.Path, mapped: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Returns an array of an open safetensors file."""
    dtype = file.get_slice(name).get_dtype()
    if re.match(r"F\d(_|$)", dtype):  # NumPy does not have these types.
        raise UserError(
            f"{path}: {name} holds {dtype} numbers: give the weights as float16, "
            "bfloat16 or float32"
        )
    return mapped[name] if name in mapped else file.get_tensor(name)


def _map(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the float32 arrays of a valid safetensors file, read when they are used.

    They stay in the file until then, so that a large file is not copied to the host as
    a whole; arrays of other types are converted when they are read.
    """
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            memory,
            np.float32,
            math.prod(about["shape"]),
            start + about["data_offsets"][0],
        ).reshape(about["shape"])
        for name, about in header.items()
        if about["dtype"] == "F32" and math.prod(about["shape"])
    }


def _mapping(array: object) -> mmap.mmap | None:
    """Returns the mapped file that holds the numbers of an array; None if none does."""
    while isinstance(array, np.ndarray):
        array = array.base
    memory = array.obj if isinstance(array, memoryview) else None
    return memory if isinstance(memory, mmap.mmap) else None


def in_memory(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous array that does not change with the file it was read from."""
    if _mapping(array) is None:
        return np.ascontiguousarray(array).reshape(array.shape)
    return np.array(array, order="C")


def release(array: np.ndarray) -> None:
    """Frees the memory that holds the parts of a mapped file that were read."""
    memory = _mapping(array)
    if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)


def _kind(path: pathlib.Path) -> str:
    """Returns "npz", "safetensors", "torch" or "msgpack"."""
    with path.open("rb") as file:
        start = file.read(32)
    if start[:2] == b"PK":
        if not zipfile.is_zipfile(path):  # A truncated archive has no directory.
            name = "PyTorch" if path.suffix in (".pth", ".pt", ".bin") else ".npz"
            raise UserError(
                f"{path} is not a readable {name} checkpoint: the archive is truncated "
                "or damaged"
            )
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("data.pkl") for name in names):
            return "torch"
        if not all(name.endswith(".npy") for name in names):
            raise UserError(f"{path} is an archive of {names[0]}: give its content")
        return "npz"
    # The file starts with the header's length, whose bytes may look like a pickle.
    if start[8:9] == b"{" and (start[:1] != b"\x80" or start[4:8] == bytes(4)):
        return "safetensors"
    if start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "torch"  # A pickle without an archive, as before PyTorch 1.6.
    if flax_file.starts(start):
        return "msgpack"
    other = f"it begins with {start[:8]!r}" if start else "it is empty"
    hints = (text for sign, text in _HINTS.items() if start.startswith(sign))
    raise UserError(
        f"{path} is neither a readable .npz checkpoint, nor .safetensors, nor a PyTorch "
        f"or Flax file: {next(hints, other)}"
    )


def _sidecars(folder: pathlib.Path) -> dict[str, dict]:
    """Returns the content of the JSON files that describe weights, by file name."""
    contents = {
        name: _json(folder / name) for name in _SIDECARS if (folder / name).exists()
    }
    return {
        name: content
        for name, content in contents.items()
        if any(key in content for key in _SIDECARS[name])
    }


def _json(path: pathlib.Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def _widen(array: np.ndarray) -> np.ndarray:
    # npz files cannot store bfloat16: NumPy returns two bytes without a type.
    if array.dtype == np.dtype("V2"):
        array = array.view(ml_dtypes.bfloat16)
    return array.astype(np.float32) if array.dtype in _WIDENED else array

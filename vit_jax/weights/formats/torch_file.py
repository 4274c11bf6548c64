"""Files of `torch.save` (.pth, .pt, .bin), read without PyTorch and without trust.

Such a file is a pickle, which names functions to call. Here a name is looked up in one
short table, never imported, so that a file can run nothing. Two containers: a zip
archive (`data.pkl` and one record a storage; PyTorch 1.6 and later), and before that a
stream of pickles with the storages behind them.
"""

import collections
import dataclasses
import io
import math
import os
import pickle
import pickletools
import zipfile
from typing import Any

import numpy as np
from etils import epath

from vit_jax.errors import UserError
from vit_jax.weights.formats import expansion

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# What a training script calls its parameters, the averaged ones first.
_CONTAINERS = ("model_ema", "state_dict_ema", "model", "state_dict")
# A pickle holds names and shapes, some hundred bytes per tensor. Python's objects for it
# take up to a hundred times its size.
_PICKLE_BYTES = 16 << 20
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel; torch.compile.


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads the tensors of a file of `torch.save`.

    Args:
      path: of a state dict, or of a checkpoint that has one under "model_ema",
        "state_dict_ema", "model" or "state_dict".

    Returns:
      Arrays by name; float16 and bfloat16 are widened to float32.

    Raises:
      UserError: damaged, no state dict, or it names anything but tensors.
    """
    try:
        with epath.Path(path).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            if zipfile.is_zipfile(stream):
                content = _read_zip(stream, size)
            else:
                stream.seek(0)
                content = _read_legacy(stream)
        tensors = _state_dict(content)
        # Many tensors may be views of the same few numbers.
        expansion.check(sum(v.bytes for v in tensors.values()), size, "its tensors")
        return {k: v.read() for k, v in tensors.items()}
    except _Refused as error:
        raise UserError(
            f"{path} was not read: its pickle asks for {error}, which is no part of a "
            "state dict; save torch.save(model.state_dict(), path) or safetensors"
        ) from error
    except Exception as error:  # Whatever a damaged or hostile pickle can provoke.
        raise UserError(
            f"{path} is not a readable PyTorch file: {error or type(error).__name__}"
        ) from error


def _state_dict(content: Any) -> dict[str, "_Tensor"]:
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}, not a state dict")
    inner = [content[key] for key in _CONTAINERS if isinstance(content.get(key), dict)]
    tensors = {
        name: value
        for name, value in (inner[0] if inner else content).items()
        if isinstance(value, _Tensor)
    }
    if not tensors:
        keys = ", ".join(map(str, list(content)[:4]))
        raise ValueError(f"it has no tensors, only {keys or 'nothing'}")
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {k.removeprefix(prefix): v for k, v in tensors.items()}
    return tensors


@dataclasses.dataclass
class _Storage:
    """The numbers of one or several tensors; `data` may come after the tensors."""

    dtype: str
    count: int
    data: bytes | None = None


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A view of a storage; offset and strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Memory that `read` takes; it refuses more than the storage has."""
        size = math.prod(self.shape) * _width(self.storage.dtype)
        return min(size, len(self.storage.data))

    def read(self) -> np.ndarray:
        dtype = "uint16" if self.storage.dtype == "bfloat16" else self.storage.dtype
        flat = np.frombuffer(self.storage.data, np.dtype(dtype).newbyteorder("<"))
        end = self.offset + sum(
            (n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)
        )
        size = math.prod(self.shape)
        # as_strided checks nothing: numbers out of the file must not reach beyond it.
        if size and (min(self.offset, *self.strides, 0) < 0 or end >= len(flat)):
            raise ValueError(f"a tensor of {self.shape} lies outside of its storage")
        if size > len(flat):
            raise ValueError(f"a tensor of {self.shape} is larger than its storage")
        view = np.lib.stride_tricks.as_strided(
            flat[self.offset :],
            self.shape,
            [step * flat.itemsize for step in self.strides],
            writeable=False,
        )
        if self.storage.dtype == "bfloat16":  # The upper half of a float32.
            return (view.astype(np.uint32) << 16).view(np.float32)
        return view.astype(np.float32 if dtype == "float16" else dtype)


class _Refused(Exception):
    """A pickle names something that is not in the table."""


class _Ignored:
    """Stands for settings of a training script; takes anything and keeps nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass


def _rebuild_tensor(storage, offset, size, stride, *rest) -> _Tensor:
    return _Tensor(storage, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data, *rest) -> _Tensor:
    return data


_KNOWN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("argparse", "Namespace"): _Ignored,
} | {
    ("torch", f"{name}Storage"): dtype
    for name, dtype in {
        "Float": "float32",
        "Double": "float64",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
    }.items()
}


class _Unpickler(pickle.Unpickler):
    """Looks names up in the table above and hands out storages.

    Args:
      stream: of the pickle.
      storages: by their key in the file and their type; filled here.
    """

    def __init__(self, stream: io.IOBase, storages: dict[tuple[str, str], _Storage]):
        super().__init__(stream, encoding="utf-8")
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _Refused(f"{module}.{name}")
        return _KNOWN[module, name]

    def persistent_load(self, pid: tuple) -> _Storage:
        kind, dtype, key, _, count, *view = pid
        if kind != "storage" or not isinstance(dtype, str):
            raise _Refused(f"the persistent object {kind!r}")
        if any(part is not None for part in view):
            raise ValueError("it has views of storages, as PyTorch before 0.4 wrote")
        return self._storages.setdefault((str(key), dtype), _Storage(dtype, count))


def _width(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _load(stream: io.IOBase, storages: dict) -> Any:
    """Loads the next pickle of a stream, once its size and memo are known to be sane.

    Python's unpickler makes as many memo slots as the highest index in a pickle, so that
    ten bytes would take gigabytes.
    """
    start = stream.tell()
    for opcode, value, position in pickletools.genops(stream):
        if position - start > _PICKLE_BYTES:
            raise ValueError(f"a pickle in it is longer than {_PICKLE_BYTES:,} bytes")
        # Each index takes an opcode, so none is above the bytes before it.
        if opcode.name in ("PUT", "LONG_BINPUT") and value > position - start:
            raise ValueError(f"a pickle in it asks for {value:,} memo slots")
    stream.seek(start)
    return _Unpickler(stream, storages).load()


def _read_zip(stream: io.IOBase, size: int) -> Any:
    with zipfile.ZipFile(stream) as archive:
        expanded = sum(member.file_size for member in archive.infolist())
        expansion.check(expanded, size, "what is in it")
        names = archive.namelist()
        pickled = next((n for n in names if n.split("/")[1:] == ["data.pkl"]), None)
        if pickled is None:
            raise ValueError("it is a zip archive without a data.pkl")
        folder = pickled.removesuffix("data.pkl")
        if f"{folder}byteorder" in names:
            order = archive.read(f"{folder}byteorder")
            if order != b"little":
                raise ValueError(f"its byte order is {order!r}, not little")
        storages = {}
        content = _load(io.BytesIO(archive.read(pickled)), storages)
        for (key, _), storage in storages.items():
            storage.data = archive.read(f"{folder}data/{key}")
        return content


def _read_legacy(stream: io.IOBase) -> Any:
    storages = {}
    protocol = stream.read(1)
    stream.seek(0)
    if protocol != pickle.PROTO or _load(stream, {}) != _LEGACY_MAGIC:
        raise ValueError("it is neither a zip archive nor a stream of torch.save")
    for _ in ("protocol version", "system"):
        _load(stream, {})
    content = _load(stream, storages)
    by_key = {key: storage for (key, _), storage in storages.items()}
    for key in _load(stream, {}):
        count = int.from_bytes(stream.read(8), "little", signed=True)
        storage = by_key[str(key)]
        if count != storage.count:
            raise ValueError(f"storage {key} has {count}, not {storage.count}, numbers")
        storage.data = stream.read(count * _width(storage.dtype))
        if len(storage.data) != count * _width(storage.dtype):
            raise ValueError("it ends too early")
    return content

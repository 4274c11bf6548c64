"""Reads and writes files of `torch.save` without PyTorch.

A file (.pth, .pt, .bin) is a pickle, which names functions to call. Here each name is
looked up in one short table and never imported, so a malicious file cannot run
anything; any other name, such as a path among the settings of a training, becomes a
placeholder. There are two containers: a zip archive (`data.pkl` and one record per
storage; PyTorch 1.6 and later), and for older versions a stream of pickles followed by
the storages.
"""

import collections
import dataclasses
import io
import math
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from vit_jax.errors import UserError
from vit_jax.weights.formats import averaged

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
TEACHER, STUDENT = "teacher", "student"
# Parts read in addition to a teacher: its student, and the centres of their losses.
_BESIDE_TEACHER = (STUDENT, "dino_loss", "ibot_patch_loss")
# Keys under which training scripts store parameters. Lightning's WeightAveraging moves
# the raw ones to the first key, and stores the average as "state_dict".
_BEFORE_AVERAGING = "current_model_state"
_CONTAINERS = (
    *(_BEFORE_AVERAGING, "model", "state_dict", "model_state_dict"),
    *("module", "net", "network", TEACHER),
)
_SETTINGS = "argparse.Namespace"  # Allowed in addition to tensors.
_TRAINING = re.compile("optim|sched|scaler|amp")  # Keys of the training's state.
# A pickle holds names and shapes, some hundred bytes per tensor. The Python objects made
# from it take up to a hundred times its size.
_PICKLE_BYTES = 16 << 20

# Trained float32 weights deflate to 93 % of their size; rounded to bfloat16 to 47 %, to
# 4 bits to 14 %, and with 99 % pruned to 1.6 %. Only constants compress more (zeros to
# 0.1 %).
_MAX_EXPANSION = 64
# Smaller files may expand further: a small test model can be all zeros.
_HARMLESS_BYTES = 16 << 20


def read(
    path: str | os.PathLike,
    *,
    use_ema: bool = True,
    tell: Callable[[str], None] = lambda note: None,
) -> dict[str, np.ndarray]:
    """Reads the tensors of a file written by `torch.save`.

    Args:
      path: file with a state dict, or a checkpoint that contains one at any depth: the
        first of "model", "state_dict", ... or, as in DINO, "teacher"; otherwise the
        only one.
      use_ema: whether averaged parameters, if there are any, are read instead.
      tell: function called with a note about averaged parameters, and about each part
        of a checkpoint that has tensors and is left out.

    Returns:
      Arrays by name; float16 and bfloat16 are widened to float32. Names of a teacher
      start with "teacher.", and those of its student, if there is one, with "student.".

    Raises:
      UserError: the file is damaged, or is not a state dict of tensors.
    """
    try:
        with epath.Path(path).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            if zipfile.is_zipfile(stream):
                content = _read_zip(stream, size)
            else:
                stream.seek(0)
                content = _read_legacy(stream)
        tensors = _state_dict(content, use_ema, tell)
        for name, tensor in tensors.items():
            if tensor.dtype not in _WIDTHS:
                raise UserError(
                    f"{path}: {name} holds {tensor.dtype} numbers: give the weights as "
                    "float16, bfloat16 or float32"
                )
        # Many tensors may be views of the same few numbers.
        check_expansion(sum(v.bytes for v in tensors.values()), size, "its tensors")
        return {k: v.read() for k, v in tensors.items()}
    except UserError:
        raise
    except _Refused as error:
        raise UserError(
            f"{path} was not read: its pickle needs {error}, which is not part of a "
            "state dict; save torch.save(model.state_dict(), path) or safetensors"
        ) from error
    except Exception as error:  # A damaged or malicious pickle can raise anything.
        raise UserError(
            f"{path} is not a readable PyTorch file: {error or type(error).__name__}"
        ) from error


def write(
    path: str | os.PathLike, content: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Writes a file that `torch.load` reads, even with `weights_only`.

    Args:
      path: path of the file, in an existing folder.
      content: state dicts of float32 arrays by their key, such as "model".
    """
    storages: list[np.ndarray] = []
    parts = [pickle.PROTO, b"\2", pickle.EMPTY_DICT, pickle.MARK]
    for key, arrays in content.items():
        parts += [_pickled(key), pickle.EMPTY_DICT, pickle.MARK]
        for name, value in arrays.items():
            parts += [_pickled(name), _pickled_tensor(value.shape, len(storages))]
            storages.append(np.asarray(value, "<f4", order="C"))
        parts.append(pickle.SETITEMS)
    parts += [pickle.SETITEMS, pickle.STOP]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"".join(parts))
        archive.writestr("archive/byteorder", "little")
        for i, value in enumerate(storages):
            archive.writestr(f"archive/data/{i}", value.tobytes())
        archive.writestr("archive/version", "3\n")


def _pickled_tensor(shape: tuple[int, ...], storage: int) -> bytes:
    """Returns the pickle opcodes of a tensor that is a whole storage in row-major order."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    kind, size = pickle.GLOBAL + b"torch\nFloatStorage\n", math.prod(shape)
    place = _pickled(("storage", kind, str(storage), "cpu", size)) + pickle.BINPERSID
    hooks = pickle.GLOBAL + b"collections\nOrderedDict\n" + pickle.EMPTY_TUPLE
    hooks += pickle.REDUCE
    arguments = _pickled((place, 0, tuple(shape), strides, pickle.NEWFALSE, hooks))
    return (
        pickle.GLOBAL
        + b"torch._utils\n_rebuild_tensor_v2\n"
        + arguments
        + pickle.REDUCE
    )


def _pickled(value: bytes | str | int | tuple) -> bytes:
    """Returns the pickle opcodes of a value; bytes are taken as opcodes."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        encoded = value.encode()
        return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
    if isinstance(value, int):
        return pickle.BININT + struct.pack("<i", value)
    return pickle.MARK + b"".join(map(_pickled, value)) + pickle.TUPLE


def check_expansion(expanded: int, size: int, what: str) -> None:
    """Raises ValueError if a file of `size` bytes expands more than weights can."""
    if expanded > max(_HARMLESS_BYTES, _MAX_EXPANSION * size):
        raise ValueError(
            f"{what} would take {expanded:,} bytes, {expanded // max(1, size):,} times the "
            "file's size, more than weights do: save them again uncompressed"
        )


def _state_dict(
    content: Any, use_ema: bool, tell: Callable[[str], None]
) -> dict[str, "_Tensor"]:
    """Returns the tensors of the state dict in a checkpoint; see `read`."""
    if isinstance(content, _Placeholder):
        raise _Refused(content.name)
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}, not a state dict")
    whole, path = content, []
    while (key := _find_container(content)) not in (None, TEACHER):
        path.append(key)
        content = content[key]
    parts = (TEACHER, *_BESIDE_TEACHER) if key == TEACHER else ()
    if parts:
        tensors = {
            f"{part}.{name}": tensor
            for part in parts
            if _has_tensors(content.get(part))
            for name, tensor in _state_dict(content[part], use_ema, tell).items()
        }
        path.append(TEACHER)
    else:
        tensors = _own_tensors(content)
    used = [tensors, *(content.get(part) for part in parts)] if parts else [content]
    others = dict(_leaves(whole, "", set(map(id, used))))
    also = ("state_dict",) if path == [_BEFORE_AVERAGING] else ()
    comparable = {k: v for k, v in others.items() if isinstance(v, _Tensor)}
    prefix, average = averaged.find(tensors, comparable, also)
    raw = ".".join(path) or "the raw ones"
    if average:
        tell(averaged.note(prefix, raw, use_ema=use_ema))
    left = dict.fromkeys(
        name.partition(".")[0] for name in others if not name.startswith(f"{prefix}.")
    )
    if left:
        tell(f"{', '.join(left)}: left out, {raw} is read")
    return tensors | average if use_ema else tensors


def _own_tensors(content: dict) -> dict[str, "_Tensor"]:
    """Returns the tensors that are direct values of a state dict."""
    tensors = {k: v for k, v in content.items() if isinstance(v, _Tensor)}
    for value in content.values():  # A placeholder may replace an unsupported tensor.
        if isinstance(value, _Placeholder) and value.name != _SETTINGS:
            raise _Refused(value.name)
    if not tensors:
        names = ", ".join(map(str, list(content)[:4]))
        raise ValueError(f"it has no tensors, only {names or 'nothing'}")
    return tensors


def _leaves(content: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields the tensors at any depth, and averages that are objects, by their names.

    Containers whose identity is in `seen` are skipped.
    """
    is_object = isinstance(content, _Placeholder)
    if isinstance(content, _Tensor) or (is_object and averaged.is_average(name)):
        yield name, content
    elif isinstance(content, dict | list | tuple) and id(content) not in seen:
        seen.add(id(content))
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            key = getattr(key, "name", key)  # Old Lightning files use classes as keys.
            yield from _leaves(value, f"{name}.{key}" if name else str(key), seen)


def _find_container(content: dict) -> str | None:
    """Returns the key of the dict with the parameters; None if it is `content` itself."""
    keys = [k for k, v in content.items() if isinstance(k, str) and _has_tensors(v)]
    for key in _CONTAINERS:
        if key in keys:
            return key
    if any(isinstance(value, _Tensor) for value in content.values()):
        return None
    keys = [key for key in keys if not _TRAINING.match(key)]
    keys = [key for key in keys if not averaged.is_average(key)] or keys
    if len(keys) > 1:
        raise ValueError(
            f"it has tensors under {', '.join(keys)}: save only one of them"
        )
    return keys[0] if keys else None


def _has_tensors(content: Any) -> bool:
    """Returns whether `content` is a dict with named tensors at any depth."""
    return isinstance(content, dict) and any(
        isinstance(key, str) and (isinstance(value, _Tensor) or _has_tensors(value))
        for key, value in content.items()
    )


@dataclasses.dataclass
class _Storage:
    """Memory of one or several tensors; `data` may be read later than the tensors."""

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
    dtype: str
    negated: bool = False

    @property
    def bytes(self) -> int:
        """Number of bytes that `read` allocates."""
        return math.prod(self.shape) * _WIDTHS[self.dtype]

    def read(self) -> np.ndarray:
        value = self._stored()
        return -value if self.negated else value

    def _stored(self) -> np.ndarray:
        """Returns the stored numbers; for a negated view, before the negation."""
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        flat = np.frombuffer(self.storage.data, np.dtype(dtype).newbyteorder("<"))
        end = self.offset + sum(
            (n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)
        )
        size = math.prod(self.shape)
        # as_strided checks nothing; a file must not make it read outside of the
        # storage.
        if size and (min(self.offset, *self.strides, 0) < 0 or end >= len(flat)):
            raise ValueError(f"a tensor of {self.shape} lies outside of its storage")
        view = np.lib.stride_tricks.as_strided(
            flat[self.offset :],
            self.shape,
            [step * flat.itemsize for step in self.strides],
            writeable=False,
        )
        if self.dtype == "bfloat16":  # It is the upper half of a float32.
            return (view.astype(np.uint32) << 16).view(np.float32)
        return view.astype(np.float32 if dtype == "float16" else dtype)


class _Refused(Exception):
    """A state dict needs a name that is not in `_KNOWN`."""


class _Placeholder:
    """Stands for any object whose class, `name`, is unknown."""

    name = ""

    def __init__(self, *args, **kwargs):
        pass

    def _ignore(self, *args, **kwargs):
        return self

    # Every method that an unpickler calls on an object.
    __call__ = __setstate__ = __setitem__ = append = extend = add = _ignore


def _rebuild_tensor(
    storage, offset, size, stride, requires_grad=False, hooks=None, views=None
) -> _Tensor:
    negated = bool((views or {}).get("neg"))
    view = offset, tuple(size), tuple(stride)
    return _Tensor(storage, *view, storage.dtype, negated)


def _rebuild_typed(
    storage, offset, size, stride, requires_grad, hooks, dtype, views=None
) -> _Tensor:
    """Returns a tensor of a type that has no storage class in PyTorch."""
    tensor = _rebuild_tensor(storage, offset, size, stride, views=views)
    return dataclasses.replace(tensor, dtype=dtype.name.rpartition(".")[2])


def _rebuild_quantized(storage, offset, size, stride, *rest) -> _Tensor:
    return _rebuild_tensor(storage, offset, size, stride)


_KNOWN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
    ("torch._utils", "_rebuild_qtensor"): _rebuild_quantized,
    ("torch._utils", "_rebuild_parameter"): lambda data, *rest: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *rest: data,
}
_KINDS = {
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
}
_KNOWN |= {("torch", f"{name}Storage"): dtype for name, dtype in _KINDS.items()}
# Bytes per number, for the types that are read.
_WIDTHS = {kind: np.dtype(kind).itemsize for kind in _KINDS.values() if kind[0] != "b"}
_WIDTHS |= {"bfloat16": 2, "bool": 1}


class _Unpickler(pickle.Unpickler):
    """Resolves names with `_KNOWN`, others to placeholders, and collects storages."""

    def __init__(self, stream: io.IOBase, storages: dict[tuple[str, str], _Storage]):
        super().__init__(stream, encoding="utf-8")
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            return type("Placeholder", (_Placeholder,), {"name": f"{module}.{name}"})
        return _KNOWN[module, name]

    def persistent_load(self, pid: tuple) -> _Storage:
        kind, dtype, key, _, count, *view = pid
        if kind != "storage":
            raise _Refused(f"the persistent object {kind!r}")
        if not isinstance(dtype, str):  # A type that is not read, such as QInt8.
            dtype = dtype.name.rpartition(".")[2].removesuffix("Storage").lower()
            dtype = {"complexfloat": "complex64", "complexdouble": "complex128"}.get(
                dtype, dtype
            )
        if any(part is not None for part in view):
            raise ValueError("it has views of storages, as PyTorch before 0.4 wrote")
        return self._storages.setdefault((str(key), dtype), _Storage(dtype, count))


def _load(stream: io.IOBase, storages: dict) -> Any:
    """Loads the next pickle of a stream after checking its size and memo indices.

    Python's unpickler allocates as many memo slots as the highest index in a pickle, so
    ten bytes could take gigabytes.
    """
    start = stream.tell()
    for opcode, value, position in pickletools.genops(stream):
        if position - start > _PICKLE_BYTES:
            raise ValueError(f"a pickle in it is longer than {_PICKLE_BYTES:,} bytes")
        # Each index needs an opcode, so an index cannot exceed the bytes before it.
        if opcode.name in ("PUT", "LONG_BINPUT") and value > position - start:
            raise ValueError(f"a pickle in it asks for {value:,} memo slots")
    stream.seek(start)
    return _Unpickler(stream, storages).load()


def _read_zip(stream: io.IOBase, size: int) -> Any:
    with zipfile.ZipFile(stream) as archive:
        expanded = sum(member.file_size for member in archive.infolist())
        check_expansion(expanded, size, "its content")
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
    first = _load(stream, {}) if protocol == pickle.PROTO else None
    if isinstance(first, _Placeholder):
        raise _Refused(first.name)
    if first != _LEGACY_MAGIC:
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
        if storage.dtype not in _WIDTHS:
            raise ValueError(f"it holds {storage.dtype} numbers")
        storage.data = stream.read(count * _WIDTHS[storage.dtype])
        if len(storage.data) != count * _WIDTHS[storage.dtype]:
            raise ValueError("it ends too early")
    return content

"""Compilation: caches of compiled programs on disk, and options for XLA.

JAX implements the first cache: it finds a program by its contents, the compiler's version
and options and the kind of device, and only the first of several processes writes. To know
the contents it has to be traced. The second one, of training steps, finds a program by what
it is traced from: config, shapes, this package's source, versions, flags and devices.
Anyone who can write to the folder can make this process run code, so it should be the
user's.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import platform
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
from etils import epath
from jax.experimental import serialize_executable

from vit_jax.files import replace_bytes

AUTO = "auto"
_STAMP = ".checked"
# Programs that compile faster are not kept: reading them is no faster.
_LEAST_SECONDS = 0.1
_MOST_BYTES = 10_000_000_000
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
CACHE_HIT = "/jax/compilation_cache/cache_hits"  # As JAX reports it.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_ZSTD = bytes.fromhex("28b52ffd")
# On CPU XLA passes matrix products to a library that reaches 150 to 290 GFLOP/s where
# Eigen reaches 210 to 350; this leaves it the reductions only (docs/decisions.md).
_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


def options(platform: str = "") -> dict[str, str]:
    """Returns the `compiler_options` of `jax.jit` for large networks.

    Args:
      platform: "cpu", "gpu" or "tpu", which the program is for; JAX's own if empty.
    """
    return _cpu_options() if (platform or jax.default_backend()) == "cpu" else {}


@functools.cache  # Asking XLA takes a compilation.
def _cpu_options() -> dict[str, str]:
    return known_options(_CPU_OPTIONS)


def known_options(options: dict[str, str]) -> dict[str, str]:
    """Returns the options if this release of XLA knows them all, else none.

    They are experimental, so that one may be gone in the next release.
    """
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return options


def enable_cache(folder: str = AUTO) -> str:
    """Enables JAX's cache of compiled programs; call it before the first compilation.

    Args:
      folder: of the cache; "auto" is $XDG_CACHE_HOME/vit_jax/compiled (~/.cache if unset)
        unless JAX has been told another one (JAX_COMPILATION_CACHE_DIR); "" leaves
        JAX's own settings as they are.

    Returns:
      A note for the user if programs cannot be kept, else "".
    """
    if not folder or (folder == AUTO and jax.config.jax_compilation_cache_dir):
        return ""
    if "://" not in folder:
        path = _default() if folder == AUTO else pathlib.Path(folder)
        folder = str(path)
        try:
            path = path.expanduser().absolute()
            folder = str(path)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError("not writable")
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home.
            return (
                f"compiled programs are not kept, the next start compiles again: {folder} "
                f"({getattr(error, 'strerror', None) or error}); set "
                "compilation_cache_dir to another folder"
            )
        with contextlib.suppress(OSError):  # The cache works untidied too.
            _tidy(path)
    jax.config.update("jax_compilation_cache_dir", folder)
    for name, value in (
        ("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    return ""


def program_key(*decisive: object) -> str:
    """Returns the name under which a program is stored.

    Args:
      *decisive: for JSON: all that the program is traced from and that is not in this
        package's source, in versions of libraries, flags or devices.
    """
    devices = jax.devices()
    place = {
        "source": _source_hash(),
        "versions": [importlib.metadata.version(name) for name in _LIBRARIES],
        "flags": [os.environ.get(name, "") for name in _FLAGS],
        "jax": {
            name: str(value)
            for name, value in jax.config.values.items()
            if "cache" not in name  # Where programs are kept.
        },
        # It may be set for this thread alone.
        "precision": str(jax.config.jax_default_matmul_precision),
        "devices": [str(device) for device in devices],
        "kind": [devices[0].device_kind, devices[0].client.platform_version],
        "machine": [platform.machine(), _cpu_features()],
    }
    text = json.dumps([decisive, place], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def is_stored(key: str) -> bool:
    """Returns whether there is a file of a program."""
    path = _path_of(key)
    return path is not None and path.exists()


def load_program(key: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
    """Returns a stored program, or None if its file is of no use.

    Args:
      key: from `program_key`.
      devices: that it runs on.
    """
    path = _path_of(key)
    # What another process half wrote, or another version wrote, is compiled again.
    with contextlib.suppress(Exception):
        stored = pickle.loads(zlib.decompress(path.read_bytes()))
        return serialize_executable.deserialize_and_load(
            *stored, execution_devices=devices
        )
    return None


@runtime_checkable
class Lowered(Protocol):
    """A traced program, as `jax.stages.Lowered`, or the step that a sweep shares."""

    def compile(self) -> Callable:
        """Compiles the program."""


def compile_program(lowered: Lowered) -> tuple[Callable, bool]:
    """Compiles a program.

    Returns:
      The program, and whether it is new: what JAX reads from its own cache on a CPU lacks
      parts when it is written once more, so it is not for `store_program`.
    """
    found, thread = [], threading.get_ident()

    def listen(event: str, **_) -> None:
        if event == CACHE_HIT and threading.get_ident() == thread:
            found.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        return lowered.compile(), not found
    finally:
        jax.monitoring.unregister_event_listener(listen)


def store_program(key: str, program: Callable) -> None:
    """Stores a new program for later processes; does nothing where that is impossible."""
    path = _path_of(key)
    if path is None:
        return
    # Not every backend can write a program, and the run does not depend on it.
    with contextlib.suppress(Exception):
        stored = pickle.dumps(serialize_executable.serialize(program))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_bytes(path, zlib.compress(stored, 1))


def _path_of(key: str) -> epath.Path | None:
    """Returns the file of a program; None without a cache in a folder of this machine.

    Of several processes each would have to write a program of its own.
    """
    folder = jax.config.jax_compilation_cache_dir
    if not key or not folder or "://" in folder or jax.process_count() > 1:
        return None
    return epath.Path(folder) / f"step-{key}-cache"


@functools.cache
def _source_hash() -> str:
    """Hashes the source of this package."""
    digest, root = hashlib.sha256(), pathlib.Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _cpu_features() -> str:
    """Returns what the processor can do: a program made for more would crash."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        words = (line for line in lines if line.startswith(("flags", "Features")))
        return next(words, "")
    return platform.processor()


def _default() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(home) / "vit_jax" / "compiled"


def _tidy(folder: pathlib.Path) -> None:
    """Removes half-written programs, and the oldest beyond _MOST_BYTES.

    A killed process leaves a half-written program: JAX writes in place, warns of a file
    that it cannot read at every start, and never writes it again. Only files newer than
    the last check are read. Another process may write or tidy at the same time; what it
    loses is compiled again.
    """
    stamp = folder / _STAMP
    checked = stamp.stat().st_mtime_ns if stamp.exists() else 0
    found = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    found.sort()
    for changed, path in found:
        with contextlib.suppress(FileNotFoundError):
            if changed > checked and not _whole(path.read_bytes()):
                path.unlink()
    if found and found[-1][0] > checked:
        stamp.touch()
        os.utime(stamp, ns=(found[-1][0],) * 2)
    sizes = []
    for _, path in found:
        with contextlib.suppress(FileNotFoundError):
            sizes.append((path, path.stat().st_size))
    surplus = sum(size for _, size in sizes) - _MOST_BYTES
    for path, size in sizes:
        if surplus <= 0:
            break
        path.unlink(missing_ok=True)
        surplus -= size


def _whole(entry: bytes) -> bool:
    """Returns whether a compressed stream is complete."""
    reader, error = (
        _zstd() if entry.startswith(_ZSTD) else (zlib.decompressobj, zlib.error)
    )
    if reader is None:  # Written in an environment with zstd, which checks it.
        return True
    reading = reader()
    try:
        reading.decompress(entry)
    except error:
        return False
    return reading.eof


def _zstd():
    """Returns a zstd decompressor, if installed (JAX uses the same two), and its error."""
    with contextlib.suppress(ImportError):
        from compression import zstd  # From Python 3.14 on.

        return zstd.ZstdDecompressor, zstd.ZstdError
    with contextlib.suppress(ImportError):
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
    return None, ()

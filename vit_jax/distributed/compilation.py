"""Compilation: the folder of JAX's cache of compiled programs, and options for XLA.

JAX finds a program by its contents, the compiler's version and options and the kind of
device, and only the first of several processes writes. Anyone who can write to the folder
can make this process run code, so it should be the user's.
"""

import contextlib
import functools
import os
import pathlib
import zlib

import jax

AUTO = "auto"
_STAMP = ".checked"
# Programs that compile faster are not kept: reading them is no faster.
_LEAST_SECONDS = 0.1
_MOST_BYTES = 10_000_000_000
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

"""Sets the folder of JAX's cache of compiled programs, and the compiler options of XLA.

JAX looks a program up by its contents, the compiler's version and options and the kind
of device, and only the first of several processes writes. Anyone who can write to the
folder can make this process run code, so it should be the user's.
"""

import contextlib
import functools
import os
import pathlib
import zlib
from collections.abc import Sequence

import jax
from jax.experimental.compilation_cache import compilation_cache

from vit_jax.command_line import files

AUTO = "auto"
_STAMP = ".checked"
# Programs that compile faster are not kept: reading them would not be faster.
_LEAST_SECONDS = 0.1
_MOST_BYTES = 10_000_000_000
_ZSTD = bytes.fromhex("28b52ffd")
# Kinds of operations that XLA for CPUs passes to YNNPACK. Its float32 products reach 150
# to 290 GFLOP/s where Eigen reaches 210 to 350, but only its bfloat16 products use AMX
# instructions (docs/decisions.md).
_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_REDUCTIONS = "LIBRARY_FUSION_TYPE_REDUCE"
_PRODUCTS = f"{_REDUCTIONS},LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
_OPTIONS = {
    "cpu": {_YNNPACK: _REDUCTIONS},
    # Matrix products in Triton crash with some shapes of a ResNet, and keep biases and
    # residuals out of cuBLAS's kernels, which are chosen in the end
    # (docs/decisions.md).
    "gpu": {"xla_gpu_enable_triton_gemm": False},
}


def options(platform: str = "", *, bfloat16: bool = False) -> dict[str, str | bool]:
    """Returns the `compiler_options` of `jax.jit` for large networks.

    Args:
      platform: platform that runs the program: "cpu", "gpu" or "tpu"; JAX's default if
        empty.
      bfloat16: whether matrix products have bfloat16 operands.
    """
    platform = platform or jax.default_backend()
    wanted = _OPTIONS.get(platform)
    if platform == "cpu" and bfloat16:
        wanted = {_YNNPACK: _PRODUCTS}
    return known_options(**wanted) if wanted else {}


@functools.cache  # Asking XLA takes a compilation.
def known_options(**options: str | bool) -> dict[str, str | bool]:
    """Returns the options if this release of XLA knows them all, else none.

    They are experimental: the next release may not have them.
    """
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return options


def enable_cache(folder: str = AUTO) -> str:
    """Enables JAX's cache of compiled programs; call it before the first compilation.

    Args:
      folder: folder of the cache; "auto" is $XDG_CACHE_HOME/vit_jax/compiled (~/.cache
        if unset) unless JAX_COMPILATION_CACHE_DIR is set; "" keeps JAX's settings.

    Returns:
      A note for the user if programs cannot be kept, else "".

    Raises:
      UserError: the folder is neither local nor in a Google bucket.
    """
    if not folder or (folder == AUTO and jax.config.jax_compilation_cache_dir):
        return ""
    files.refuse_scheme("compilation_cache_dir", folder)
    if "://" not in folder:
        path = _default() if folder == AUTO else pathlib.Path(folder)
        folder = str(path)
        try:
            path = path.expanduser().absolute()
            folder = str(path)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError("not writable")
        except (OSError, RuntimeError) as error:  # RuntimeError: no home folder.
            return (
                f"compiled programs are not kept, the next start compiles again: {folder} "
                f"({getattr(error, 'strerror', None) or error}); set "
                "compilation_cache_dir to another folder"
            )
        with contextlib.suppress(OSError):  # The cache works without this too.
            _tidy(path)
    jax.config.update("jax_compilation_cache_dir", folder)
    for name, value in (
        ("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    return ""


def disable_cache_of_split_cpu(devices: Sequence) -> None:
    """Disables the cache in a process whose programs are split over several CPU devices.

    A CPU program that is read from the cache has lost the order between the collectives
    inside a loop and those outside it. Devices that begin with different collectives
    wait for each other until XLA ends the process.

    Args:
      devices: devices of a mesh.
    """
    cpus = [device for device in devices if device.platform == "cpu"]
    mine = [cpu for cpu in cpus if cpu.process_index == jax.process_index()]
    if len(mine) > 1 and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX reads the setting only once.


def _default() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(home) / "vit_jax" / "compiled"


def _tidy(folder: pathlib.Path) -> None:
    """Removes half-written programs, and the oldest ones if all exceed _MOST_BYTES.

    A killed process leaves a half-written program: JAX writes in place, warns of a file
    that it cannot read at every start, and never writes it again. Only files newer than
    the last check are read. Another process may write or tidy at the same time; what it
    loses is compiled again.
    """
    stamp = folder / _STAMP
    checked = stamp.stat().st_mtime_ns if stamp.exists() else 0
    entries = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
    entries.sort()
    surplus = sum(size for _, size, _ in entries) - _MOST_BYTES
    for changed, size, path in entries:
        with contextlib.suppress(FileNotFoundError):
            if surplus > 0 or (changed > checked and not _whole(path.read_bytes())):
                path.unlink()
                surplus -= size
    if entries and entries[-1][0] > checked:
        stamp.touch()
        os.utime(stamp, ns=(entries[-1][0],) * 2)


def _whole(entry: bytes) -> bool:
    """Returns whether a compressed stream is complete, as far as it can be read here."""
    reader = _zstd_reader() if entry.startswith(_ZSTD) else zlib.decompressobj()
    if reader is None:  # Written in an environment with zstd, and checked there.
        return True
    try:
        reader.decompress(entry)
    except Exception:  # noqa: BLE001 (each library has another)
        return False
    return reader.eof


def _zstd_reader():
    """Returns a decompressor of the zstd library that JAX uses; None without one."""
    with contextlib.suppress(ImportError):
        from compression import zstd  # From Python 3.14 on.

        return zstd.ZstdDecompressor()
    with contextlib.suppress(ImportError):
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj()
    return None

"""Strict settings for every test: rank promotion raises; runs take one of eight devices."""

import atexit
import gc
import io
import os
import pathlib
import shutil
import tempfile

from hosts import kill_started, xla_flags

# Before JAX starts. Programs are compiled in a hurry; what users get is run by the digits,
# alone and in a notebook.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(8)}"
os.environ["JAX_PLATFORMS"] = "cpu"
# Two workers share two cores: threads of a matrix library wait for each other by spinning.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
# One compilation cache for this session and all processes that it starts, or one that
# sessions share (.ci/run): the same small programs come again and again.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="vit_jax_tests_")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import numpy as np
import pytest
from absl import flags
from hurry import hurry
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

hurry()
jax.config.update("jax_numpy_rank_promotion", "raise")
if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


# Files of minutes, the longest first: begun last, they would keep one worker waiting.
LONG = ("test_benchmarks.py", "test_two_hosts.py", "test_smoke.py", "test_docs.py")
LONG += ("test_docs_pretraining.py", "test_config_commands.py", "test_timm_registry.py")
LONG += ("test_digits.py", "test_exchanges.py", "test_soak.py", "test_failing_saves.py")
LONG += ("test_notebooks.py", "test_encoder.py", "test_resume.py", "test_starting.py")
# Of the fast tests.
LONG += ("test_self_supervised.py", "test_configs.py", "test_api.py")


def pytest_ignore_collect(collection_path, config):
    """Leaves out files without a mark that is asked for, which each worker would import."""
    marks = config.option.markexpr
    if collection_path.suffix == ".py" and marks and "not" not in marks:
        text = collection_path.read_text()
        return True if not any(m in text for m in marks.split(" or ")) else None
    return None


def pytest_collection_modifyitems(items):
    """Has the longest files begin first."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


# Every compiled program has memory maps, of which Linux allows a process
# 65,530: a worker that went through thousands of programs died at the next. Traces and
# programs of earlier tests had grown to 6 GB.
_MOST_MAPS, _MOST_BYTES = 20_000, 2 << 30
_most = {"bytes": _MOST_BYTES}


@pytest.fixture(scope="module", autouse=True)
def _drop_programs():
    """Frees the programs of earlier tests before the system has no room for more.

    It takes seconds, and what is freed often stays with the process, for its next
    programs: that alone is no reason to free again.
    """
    yield
    if not pathlib.Path("/proc/self").exists():
        return
    maps = pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    if maps > _MOST_MAPS or _resident() > _most["bytes"]:
        jax.clear_caches()
        gc.collect()
        _most["bytes"] = max(_MOST_BYTES, _resident() + _MOST_BYTES // 4)


def _resident():
    """Returns the bytes of memory that this process has."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session", autouse=True)
def _all_devices():
    """Has what chooses no mesh take one device of this process: a program compiles sooner.

    A mesh whose config has sizes is of all devices. Yields what puts the others back.
    """
    from vit_jax.distributed import mesh as meshes  # As late as the tests do.

    create, local_devices = meshes.create, jax.local_devices

    def create_on_one(config, devices=None):
        if devices is None and config == meshes.MeshConfig():
            devices = jax.devices()[:1]
        return create(config, devices)

    def put_back(patch):
        patch.setattr(meshes, "create", create)
        patch.setattr(jax, "local_devices", local_devices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "create", create_on_one)
        patch.setattr(jax, "local_devices", lambda: local_devices()[:1])
        yield put_back


@pytest.fixture(autouse=True)
def _cache():
    """Has the next test use the compilation cache, also after one on several devices."""
    yield
    if not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture
def all_devices(_all_devices, monkeypatch):
    """Has runs take the eight devices of this process."""
    _all_devices(monkeypatch)


@pytest.fixture(autouse=True)
def _kill_started():
    """Kills the processes that a test has left."""
    yield
    kill_started()


@pytest.fixture
def encode():
    """Encodes an array or a picture as a file of some format."""

    def to_bytes(pixels, format, **options):
        picture = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
        stream = io.BytesIO()
        picture.save(stream, format, **options)
        return stream.getvalue()

    return to_bytes

import os
import pathlib
import zlib

import jax
import numpy as np
import pytest
from helpers import run_python
from jax.experimental.compilation_cache import compilation_cache

from vit_jax.distributed import compilation
from vit_jax.distributed import mesh as meshes

# Tells the note, the programs that were found, and how many were not.
CODE = """
import sys
import jax, jax.numpy as jnp
from vit_jax.distributed import compilation

found, asked = [], []
def listen(event, **_):
    found.append(event) if event.endswith("cache_hits") else None
    asked.append(event) if event.endswith("compile_requests_use_cache") else None
jax.monitoring.register_event_listener(listen)
compilation._LEAST_SECONDS = 0
print(compilation.enable_cache(*sys.argv[1:]))
print(jax.config.jax_compilation_cache_dir)
jax.jit(lambda x: jnp.sin(x @ x) + 1)(jax.device_put(jnp.ones((8, 8))))
print(len(found), len(asked))
"""


def start(*words, **environment):
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ""}
    done = run_python("-W", "always", "-c", CODE, *words, **environment)
    assert not done.stderr
    note, folder, counts = done.stdout.splitlines()
    found, asked = map(int, counts.split())
    return note, folder, found, asked


def entries(folder):
    return sorted(pathlib.Path(folder).glob("*-cache"))


@pytest.mark.slow
def test_the_second_start_finds_what_the_first_compiled(tmp_path):
    place = str(tmp_path / "vit_jax" / "compiled")
    note, folder, found, asked = start(XDG_CACHE_HOME=str(tmp_path))
    assert (note, folder, found) == ("", place, 0)
    assert asked == len(entries(place)) > 0
    assert start(XDG_CACHE_HOME=str(tmp_path))[2:] == (asked, asked)

    # A killed process leaves half an entry, of which JAX would warn for ever.
    half = entries(place)[0]
    half.write_bytes(half.read_bytes()[:-9])
    assert start(XDG_CACHE_HOME=str(tmp_path))[2:] == (asked - 1, asked)
    assert start(XDG_CACHE_HOME=str(tmp_path))[2:] == (asked, asked)


@pytest.fixture
def told(monkeypatch, tmp_path):
    """JAX as at a start that was told nothing of a cache; its settings come back."""
    least = "min_compile_time_secs", "min_entry_size_bytes"
    names = [f"jax_persistent_cache_{name}" for name in least]
    names.append("jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda: jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_of_several_cpu_devices_are_not_kept(told, tmp_path):
    """Read back, those with a collective in a loop and one beside it would hang."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    for count, factor in ((1, 2.5), (8, 3.5)):
        mesh = meshes.create(meshes.MeshConfig(), jax.devices()[:count])
        place = meshes.replicated(mesh)
        jax.jit(lambda x, f=factor: x * f, out_shardings=place)(np.ones(7))
        assert bool(entries(tmp_path)) == (count == 1)
        for path in tmp_path.iterdir():
            path.unlink()
    compilation_cache.reset_cache()


def test_the_folder_is_the_users_own(told, tmp_path, monkeypatch):
    assert compilation.enable_cache() == ""
    assert told() == f"{tmp_path}/home/.cache/vit_jax/compiled"
    assert os.stat(told()).st_mode & 0o777 == 0o700
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compilation.enable_cache() == ""
    assert told() == f"{tmp_path}/xdg/vit_jax/compiled"
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1


def test_what_jax_was_told_stays_unless_a_folder_is_stated(told, tmp_path, monkeypatch):
    name = "jax_persistent_cache_min_compile_time_secs"
    monkeypatch.setenv(name.upper(), "7")
    jax.config.update(name, 7)
    jax.config.update("jax_compilation_cache_dir", "/jax")
    assert compilation.enable_cache() == ""
    assert told() == "/jax"
    assert compilation.enable_cache("") == ""
    assert told() == "/jax"
    assert compilation.enable_cache(str(tmp_path / "mine")) == ""
    assert told() == f"{tmp_path}/mine"
    assert getattr(jax.config, name) == 7


def test_nothing_is_kept_when_it_is_off(told, tmp_path):
    assert compilation.enable_cache("") == ""
    assert told() is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_note(told, tmp_path):
    (tmp_path / "file").write_text("")
    assert compilation.enable_cache(str(tmp_path / "file" / "under")) == (
        "compiled programs are not kept, the next start compiles again: "
        f"{tmp_path}/file/under (Not a directory); set "
        "compilation_cache_dir to another folder"
    )
    assert told() is None


def test_no_home_is_a_note(told, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 1_234_567)
    note = compilation.enable_cache()
    assert "start compiles again: ~/.cache/vit_jax/compiled (" in note
    assert note.endswith("; set compilation_cache_dir to another folder")
    assert told() is None


def test_an_entry_that_another_process_removes_does_not_stop_the_tidying(
    told, tmp_path
):
    (tmp_path / "b-cache").write_bytes(b"half")
    # What has gone since the folder was listed cannot be looked at, as this cannot.
    (tmp_path / "a-cache").symlink_to(tmp_path / "gone")
    assert compilation.enable_cache(str(tmp_path)) == ""
    assert told() == str(tmp_path)
    assert not (tmp_path / "b-cache").exists()


def test_a_folder_that_cannot_be_tidied_is_used(told, tmp_path):
    (tmp_path / "a-cache").mkdir()  # Cannot be read as a file.
    assert compilation.enable_cache(str(tmp_path)) == ""
    assert told() == str(tmp_path)


def test_half_an_entry_goes_once_and_whole_ones_are_not_read_again(
    told, tmp_path, monkeypatch
):
    whole = zlib.compress(bytes(range(256)) * 9)
    (tmp_path / "a-cache").write_bytes(whole)
    (tmp_path / "b-cache").write_bytes(whole[:-1])
    (tmp_path / "other").write_bytes(b"")
    compilation.enable_cache(str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a-cache", "other", ".checked"}
    monkeypatch.setattr(compilation, "_whole", None)  # Fails if it is called.
    compilation.enable_cache(str(tmp_path))


def test_the_oldest_go_when_there_is_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "_MOST_BYTES", 250)
    monkeypatch.setattr(compilation, "_whole", lambda entry: True)
    for age, name in enumerate(("new", "old", "older")):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    compilation._tidy(tmp_path)
    assert [path.name for path in entries(tmp_path)] == ["new-cache", "old-cache"]


@pytest.mark.parametrize("name", ["zlib", "compression.zstd", "zstandard"])
def test_half_an_entry_is_told_from_a_whole_one(name):
    entry = pytest.importorskip(name).compress(bytes(range(256)) * 9)
    assert compilation._whole(entry)
    assert not compilation._whole(entry[:-1])
    assert not compilation._whole(b"")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_options_are_known_to_this_release(platform):
    options = compilation.options(platform)
    assert options
    f = jax.jit(lambda x: x + 1, compiler_options=options)
    assert f(1) == 2


def test_unknown_options_are_left_out():
    assert compilation.known_options(xla_cpu_no_such_option="1") == {}
    assert compilation.options("tpu") == {}

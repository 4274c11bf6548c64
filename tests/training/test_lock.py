"""Who may write a workdir: one start at a time, wherever it runs."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import fsspec
import hosts
import pytest
from etils.epath import backend
from helpers import run_python, tiny_config

from vit_jax.__main__ import load
from vit_jax.command_line import cli
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import compilation
from vit_jax.errors import UserError
from vit_jax.training import lock


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "_SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "_ENDING_SECONDS", 0.3)


@pytest.fixture
def bucket(monkeypatch):
    """Returns the address of a bucket, whose objects lie in this process."""
    objects = fsspec.filesystem("memory", skip_instance_cache=True)
    monkeypatch.setattr(objects, "store", {})
    get = lambda name: objects
    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", get)
    return "gs://bucket/run"


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    """Returns a workdir, and functions that read and write the lock in it."""
    if request.param == "folder":
        workdir = str(tmp_path / "run")
    else:
        workdir = request.getfixturevalue("bucket")
    path = lock._absolute(workdir) / lock.NAME

    def write(**changes):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock.held(workdir):
            text = path.read_text()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        if request.param == "folder":
            changes["inode"] = os.stat(path).st_ino
        path.write_text(json.dumps(json.loads(text) | changes))

    return workdir, path, write


ELSEWHERE = {"host": "node7", "pid": 4321, "boot": "other", "token": "other"}


def test_a_second_start_is_refused_by_name_until_the_first_has_ended(place):
    workdir, path, _ = place
    name = rf"process {os.getpid()} on {re.escape(socket.gethostname())}"
    for _ in range(2):  # It is released, so that the next has it.
        with lock.held(workdir):
            time.sleep(0.3)  # A few beats.
            assert json.loads(path.read_text())["beat"] > 0
            match = rf"--workdir=.*run: {name} has been writing to it since 20\d\d-.*: end that"
            with pytest.raises(UserError, match=match), lock.held(workdir):
                pass
        assert not path.exists()
    if "://" not in workdir:
        assert not os.path.exists(workdir)  # Nothing was written to it.


def test_a_lock_of_another_host_is_waited_for_and_then_taken_over(place, capsys):
    workdir, path, write = place
    write(**ELSEWHERE, lease_seconds=1.0)
    began = time.monotonic()
    with lock.held(workdir):
        assert 1.0 <= time.monotonic() - began < 10
        assert json.loads(path.read_text())["pid"] == os.getpid()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"process 4321 on node7 has left a lock in {workdir}: waiting up to "
        "1 s for a heartbeat from it"
    )


def test_a_start_on_another_host_that_lives_is_told_by_its_beats(place):
    workdir, path, write = place
    write(**ELSEWHERE, lease_seconds=60.0)
    ended = threading.Event()

    def beat():
        while not ended.wait(0.2):
            found = json.loads(path.read_text())
            path.write_text(json.dumps(found | {"beat": found["beat"] + 1}))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        match = "process 4321 on node7 has been writing to it"
        with pytest.raises(UserError, match=match), lock.held(workdir):
            pass
    finally:
        ended.set()
        thread.join()


def test_a_holder_that_lives_counts_also_without_the_lock_of_the_system(place):
    """It began while a file server still kept the lock of a host that was gone."""
    workdir, _, write = place
    write(token="other")  # Of this process, which lives; the system's lock is free.
    match = f"process {os.getpid()} on .* has been writing to it"
    with pytest.raises(UserError, match=match), lock.held(workdir):
        pass


def test_a_copy_of_the_workdir_of_a_run_that_lives_is_free(tmp_path):
    with lock.held(tmp_path / "run"):
        copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with lock.held(copy):
            pass
        refused = pytest.raises(UserError, match="writing to it")
        with refused, lock.held(tmp_path / "run"):
            pass


@pytest.mark.parametrize("workdir", ["s3://b/run", "foo://b", "https://h/run", "gs:/b"])
def test_another_scheme_is_refused_and_makes_no_folder(tmp_path, monkeypatch, workdir):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"--workdir={workdir}: "), lock.held(workdir):
        pass
    parser = cli.Parser("")
    parser.add_argument("--out")
    with pytest.raises(UserError, match=f"--out={workdir}: "):
        cli.parse(parser, [f"--out={workdir}"])
    key = "local_checkpoint.dir"  # Local disks alone.
    for place in (workdir, "gs://b/run"):
        with pytest.raises(UserError, match=f"{key}={place}: .*give a local path$"):
            tiny_config(local_checkpoint={"dir": place})
    with pytest.raises(UserError, match=f"compilation_cache_dir={workdir}: "):
        compilation.enable_cache(workdir)
    for name, value in (("data_dir", workdir), ("exclude", f"{workdir}.txt")):
        data = DataConfig(name="folder", **{name: value})
        with pytest.raises(UserError, match=f"data.{name}={value}: "):
            open_source(data, "train")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("average", ["a", "b", "--out=PLACE"]),
        ("compile", ["--config=c", "--topology=h100:1", "--export=PLACE"]),
        ("convert", ["--model=m", "--to=timm", "--out=PLACE"]),
        ("dedup", ["--pretrain=a", "--against=b", "--out=f", "--sheet=PLACE"]),
        ("explore", ["--model=m", "--html=PLACE", "--image=i"]),
        ("predict", ["--model=m", "i", "--out=PLACE"]),
        ("show_batch", ["--config=c", "--out=PLACE"]),
        ("transfer", ["--model=m", "--dataset=d", "--data_dir=PLACE"]),
    ],
)
def test_flags_that_are_places_are_checked_before_anything_else(verb, words):
    in_bucket = verb in ("explore", "transfer")
    for place in ("s3://b/x", *(["gs://b/x"] if not in_bucket else [])):
        given = [word.replace("PLACE", place) for word in words]
        with pytest.raises(UserError, match=f"--[a-z_]*={place}: .*give a local path"):
            cli.parse(load(verb).parser(), given)


def test_a_lock_file_that_cannot_be_opened_is_one_line(tmp_path):
    (tmp_path / lock.NAME).mkdir()
    match = rf"--workdir={tmp_path}: {tmp_path}/lock cannot be written \(.*irectory"
    with pytest.raises(UserError, match=match), lock.held(tmp_path):
        pass


@pytest.mark.parametrize("born", ["1", "another"])
def test_a_process_of_this_host_that_is_gone_is_not_waited_for(place, capsys, born):
    workdir, _, write = place
    # Its number is a later process's now, or nobody's.
    write(pid=os.getpid() if born == "another" else 2**22 + 1, born=born, token="other")
    began = time.monotonic()
    with lock.held(workdir):
        assert time.monotonic() - began < 1
    assert capsys.readouterr().err == ""


def test_a_process_of_this_host_that_lives_is_found_without_locks_of_files(bucket):
    path = lock._absolute(bucket) / lock.NAME
    with lock.held(bucket):
        found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"token": "other"}))
    with (
        pytest.raises(UserError, match="has been writing to it since"),
        lock.held(bucket),
    ):
        pass


def test_who_stood_still_and_was_taken_over_ends(place, monkeypatch):
    workdir, path, _ = place
    said = []
    end_job = lambda code, text: said.append((code, text))
    monkeypatch.setattr(lock.ending, "end_job", end_job)
    with lock.held(workdir):
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | ELSEWHERE))
        until = time.monotonic() + 10
        while not said and time.monotonic() < until:
            time.sleep(0.05)
    code, text = said[0]
    assert code == 2
    assert text.startswith(f"process 4321 on node7 took {workdir} over at 20")


def test_a_file_system_without_locks_falls_back_on_beats(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with lock.held(tmp_path):
        match = f"process {os.getpid()} on .* has been writing to it"
        with pytest.raises(UserError, match=match), lock.held(tmp_path):
            pass


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, bucket):
    def refused(workdir):
        with pytest.raises(UserError, match="cannot be written|is a file") as error:
            lock.probe(workdir)
        (line,) = str(error.value).splitlines()
        assert line.startswith(f"--workdir={workdir}: ")
        return line

    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        assert f"{tmp_path}/file is a file, not a folder" in refused(place)
    assert "(" in refused("/proc/vit_jax_run")  # Nobody can make a folder there.

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(lock.os, "fsync", full)
        assert "No space left on device" in refused(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []

    class Forbidden(Exception):
        pass

    def forbid(*args, **options):
        raise Forbidden("403: no access\nto the bucket")

    lock.probe(bucket)
    monkeypatch.setattr(backend.fsspec_backend, "open", forbid)
    assert "(403: no access to the bucket)" in refused(bucket)


@pytest.mark.slow
def test_a_start_that_is_killed_while_it_tries_the_disk_leaves_no_file(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from vit_jax.training import lock\n"
        "lock.os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)\n"
        "lock.probe(sys.argv[1])\n"
    )
    assert run_python("-c", code, tmp_path / "run").returncode == -signal.SIGKILL
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_a_disk_that_is_full_or_read_only_is_refused(tmp_path, options):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if sys.platform != "linux" or subprocess.run(mount, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        if options != "ro":
            (disk / "other").write_bytes(bytes(4096))
        with pytest.raises(UserError, match="Read-only file|No space left on device"):
            lock.probe(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_of_two_starts_the_second_ends_and_a_killed_one_is_followed_at_once(tmp_path):
    workdir = tmp_path / "run"
    lines = "c.total_steps, c.checkpoint_every_steps = 100_000, 1_000"
    recipe = hosts.write_recipe(tmp_path / "tiny.py", lines)
    words = f"--config={recipe}", f"--workdir={workdir}"
    first = hosts.alone("train", *words)
    hosts.wait_for(first, "step 20/")
    second = hosts.alone("train", *words)
    said, _ = second.communicate(timeout=100)
    assert second.returncode == 2, said
    assert re.fullmatch(
        rf"error: --workdir={workdir}: process {first.pid} on \S+ has been writing to it "
        r"since 20.*: end that process, or choose another --workdir\n",
        said,
    )
    assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    third = hosts.alone("train", *words)
    hosts.wait_for(third, "step 3/")
    third.send_signal(signal.SIGTERM)
    said, _ = third.communicate(timeout=100)
    assert third.returncode == 75, said
    assert "waiting up to" not in said
    assert not (workdir / lock.NAME).exists()
    # Each step stands once: nothing was mixed.
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))


def test_a_name_that_no_file_can_have_is_told(tmp_path):
    workdir = tmp_path / ("(" * 300)
    said = r"--workdir=.*File name too long"
    with pytest.raises(UserError, match=said), lock.held(workdir):
        raise AssertionError("it cannot be held")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["train[:10%]", "run*", "what?"])
def test_a_path_that_orbax_would_take_for_a_pattern_is_refused(name, tmp_path):
    for workdir in (tmp_path / name, tmp_path / name / "deeper", f"gs://bucket/{name}"):
        said = r"--workdir=.*contains '[*?\[]'.* choose another --workdir"
        with pytest.raises(UserError, match=said), lock.held(workdir):
            raise AssertionError("it cannot be held")
    assert not any(tmp_path.iterdir())

"""The command as processes that are killed or run out of room."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tfrecord_files
from helpers import run_command
from PIL import Image

from vit_jax.errors import UserError
from vit_jax.tools.preparing import metadata, shards

pytest.importorskip("tensorflow_datasets")
ROOT = pathlib.Path(__file__).parents[1]
RECORDS = 901
SIZE = 40_000  # Bytes of a record.


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A TFRecord preparation of 36 MB: `blobs`, in two files."""
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("blobs") / "blobs" / "1.0.0"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    image = tfds.features.Image(shape=(None, None, 3))
    label = tfds.features.ClassLabel(names=["a", "b"])
    features = tfds.features.FeaturesDict({"image": image, "label": label})
    # A prime number of distinct records, so that no other order gives the same files.
    framed = [tfrecord_files.framed(rng.bytes(SIZE)) for _ in range(7)]
    lengths = [500, RECORDS - 500]
    start = 0
    for i, length in enumerate(lengths):
        path = folder / f"blobs-train.tfrecord-{i:05d}-of-00002"
        path.write_bytes(b"".join(framed[j % 7] for j in range(start, start + length)))
        start += length
    parts = [shards.WrittenShard("", n, n * SIZE, "", 0, "") for n in lengths]
    name = metadata.DatasetName("blobs", "", "1.0.0")
    metadata.write_info(folder, name, features, {"train": parts}, "")
    info = json.loads((folder / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """The manifest of an undisturbed conversion."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert run("--dataset=blobs", f"--from={source}", out) == 0
    return metadata.load_manifest(out / "blobs" / "1.0.0")


def run(*words):
    *words, out = words
    return run_command("prepare", [*words, f"--data_dir={out}", "--shard_mb=1"])


def start(source, out, *more, before=(), **options):
    command = [*before, sys.executable, "-m", "vit_jax.prepare", "--dataset=blobs"]
    command += ["--shard_mb=1", f"--from={source}", f"--data_dir={out}", *more]
    options = {"stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command, cwd=ROOT, **options)


def wait_for_shards(process, place, count):
    """Waits until some shards are finished; returns their inodes."""
    deadline = time.monotonic() + 60
    while len(notes := list((place / ".state").glob("blobs-*.json"))) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return {note.stem: (place / note.stem).stat().st_ino for note in notes}


def children(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


def alive(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_conversion_resumes(source, expected, tmp_path, processes, capsys):
    target = tmp_path / "blobs" / "1.0.0"
    place = target.with_name("1.0.0.incomplete")
    process = start(source, tmp_path, f"--processes={processes}")
    wait_for_shards(process, place, 3)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stderr.close()
    assert process.returncode == -signal.SIGKILL
    assert len(workers) >= (2 if processes == 2 else 0)
    deadline = time.monotonic() + 10
    while any(map(alive, workers)):  # They see that their parent is gone.
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not target.exists()
    done = wait_for_shards(process, place, 0)
    count = len(expected["splits"]["train"]["shards"])
    assert 3 <= len(done) < count

    assert run("--dataset=blobs", f"--from={source}", tmp_path) == 0
    assert f"{len(done)} of {count} shards are finished" in capsys.readouterr().out
    assert {name: (target / name).stat().st_ino for name in done} == done
    assert metadata.verify(target) == expected
    assert not place.exists() and not list(target.glob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_ends_a_conversion_with_one_line(source, tmp_path, processes, number):
    place = tmp_path / "blobs" / "1.0.0.incomplete"
    # As from a shell: where tests are run in the background, signals may be ignored.
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP,)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    more = {"start_new_session": True}
    process = start(source, tmp_path, f"--processes={processes}", **more)
    for each, handler in before.items():
        signal.signal(each, handler)
    wait_for_shards(process, place, 1)
    os.killpg(process.pid, number)  # As service managers do.
    _, text = process.communicate(timeout=60)
    ctrl_c = number == signal.SIGINT
    assert process.returncode == (130 if ctrl_c else 75), text
    what = "interrupted" if ctrl_c else number.name
    assert text.splitlines() == [f"{what}: repeat the command to resume"]
    assert not list(place.rglob("*.part"))


@pytest.mark.parametrize("kind", ["tfrecord", "folder"])
def test_a_finished_set_is_left_as_it_is(source, tmp_path, capsys, encode, kind):
    words = ["--dataset=blobs", f"--from={source}"]
    if kind == "folder":
        image = tmp_path / "flowers" / "train" / "bee" / "a.png"
        image.parent.mkdir(parents=True)
        image.write_bytes(encode(np.zeros((2, 3, 3), np.uint8), "PNG"))
        words = ["--dataset=folder", f"--from={tmp_path / 'flowers'}"]
    out = tmp_path / "out"
    assert run(*words, out) == 0

    def files():
        return {p: p.stat().st_mtime_ns for p in out.rglob("*")}

    capsys.readouterr()
    before = files()
    assert run(*words, out) == 0
    said = capsys.readouterr().out
    assert "the set exists" in said and str(out) in said
    with pytest.raises(UserError, match=r"other flags \(splits\): add --verify"):
        run(*words, "--splits=test", out)
    assert files() == before


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_in_one_line(source, tmp_path):
    place = tmp_path / "blobs" / "1.0.0.incomplete"
    process = start(source, tmp_path, "--processes=2")
    wait_for_shards(process, place, 1)
    # The first child keeps track of shared memory.
    os.kill(max(children(process.pid)), signal.SIGKILL)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 2
    line = text.strip().splitlines()[-1]
    assert line.startswith("error: a worker process died (killed, or out of memory)")
    assert "Traceback" not in text
    assert not (tmp_path / "blobs" / "1.0.0").exists()


def test_no_room_is_one_line(source, tmp_path):
    # Every file, in KiB; the last shard is not larger, so all meet it.
    limited = "bash", "-c", 'ulimit -f 586; exec "$@"', "bash"
    process = start(source, tmp_path, before=limited)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 2
    (line,) = text.strip().splitlines()
    assert line.startswith("error: cannot write ")
    assert "00000-of-00037: File too large; finished shards are kept: make room" in line
    assert not (tmp_path / "blobs" / "1.0.0").exists()


def test_converting_from_a_data_dir_and_verifying(source, expected, tmp_path, capsys):
    assert run("--dataset=blobs", f"--from={source.parents[1]}", tmp_path) == 0
    assert run("--dataset=blobs", "--verify", tmp_path) == 0
    text = capsys.readouterr().out
    assert f"verified {tmp_path}/blobs/1.0.0\n  train: 901 records in 37 shards" in text
    name = expected["splits"]["train"]["shards"][5]["file"]
    shard = tmp_path / "blobs" / "1.0.0" / name
    assert len(list(shards.read(shard))) > 20
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="00005-of-00037: is truncated"):
        run("--dataset=blobs", "--verify", tmp_path)


def test_an_image_folder_is_a_set_of_its_name(tmp_path, capsys):
    for i, path in enumerate(("train/a/0.png", "train/b/1.png", "train/b/2.png")):
        path = tmp_path / "My Pets" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 5), (i, 0, 0)).save(path)
    (tmp_path / "My Pets/train/b/3.png").write_bytes(b"no image")
    words = ["--dataset=folder", f"--from={tmp_path / 'My Pets'}"]
    with pytest.raises(UserError, match=r"b/3.png cannot be decoded"):
        run(*words, tmp_path / "out")
    assert run(*words, "--on_error=skip", "--name=pets:2.0.0", tmp_path / "out") == 0
    captured = capsys.readouterr()
    assert "out/pets/2.0.0\n  train: 3 records in 1 shards" in captured.out
    left_out = "skipped: damaged image 1\n  train/b/3.png cannot be decoded"
    assert left_out in captured.err
    (tmp_path / "My Pets/train/b/3.png").unlink()
    (tmp_path / "out/my_pets/1.0.0.incomplete/.state/plan.json").unlink()
    assert run(*words, tmp_path / "out") == 0
    assert (tmp_path / "out/my_pets/1.0.0/manifest.json").is_file()
    with pytest.raises(UserError, match="is inside --from=.*My Pets"):
        run(*words, tmp_path / "My Pets" / "out")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("folder", "--dataset=folder needs --from=DIR"),
        ("folder --from=/no/where", "--from=/no/where is not a folder"),
        ("blobs --from=/no/where", "--from=/no/where is not a folder"),
        ("webdataset", "--dataset=webdataset needs --from=DIR"),
        ("webdataset --from=tests", "has no tar files .*tests/train/\\*.tar"),
        ("folder --from=. --caption=txt", "--caption does not apply"),
        ("blobs --from=. --verify", "give its name .* no --from"),
        ("blobs --verify", "holds no readable blobs"),
        ("blobs --splits=train", "--splits does not apply here"),
        ("blobs --from=. --unchecked", "--unchecked does not apply"),
        ("folder --from=. --name=digits", "--name=digits is the name of another"),
        ("folder --from=. --name=1x", "--name='1x' is not a data set"),
        ("folder --from=. --name=MyPets", "write mypets"),
        ("folder --from=. --name=objectnet", "--name=objectnet is the name"),
        ("mnist --data_dir=gs://b", "--data_dir=gs://b: .* on a local disk"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words, match, tmp_path):
    words = [f"--data_dir={tmp_path}", *f"--dataset={words}".split()]
    with pytest.raises(UserError, match=match):
        run_command("prepare", words)

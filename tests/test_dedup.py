"""`python -m vit_jax.dedup`, with duplicates planted among real photographs."""

import csv
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from vit_jax import dedup
from vit_jax.command_line import cli, files
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.tools.near_duplicates import scan

ROOT = pathlib.Path(__file__).parents[1]
HIGH, WIDE = 97, 107

PLANTED = {  # Of the test image with the same number.
    "resized": lambda image: image.resize((WIDE * 5 // 8, HIGH * 5 // 8)),
    "cropped": lambda image: image.crop((7, 2, 7 + WIDE * 9 // 10, 2 + HIGH * 9 // 10)),
    "recompressed": lambda image: image,
    "flipped": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "grey": lambda image: image.convert("L"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder data set: tiles to test on; others, and 10 planted ones, to train on."""
    root = tmp_path_factory.mktemp("dedup")
    tiles = [
        Image.fromarray(image[y : y + HIGH, x : x + WIDE])
        for y in range(0, 4 * HIGH, HIGH)
        for x in range(0, 6 * WIDE - WIDE, WIDE)
        for image in load_sample_images().images
    ]
    tiles = [tile for tile in tiles if not is_sky(tile)]
    test, train = tiles[::2], tiles[1::2]
    for split, images in {"test": test, "train": train}.items():
        for i, image in enumerate(images):
            save(image, root / split / "ab"[i % 2] / f"{i}.jpg")
    for number, (name, change) in enumerate(PLANTED.items()):
        for k in (number, number + 6):
            path = root / "train" / "a" / f"{name}{k}.jpg"
            save(change(test[k]), path, quality=30 if name == "recompressed" else 90)
    return root


def is_sky(tile):
    """Whether a tile has next to no detail: its copies are like any other sky."""
    grey = np.asarray(tile.convert("L").resize((64, 64)), int)
    return np.abs(np.diff(grey, axis=1)).mean() < 3


def save(image, path, quality=90):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=quality)


def planted():
    return {
        f"train/a/{name}{k}.jpg": k
        for number, name in enumerate(PLANTED)
        for k in (number, number + 6)
    }


def words(place, out, *more):
    sets = f"--pretrain=folder@{place}#train", f"--against=folder@{place}#test"
    return [*sets, f"--out={out}", *more]


def run(*words):
    return dedup.main(cli.parse(dedup.parser(), list(map(str, words))))


def start(*command):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )


def ids(path):
    return [line for line in path.read_text().splitlines() if line[0] != "#"]


def test_a_process_lists_what_was_planted_and_training_leaves_it_out(place, tmp_path):
    out, sheet = tmp_path / "new" / "out.txt", tmp_path / "sheet.png"
    end = start("-m", "vit_jax.dedup", *words(place, out, f"--sheet={sheet}"))
    source = training_split(place, "")
    assert end.returncode == 0, end.stderr
    assert f"folder@{place}#train: {len(source)}/{len(source)}" in end.stderr
    assert f"{out}: 10 of {len(source)} records of" in end.stdout
    assert sorted(ids(out)) == sorted(planted())

    header = [line for line in out.read_text().splitlines() if line[0] == "#"]
    assert header[1:] == [
        f"# pretrain: folder@{place}#train ({len(source)} records)",
        f"# against: folder@{place}#test ({len(list(place.glob('test/*/*')))} records)",
        f"# method: {scan.METHOD} >= 0.9",
        "# 10 records in 10 pairs; not compared: 0 damaged, 0 flat",
    ]
    with out.with_name("out.txt.pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        number = planted()[row["pretrain"]]
        assert row["record"] == f"test/{'ab'[number % 2]}/{number}.jpg"
        assert row["against"] == f"folder@{place}#test"
        assert 0.9 <= float(row["correlation"]) <= 1
        assert 0 <= int(row["distance"]) <= 28
    with Image.open(sheet) as picture:
        assert picture.size[1] == 3 * (160 + 44)  # Ten pairs, four a row.
    assert {path.name for path in out.parent.iterdir()} == {
        out.name,
        f"{out.name}.pairs.csv",
    }

    kept = training_split(place, str(out))
    names = {kept.record_id(i) for i in range(len(kept))}
    everything = {source.record_id(i) for i in range(len(source))}
    assert names == everything - set(planted())


def training_split(place, exclude):
    keys = {"name": "folder", "data_dir": str(place), "num_classes": 2}
    return open_source(DataConfig(**keys, exclude=exclude), "train")


KILLED = """
import os, signal, sys
from vit_jax import dedup
from vit_jax.command_line import cli, files
from vit_jax.tools.near_duplicates import scan
scan.CHUNK = 5
show, last = dedup._Bar.show, sys.argv.pop(1)
def tell(self, name, before, now, total):
    show(self, name, before, now, total)
    print(name.split("#")[1], before, now, flush=True)
    if f"{name.split('#')[1]} {now}" == last:
        os.kill(os.getpid(), signal.SIGKILL)
dedup._Bar.show = tell
sys.exit(dedup.main(cli.parse(dedup.parser())))
"""


@pytest.mark.parametrize(("split", "number"), [("test", 10), ("train", 15)])
def test_a_killed_scan_resumes(place, tmp_path, monkeypatch, split, number):
    monkeypatch.setattr(scan, "CHUNK", 5)
    assert run(*words(place, tmp_path / "whole.txt")) == 0
    out = tmp_path / "out.txt"
    end = start("-c", KILLED, f"{split} {number}", *words(place, out))
    assert end.returncode == -signal.SIGKILL, end.stderr
    assert not out.exists()
    end = start("-c", KILLED, "never", *words(place, out))
    assert end.returncode == 0, end.stderr
    # What was done before the kill is not done again: the first lines say so.
    told = [line.split() for line in end.stdout.splitlines()[:-1]]
    before = next(int(done) for name, done, _ in told if name == split)
    assert before >= number
    assert out.read_text() == (tmp_path / "whole.txt").read_text()
    assert not out.with_name("out.txt.scan").exists()


def test_a_scan_of_something_else_or_by_another_process_is_refused(
    tmp_path, monkeypatch
):
    rows = ["split,front,back", "train,a.png,b.png", "test,b.png,a.png"]
    (tmp_path / "sides.csv").write_text("\n".join(rows))
    for number, name in enumerate("ab"):
        save(Image.new("RGB", (9, 7), (number, 80, 80)), tmp_path / f"{name}.png")
    table = f"table@{tmp_path / 'sides.csv'}"
    command = [f"--pretrain={table}#train", f"--against={table}#test"]
    command += [f"--out={tmp_path / 'out.txt'}", "--image_key=front"]

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dedup._Bar, "show", stop)
    with pytest.raises(KeyboardInterrupt):
        run(*command)
    monkeypatch.undo()
    for other, message in (
        ("--correlation=0.8", r"holds a scan with correlation=0\.9, now it is 0\.8"),
        (
            "--image_key=back",
            r"with image_key=\['front', 'front'\], now it is \['back',",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(*command, other)
    busy = pytest.raises(UserError, match="is in use by another process: wait for it")
    with files.lock_folder(tmp_path / "out.txt.scan", ""), busy:
        run(*command)
    assert run(*command) == 0


def test_damaged_and_flat_images_are_counted_and_left_out(place, tmp_path, capsys):
    root = tmp_path / "data"
    shutil.copytree(place, root)
    (root / "train" / "a" / "grey4.jpg").write_bytes(b"")
    broken = root / "test" / "a" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:900])
    for split in ("train", "test"):
        Image.new("RGB", (31, 17), "white").save(root / split / "b" / "blank.png")
    out = tmp_path / "out.txt"
    assert run(*words(root, out)) == dedup.EXIT_DAMAGED
    lost = {"train/a/grey4.jpg", "train/a/resized0.jpg"}
    assert set(ids(out)) == set(planted()) - lost
    shown = capsys.readouterr()
    assert "not compared: 2 damaged, 2 flat" in shown.out
    assert "#train train/a/grey4.jpg: is empty (0 bytes)\n" in shown.err
    assert "#test test/a/0.jpg: cannot be decoded" in shown.err
    assert "; not compared: 2 damaged, 2 flat\n" in out.read_text()


def test_a_record_is_no_duplicate_of_itself(place, tmp_path):
    # Two splits that share half of the records.
    out = tmp_path / "out.txt"
    given = f"--pretrain=folder@{place}#test", f"--against=folder@{place}#test[:50%]"
    assert run(*given, f"--out={out}") == 0
    assert ids(out) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--pretrain=nowhere@#x"], r"'nowhere@#x' is not NAME\[@DIR\]\[#SPLIT\]"),
        (["--pretrain=folder@{}#test"], "is named twice: name each split once"),
        (["--against=digits,digits#test"], "is named twice: name each split once"),
        (["--against=folder@{}#val"], "split 'val': no folder"),
        (["--out={}/test/a/0.jpg"], "exists: remove it, or choose another --out"),
        (["--config.seed=3"], "--config.seed: de-duplicating takes no config"),
    ],
)
def test_bad_input_is_refused(place, tmp_path, changed, message):
    changed = [word.format(place) for word in changed]
    with pytest.raises(UserError, match=message):
        run(*words(place, tmp_path / "out.txt"), *changed)


def test_a_threshold_that_is_none_ends_with_one_line(place, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*words(place, tmp_path / "out.txt", "--correlation=1.5"))
    assert "'1.5' is not above 0 and up to 1" in capsys.readouterr().err

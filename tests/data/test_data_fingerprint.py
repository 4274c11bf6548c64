import json
import os
import shutil

import image_folder
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vit_jax.data import fingerprint as fingerprints
from vit_jax.data.config import DataConfig
from vit_jax.data.fingerprint import differences, fingerprint
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.folder import FolderSource
from vit_jax.data.sources.open import open_source
from vit_jax.data.splits import Numbering


@pytest.fixture
def compare(data_config):
    """Tells how what a config opens differs from what it opened before a change."""

    def compare(change, **keys):
        data = data_config(**keys)
        before = open_source(data, data.split)
        stored = fingerprint(before)
        assert json.loads(json.dumps(stored)) == stored
        assert differences(stored, before) == []
        change()
        after = open_source(data, data.split)
        lines = differences(stored, after)
        assert bool(lines) == (stored != fingerprint(after))
        return "; ".join(lines)

    return compare


def data_of(keys):
    return DataConfig(**keys, num_classes=3)


NAMES = "names of the image files or their order differ"
CONTENTS = "sizes or contents of the image files differ"


def append(*paths):
    for path in paths:
        path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: None, ""),
        (lambda path: path.rename(path.with_name("other.png")), NAMES),
        (lambda path: path.rename(path.parents[1] / "bee" / "moved.png"), NAMES),
        (append, CONTENTS),
        (
            lambda path: shutil.copy(path, path.with_name("added.png")),
            f"19 records are now 20; {NAMES}",
        ),
        (lambda path: path.unlink(), f"19 records are now 18; {NAMES}"),
        (lambda path: append(*path.parents[1].rglob("*.png")), CONTENTS),
    ],
)
def test_that_a_folder_has_changed_is_told(folder, compare, change, expected):
    path = folder / "train" / "ant" / "0.png"
    found = compare(lambda: change(path), name="folder", data_dir=str(folder))
    assert found == expected


def lay_out(kind, root):
    """Writes a data set, and returns the keys that open it."""
    images = root / "images"
    image_folder.write(images)
    keys = {"name": "folder", "data_dir": images}
    rows = [
        {"image": f"{path.relative_to(root)}", "label": path.parent.name}
        | {"split": path.parts[-3]}
        for path in sorted(images.rglob("*.png"))
    ]
    if kind == "absolute":
        rows = [row | {"image": f"{root / row['image']}"} for row in rows]
        root, kind = root.joinpath(*"x" * len(root.parts)), "csv"  # At another depth.
        root.mkdir(parents=True)
    if kind == "csv":
        lines = [",".join(row.values()) for row in ({k: k for k in rows[0]}, *rows)]
        table = root / "listed.csv"
        table.write_text("\n".join(lines))
        keys = {"name": "table", "data_dir": table}
    elif kind == "parquet":
        table = {"image": [b"image"] * 9, "label": [0, 1, 2] * 3}
        path = root / "parquet" / "train-00000-of-00001.parquet"
        path.parent.mkdir()
        pq.write_table(pa.table(table), path)
        keys = {"name": "parquet", "data_dir": path.parent}
    elif kind == "excluding":
        (root / "listed.txt").write_text("train/ant/0.png\ntrain/bee/1.png\n")
        keys["exclude"] = root / "listed.txt"
    return {key: str(value) for key, value in keys.items()}


def state_of(data, split):
    source = open_source(data, split)
    names = [source.record_id(i) for i in range(len(source))]
    return names, fingerprint(source)


@pytest.mark.parametrize("kind", ["folder", "csv", "absolute", "parquet", "excluding"])
def test_order_split_and_fingerprint_stay_where_a_set_is_moved(
    kind, data_config, tmp_path, monkeypatch
):
    one, other = tmp_path / "Photos", tmp_path / "deeper" / "and" / "PHOTOS"
    other.parent.mkdir(parents=True)
    states = []
    for root in (one, other):
        keys = lay_out(kind, root)
        for part in ("train[:50%]", "train[50%:]"):
            states.append(state_of(data_config(**keys), part))
    assert states[:2] == states[2:]
    # By a link, and from another folder.
    os.symlink(other, tmp_path / "link")
    monkeypatch.chdir(other.parent)
    for place in (str(tmp_path / "link"), "PHOTOS"):
        moved = {key: v.replace(str(other), place, 1) for key, v in keys.items()}
        assert state_of(data_config(**moved), part) == states[-1]


def of_files(changed=()):
    """Makes a listing of 200,000 files, of which some are replaced."""
    names = [f"train/n{i % 1000:08}/n{i % 1000:08}_{i}.JPEG" for i in range(200_000)]
    sizes = 100_000 + np.arange(200_000) % 7_919
    sizes[list(changed)] += 1
    labels = [i % 1000 for i in range(200_000)]
    classes = tuple(f"n{i:08}" for i in range(1000))
    return FolderSource("root", names, labels, classes, sizes)


def test_one_change_of_a_large_listing_is_told_by_few_bytes():
    stored = fingerprint(of_files())
    assert len(json.dumps(stored)) < 500
    (line,) = differences(stored, of_files([123_456]))
    assert line == "sizes or contents of the image files differ"


def test_what_an_earlier_version_stored_of_parts_that_are_not_read_counts_for_nothing():
    stored = fingerprint(of_files()) | {"captions_sha256": "", "masks_sha256": ""}
    assert differences(stored, of_files()) == []


def test_records_in_memory_are_compared_by_their_pixels(data_config):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 5, 7, 3), np.uint8), np.arange(40) % 3
    numbering = Numbering.of("train[10:]", {"train": 50}, "pets")

    def source(images=images, labels=labels):
        return ArraySource("pets", images, labels, ("ant", "bee", "cat"), numbering)

    stored = fingerprint(source())
    flipped, other = images.copy(), labels.copy()
    flipped[17, 2, 3, 1] ^= 1
    other[4] = 2
    contents = ["sizes or contents of the records differ"]
    assert differences(stored, source(flipped)) == contents
    assert differences(stored, source(images[::-1])) == contents
    assert differences(stored, source(labels=other)) == ["labels of the records differ"]
    data = data_config(image_size=(8, 8), channels=1, name="digits", num_classes=10)
    one, same = (fingerprint(open_source(data, "train")) for _ in range(2))
    assert one == same != fingerprint(open_source(data, "test"))
    assert fingerprints.unchecked(one, ["labels"]) == ""


def test_left_out_records_count(folder, compare, tmp_path):
    listed = tmp_path / "listed.txt"
    listed.write_text("train/ant/0.png\n")

    change = lambda: listed.write_text("train/cat/2.png\n")
    found = compare(change, name="folder", data_dir=str(folder), exclude=str(listed))
    assert found == NAMES


def test_of_parquet_files_labels_and_contents_count(compare, tmp_path):
    path = tmp_path / "parquet" / "train-00000-of-00001.parquet"
    path.parent.mkdir()

    def write(labels, image=b"image"):
        table = pa.table({"image": [image] * len(labels), "label": labels})
        pq.write_table(table, path, row_group_size=4)

    def changed(*args):
        write([0, 1, 2, 2, 1, 0])
        return compare(lambda: write(*args), name="parquet", data_dir=str(path.parent))

    # Swapped, so that no size tells.
    assert changed([0, 2, 1, 2, 1, 0]) == "labels of the shards differ"
    contents = changed([0, 1, 2, 2, 1, 0], b"other")
    assert contents == "sizes or contents of the shards differ"
    assert changed([0, 1, 2, 2, 1, 0]) == ""


@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_captions_that_are_read_count(folder, compare, kind):
    keys = {"name": "folder", "data_dir": str(folder), "caption_key": "txt"}
    pixels = (folder / "train" / "ant" / "0.png").read_bytes()

    def write(text):  # Of equal length, so that no size tells.
        if kind == "txt":
            for path in (folder / "train").rglob("*.png"):
                path.with_suffix(".txt").write_text("a photograph")
            (folder / "train" / "ant" / "0.txt").write_text(text)
        else:
            texts = ["a", text, "z"]
            table = {"image": [pixels] * 3, "label": [0, 1, 2], "txt": texts}
            pq.write_table(pa.table(table), folder / "train.parquet")
            keys["name"] = "parquet"

    write("a cat")
    found = compare(lambda: write("a dog"), **keys)
    what = "shards" if kind == "parquet" else "image files"
    assert f"captions of the {what} differ" in found
    # What a run of an earlier version did not store is not compared.
    data = data_of(keys)
    stored = fingerprint(open_source(data, "train"))
    del stored["captions_sha256"]
    assert differences(stored, open_source(data, "train")) == []
    # Where none are read, they are not compared.
    del keys["caption_key"]
    assert compare(lambda: write("a cat"), **keys) == "" or kind == "parquet"


class Own(Source):
    """A source of a user's own, which tells names alone."""

    class_names, images, labels = ("a", "b"), None, None

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def record_id(self, i):
        return self.names[i]


def test_a_source_of_ones_own_is_compared_by_what_it_tells():
    stored = fingerprint(Own(["x", "y", "z"]))
    assert differences(stored, Own(["x", "y", "z"])) == []
    for names in ("yxz", "xyw"):
        (line,) = differences(stored, Own(list(names)))
        assert line == "names of the records or their order differ"
    assert "names of the records but not their labels and sizes" in (
        fingerprints.unchecked(stored, ["labels"])
    )
    assert "names of the records but not their sizes:" in (
        fingerprints.unchecked(stored, [])
    )

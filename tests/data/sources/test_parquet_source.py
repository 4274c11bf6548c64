import dataclasses
import json
import os
import pathlib
import pickle

import numpy as np
import pytest

from vit_jax.data import decode, pipeline
from vit_jax.data.fingerprint import differences, fingerprint
from vit_jax.data.sources import arrays, parquet
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

# Rows of the files of each split; row groups hold 4.
FILES = {"train": (11, 3, 9), "test": (5,)}
NAMES = ("ant", "bee", "cat")


def write(path, cells, labels, *, names=NAMES, group=4, columns=("image", "label")):
    """Writes a file as the hub's own library does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    info = {columns[1]: {"names": list(names), "_type": "ClassLabel"}}
    info |= {columns[0]: {"_type": "Image"}}
    schema = pa.schema(
        [(columns[0], image), (columns[1], pa.int64()), ("note", pa.string())],
        metadata={"huggingface": json.dumps({"info": {"features": info}})},
    )
    cells = [{"bytes": data, "path": None} for data in cells]
    table = pa.table([cells, labels, ["x"] * len(labels)], schema=schema)
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture
def images(photograph, encode):
    """Makes the file of record n: a photograph with n in its corner."""

    def make(n):
        pixels = photograph.copy()
        pixels[0, 0] = n
        return encode(pixels, "PNG")

    return make


@pytest.fixture
def shards(tmp_path, images):
    """A set of 23 + 5 records in data/, as the hub lays it out."""
    for split, counts in FILES.items():
        first = 0 if split == "train" else 100
        for i, count in enumerate(counts):
            numbers = range(first, first + count)
            first += count
            write(
                tmp_path / "data" / f"{split}-{i:05}-of-{len(counts):05}.parquet",
                [images(n) for n in numbers],
                [n % 3 for n in numbers],
            )
    return tmp_path


@pytest.fixture
def data(data_config, shards, monkeypatch):
    monkeypatch.setattr(arrays, "_MEMORY", 0)  # As if it were a large set.
    return data_config(name="parquet", data_dir=str(shards), image_size=(37, 53))


def corner(item):
    return int(decode.decode(item["image"])[0, 0, 0])


def test_each_row_is_read_with_its_label(data):
    source = open_source(data, "train")
    assert (len(source), source.images, source.class_names) == (23, None, NAMES)
    for i in np.random.default_rng(0).permutation(23):
        item = source[int(i)]
        assert (corner(item), item["label"]) == (i, i % 3)
    assert source.describe(20) == "parquet train record 20"
    assert source.record_id(20) == "train/20"


def test_other_columns_of_a_file_are_not_those_read_before(
    data_config, tmp_path, images
):
    # Plain bytes in columns of other names, too.
    table = {"img": [images(7)], "fine": pa.array([7], pa.uint8()), "coarse": [1]}
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    common = {"name": "parquet", "data_dir": str(tmp_path), "image_key": "img"}
    for key, label in (("fine", 7), ("coarse", 1)):
        data = data_config(**common, label_key=key, num_classes=9)
        item = open_source(data, "train")[0]
        assert (corner(item), item["label"]) == (7, label)


def test_slices_and_sums_select_rows_across_files(data):
    source = pickle.loads(pickle.dumps(open_source(data, "test[1:3]+train[10:15]")))
    assert [corner(source[i]) for i in range(7)] == [101, 102, 10, 11, 12, 13, 14]
    assert [source.record_id(i) for i in (1, 2)] == ["test/2", "train/10"]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_from_threads_and_processes(data, workers):
    data = dataclasses.replace(
        data, num_threads=3, num_workers=workers, train_transform=""
    )
    source = open_source(data, "train")
    with pipeline.eval_batches(source, data, batch_size=5) as batches:
        rows = [
            (b["image"][b["mask"], 0, 0, 0], b["label"][b["mask"]]) for b in batches
        ]
    found, labels = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    np.testing.assert_array_equal(found, np.arange(23))
    np.testing.assert_array_equal(labels, np.arange(23) % 3)


def test_small_images_lie_in_memory(data_config, tmp_path, encode):
    cells = [encode(np.full((8, 8, 3), n, np.uint8), "PNG") for n in range(9)]
    write(tmp_path / "train.parquet", cells, [0, 1, 2] * 3)
    source = open_source(data_config(name="parquet", data_dir=str(tmp_path)), "train")
    np.testing.assert_array_equal(source.images[:, 3, 3, 1], range(9))
    assert source.record_id(7) == "train/7"


@pytest.mark.parametrize(
    "path", ["train-00000-of-00001-8a3f0c2b1d4e5f67", "c/train/0000", "plain/train"]
)
def test_every_layout_of_the_hub_names_the_split(data_config, tmp_path, images, path):
    write(tmp_path / f"{path}.parquet", [images(7)], [2])
    data = data_config(name="parquet", data_dir=str(tmp_path))
    assert open_source(data, "train")[0]["label"] == 2


def test_wrong_splits_and_folders_are_user_errors(data, shards, images, tmp_path):
    def refused(match, split="train", data_dir=shards):
        there = dataclasses.replace(data, data_dir=str(data_dir))
        with pytest.raises(UserError, match=match):
            open_source(there, split)

    refused(r"parquet has no split 'val'; it has test, train", "val")
    (tmp_path / "empty").mkdir()
    refused(r"no \*\.parquet files below", data_dir=tmp_path / "empty")
    (shards / "data" / "train-00001-of-00003.parquet").unlink()
    refused("'train' has 2 of 3 files")
    write(shards / "other" / "test.parquet", [images(1)], [0])
    refused(r"'test' in several folders .*data.*other")


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"image_key": "img"}, r"data\.image_key='img'.*image, label, note"),
        ({"label_key": "kind"}, r"data\.label_key='kind'.*image, label, note"),
        ({"label_key": "note"}, r"'note'.*holds string, not class numbers"),
        ({"data_dir": "/nowhere/at/all"}, "'/nowhere/at/all' is not a folder"),
    ],
)
def test_wrong_keys_are_user_errors(data, keys, match):
    data = dataclasses.replace(data, **keys)
    with pytest.raises(UserError, match=match):
        open_source(data, "train")


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_damaged_file_is_named(data, shards, damage):
    path = shards / "data" / "train-00001-of-00003.parquet"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[:-9], "text": b"<html>" * 99}[damage])
    with pytest.raises(UserError, match="train-00001-of-00003.parquet is not a whole"):
        open_source(data, "train")


def test_damage_inside_a_file_names_set_split_and_record(data, shards):
    path = shards / "data" / "train-00000-of-00003.parquet"
    content = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    data = dataclasses.replace(data, train_transform="", eval_transform="")
    source = open_source(data, "train")
    assert corner(source[3]) == 3  # The group before.
    assert corner(source[8]) == 8  # And after.
    match = r"parquet train record 4 cannot be read \(row"
    batches = pipeline.eval_batches(source, data, batch_size=6)
    with batches, pytest.raises(UserError, match=match):
        list(batches)
    data = dataclasses.replace(data, on_error="skip")
    with pipeline.eval_batches(source, data, batch_size=6) as batches:
        assert sum(batch["skipped"].sum() for batch in batches) == 4


def test_a_row_without_image_or_label_is_a_damaged_record(
    data_config, tmp_path, images
):
    write(tmp_path / "train.parquet", [None, images(1), b""], [0, None, 1])
    data = data_config(name="parquet", data_dir=str(tmp_path))
    source = open_source(data, "train")
    with pytest.raises(decode.DamagedImage, match="has no bytes"):
        source[0]
    with pytest.raises(decode.DamagedImage, match="has no label in column 'label'"):
        source[1]
    with pytest.raises(decode.DamagedImage, match=r"is empty \(0 bytes\)"):
        decode.decode(source[2]["image"])


def write_unlabelled(path, cells, **columns):
    """Writes a file of images and of other columns."""
    rows = [{"bytes": data, "path": None} for data in cells]
    pq.write_table(pa.table({"image": rows} | columns), path, row_group_size=4)


@pytest.mark.parametrize("memory", [0, 2**29])
@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ({}, "parquet has no such column; it has image"),
        (
            {"label": pa.array([None] * 9, pa.int64())},
            "this column of parquet is empty; name another of image, label",
        ),
        ({"label": pa.nulls(9)}, "this column of parquet holds null, not class"),
        ({"label": pa.array([None, 1] * 4 + [2])}, None),
        ({"label": pa.array([-1] * 9)}, None),
        ({"label": ["cat"] * 9}, "this column of parquet holds string, not class"),
    ],
)
def test_a_file_without_labels_is_read_without(
    data_config, tmp_path, encode, monkeypatch, labels, match, memory
):
    monkeypatch.setattr(arrays, "_MEMORY", memory)
    images = [np.full((8, 8, 3), n, np.uint8) for n in [*range(9), 77]]
    *cells, other = (encode(image, "PNG") for image in images)
    write_unlabelled(tmp_path / "train.parquet", cells, **labels)
    keys = {"name": "parquet", "data_dir": str(tmp_path), "image_size": (8, 8)}
    keys |= {"train_transform": "", "eval_transform": ""}
    data = data_config(**keys, num_classes=0)
    source = open_source(data, "train[1:]")
    assert (source.images is None) == (not memory)
    assert (len(source), source.class_names, source.labels) == (8, (), None)
    assert source[3].keys() == {"image"}
    stored = fingerprint(source)
    assert differences(stored, source) == []
    with pipeline.eval_batches(source, data, batch_size=8) as batches:
        (batch,) = batches
    assert batch.keys() == {"image", "index", "mask", "skipped"}
    np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], range(1, 9))
    assert not batch["skipped"].any()
    if match:
        match = rf"data\.label_key='label': {match}.*; or set .*num_classes=0"
        with pytest.raises(UserError, match=match):
            open_source(data_config(**keys), "train")
    cells[4] = other
    write_unlabelled(tmp_path / "train.parquet", cells, **labels)
    (line,) = differences(stored, open_source(data, "train[1:]"))
    what = "records" if memory else "shards"
    assert line == f"sizes or contents of the {what} differ"


@pytest.fixture
def cached(tmp_path, monkeypatch, images):
    """The hub's cache with one data set, and no network."""
    import huggingface_hub
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    folder = cache / "datasets--some--flowers"
    (folder / "refs").mkdir(parents=True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    write(snapshot / "plain" / "train-00000-of-00001.parquet", [images(5)], [1])
    write(snapshot / "large" / "train-00000-of-00001.parquet", [images(6)], [2])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    original = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *args, **more: original(*args, cache_dir=str(cache), **more),
    )


@pytest.mark.parametrize(
    ("name", "number"), [("some/flowers/plain", 5), ("some/flowers@main/large", 6)]
)
def test_a_set_of_the_hub_is_read_from_the_cache(data_config, cached, name, number):
    source = open_source(data_config(name=f"hf://datasets/{name}"), "train")
    assert corner(source[0]) == number
    assert source.describe(0) == f"hf://datasets/{name} train record 0"


def test_what_the_hub_lacks_is_a_user_error(data_config, cached):
    match = r"'hf://datasets/some/thing' cannot be downloaded \(.*check the name"
    with pytest.raises(UserError, match=match):
        open_source(data_config(name="hf://datasets/some/thing"), "train")
    with pytest.raises(UserError, match="write hf://datasets/OWNER/NAME"):
        open_source(data_config(name="hf://datasets/thing"), "train")


def test_only_the_files_asked_for_are_downloaded(tmp_path, monkeypatch):
    import fnmatch

    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, **more: asked.update(more, repo=repo) or str(tmp_path),
    )
    assert parquet.download("hf://datasets/o/n@v1/a/b") == os.path.join(tmp_path, "a/b")
    assert (asked["repo"], asked["revision"]) == ("o/n", "v1")
    there = ["a/b/train.parquet", "a/c/train.parquet", "a/b/x.bin", "README.md"]
    assert fnmatch.filter(there, asked["allow_patterns"]) == ["a/b/train.parquet"]
    assert pathlib.Path(parquet.download("hf://datasets/o/n")) == tmp_path
    assert len(fnmatch.filter(there, asked["allow_patterns"])) == 2

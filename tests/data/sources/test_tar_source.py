"""Tar shards as a data set: records in any order, from the headers of the members."""

import json
import pickle

import numpy as np
import pytest
from tar_files import jpeg, shard, write_tar

from vit_jax.data import decode, fingerprint, pipeline
from vit_jax.data.sources import tar
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.sources.base import read_labels
from vit_jax.data.sources.open import open_source
from vit_jax.errors import NoSplit, UserError

SIZE = 70, 66  # Larger than images that are decoded into memory.
NAMES = "red ant", "bee", "wasp"


def sample(i, size=SIZE):
    fields = {"width": size[0], "species": NAMES[i % 3], "alt": f"alt {i}"}
    return {
        f"a/{i:05d}.cls": str(i % 3).encode(),
        f"a/{i:05d}.jpg": jpeg(i, size),
        f"a/{i:05d}.txt": f"caption {i}\n".encode(),
        f"a/{i:05d}.json": json.dumps(fields).encode(),
    }


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    tar._cached.cache_clear()
    return tmp_path / "cache" / "tar"


@pytest.fixture
def root(tmp_path):
    """Two shards of 5 and 4 samples to train on, and one of 3 to validate on."""
    root = tmp_path / "set"
    shard(root / "train" / "00000.tar", *map(sample, range(5)))
    shard(root / "train" / "00001.tar", *map(sample, range(5, 9)))
    shard(root / "val" / "00000.tar", *map(sample, range(20, 23)))
    (root / "classnames.txt").write_text("\n".join(NAMES))
    return root


@pytest.fixture
def opened(data_config):
    def open_tar(root, split="train", **keys):
        data = data_config(name="tar", data_dir=str(root), split="train", **keys)
        return open_source(data, split)

    return open_tar


def test_records_are_read_in_any_order(root, opened):
    source = opened(root)
    assert len(source) == 9 and source.class_names == NAMES
    for i in (8, 0, 4, 5):
        assert source[i] == {"image": jpeg(i, SIZE), "label": i % 3}
    assert read_labels(source).tolist() == [i % 3 for i in range(9)]
    assert source.record_id(6) == "train/6"
    assert source.describe(6) == f"{root}/train/00001.tar/a/00006.jpg"
    with pytest.raises(IndexError):
        source[9]
    part = opened(root, "train[4:6]+val[1:]")
    numbers = [4, 5, 21, 22]
    assert [part[i]["image"] for i in range(4)] == [jpeg(i, SIZE) for i in numbers]
    assert part.record_id(2) == "val/1"
    assert part.locate(["val/1", "train/8"]).tolist() == [2]
    again = pickle.loads(pickle.dumps(source))
    assert again[7] == source[7]
    with pytest.raises(NoSplit, match="no split 'test'; it has train, val"):
        opened(root, "test")


def test_labels_are_not_read_without_classes(root, opened):
    for path in root.glob("*.txt"):
        path.unlink()
    source = opened(root, num_classes=0)
    assert set(source[3]) == {"image"} and source.class_names == ()
    one = opened(root / "val" / "00000.tar", "train", num_classes=0)
    assert [one[i]["image"] for i in range(3)] == [jpeg(i, SIZE) for i in range(20, 23)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"label_key": "json:species"}, {"label": 2}),
        ({"caption_key": "txt", "num_classes": 0}, {"text": ["caption 8"]}),
        ({"caption_key": "json:alt", "num_classes": 0}, {"text": ["alt 8"]}),
    ],
)
def test_labels_and_captions_of_other_members(root, opened, keys, expected):
    assert opened(root, **keys)[8] == {"image": jpeg(8, SIZE)} | expected


def test_what_a_sample_lacks_is_a_damaged_record(root, opened):
    samples = [sample(i) for i in range(5)]
    del samples[1]["a/00001.cls"]
    samples[2]["a/00002.cls"] = b"7"
    del samples[3]["a/00003.jpg"]
    shard(root / "train" / "00000.tar", *samples)
    source = opened(root)
    assert len(source) == 8 and source[0]["label"] == 0
    for i, message in ((1, "has no cls"), (2, "cls '7', not a class from 0 to 2")):
        with pytest.raises(decode.DamagedImage, match=message) as caught:
            source[i]
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert source.known_labels() is None
    with pytest.raises(UserError, match="label_key='json:no': no sample of .* member"):
        write_tar(root / "train" / "00000.tar", [("1.jpg", jpeg(1))])
        opened(root / "train" / "00000.tar", label_key="json:no")


def test_small_images_are_decoded_into_memory(tmp_path, opened):
    root = tmp_path / "small"
    shard(root / "0.tar", *(sample(i, (13, 9)) for i in range(4)))
    source = opened(root)
    assert isinstance(source, ArraySource) and source.images.shape == (4, 9, 13, 3)
    assert source.labels.tolist() == [0, 1, 2, 0]


def test_positions_are_read_once(root, opened, cache, monkeypatch):
    first = opened(root)
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(tar, "read_positions", lambda path: pytest.fail(str(path)))
    tar._cached.cache_clear()
    again = opened(root)
    assert again[6] == first[6] and again.describe(6) == first.describe(6)
    assert fingerprint.fingerprint(first) == fingerprint.fingerprint(again)
    monkeypatch.undo()
    for path in cache.iterdir():
        path.write_bytes(b"damaged")
    tar._cached.cache_clear()
    assert opened(root)[6] == first[6]


def test_a_changed_or_moved_shard(root, opened, tmp_path):
    stored = fingerprint.fingerprint(opened(root))
    root.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert not fingerprint.differences(stored, opened(moved))
    shard(moved / "train" / "00001.tar", *map(sample, range(6, 10)))
    changed = opened(moved)
    assert changed[5]["image"] == jpeg(6, SIZE)
    assert fingerprint.differences(stored, changed)
    # A file that becomes shorter during the run.
    path = moved / "train" / "00001.tar"
    path.write_bytes(path.read_bytes()[:2_000])
    with pytest.raises(decode.DamagedImage, match="is truncated"):
        changed[8]


def test_training_reads_batches(root, data_config):
    data = data_config(
        name="tar", data_dir=str(root), split="train", train_transform="resize"
    )
    with pipeline.train_batches(
        open_source(data, "train"), data, batch_size=8, seed=0, start=0, stop=1
    ) as batches:
        (batch,) = batches
    assert batch["image"].shape == (8, 13, 17, 3)
    assert np.isin(batch["label"], range(3)).all()


def test_what_is_no_folder_of_shards_is_said(root, opened, tmp_path):
    (tmp_path / "empty").mkdir()
    packed = tmp_path / "packed" / "0.tar.gz"
    packed.parent.mkdir()
    packed.write_bytes(b"")
    cut = tmp_path / "cut" / "0.tar"
    cut.parent.mkdir()
    cut.write_bytes((root / "train" / "00000.tar").read_bytes()[:3_000])
    for place, message in (
        ("nowhere", "data.data_dir='nowhere' does not exist: data.name='tar'"),
        (tmp_path / "empty", r"data_dir=.*has no tar files .*/train/\*.tar"),
        (packed.parent, r"0.tar.gz is compressed.*: unpack it"),
        (cut.parent, "0.tar is damaged or truncated .*: write or download it again"),
    ):
        with pytest.raises(UserError, match=message):
            opened(place)

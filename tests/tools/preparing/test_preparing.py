import json
import os
import pathlib
import shutil

import image_folder
import numpy as np
import pytest
import tfds_sets
import tfrecord_files
from array_record.python import array_record_module
from helpers import tiny_config

from vit_jax.command_line.files import lock_folder
from vit_jax.data import pipeline
from vit_jax.data.sources import folder as image_folders
from vit_jax.data.sources.open import open_source
from vit_jax.data.sources.tfds import open_tfds
from vit_jax.errors import UserError
from vit_jax.tools.preparing import (
    build,
    images,
    metadata,
    shards,
    tfds_builder,
    tfrecord,
)
from vit_jax.tools.preparing.request import Request

tfds = pytest.importorskip("tensorflow_datasets")
SIZES = {"train": 23, "test": 7}
NAME = metadata.DatasetName("tiny_frames", "red", "1.2.0")


@pytest.fixture
def folder(tmp_path):
    """An image folder of 3 classes, 19 training and 4 validation images."""
    image_folder.write(tmp_path)
    return tmp_path


def picture(i):
    noise = np.random.default_rng(i).integers(0, 256, (5, 9, 3), np.uint8)
    return tfds_sets.png(noise)


@pytest.fixture(scope="module")
def builder_class(tmp_path_factory):
    features = {
        "image": tfds.features.Image(shape=(5, 9, 3), encoding_format="png"),
        "label": tfds.features.ClassLabel(names=["a", "b", "c"]),
    }
    splits = {
        name: lambda size=size: (
            {"image": picture(i), "label": i % 3} for i in range(size)
        )
        for name, size in SIZES.items()
    }
    return tfds_sets.builder_class(
        "tiny_frames",
        "1.2.0",
        features,
        splits,
        tmp_path_factory.mktemp("code"),
        config="red",
        registered=True,
    )


@pytest.fixture(scope="module")
def truth(builder_class, tmp_path_factory):
    """What TFDS itself writes as ArrayRecord: data_dir and the set's folder."""
    where = tmp_path_factory.mktemp("tfds")
    builder = builder_class(data_dir=where, config="red", file_format="array_record")
    builder.download_and_prepare()
    return where, pathlib.Path(builder.data_dir)


@pytest.fixture
def frames(truth, tmp_path):
    """The same set as TFRecord: train in files of 10, 0 and 13 records."""
    source = tmp_path / "frames" / "tiny_frames" / "red" / "1.2.0"
    shutil.copytree(truth[1], source)
    info = json.loads((source / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    for split, lengths in zip(info["splits"], ([10, 0, 13], [7]), strict=True):
        old = source / f"tiny_frames-{split['name']}.array_record-00000-of-00001"
        records = list(shards.read(old))
        old.unlink()
        for i, length in enumerate(lengths):
            part, records = records[:length], records[length:]
            number = f"{i:05d}-of-{len(lengths):05d}"
            path = source / f"tiny_frames-{split['name']}.tfrecord-{number}"
            path.write_bytes(b"".join(map(tfrecord_files.framed, part)))
        split["shardLengths"] = [str(length) for length in lengths]
    (source / "dataset_info.json").write_text(json.dumps(info))
    return source


@pytest.fixture
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


def convert(source, data_dir, splits=(), shard_bytes=2**28):
    job = tfrecord.open_conversion(source, list(splits), shard_bytes)
    target = NAME.folder(data_dir)
    build.build(job, target)
    return target


def of_images(root, target, splits=(), shard_bytes=2**28, on_error="raise", check=True):
    name, splits = metadata.DatasetName("pets", "", "1.0.0"), tuple(splits)
    asked = Request("folder", root, name, splits, shard_bytes, on_error, check)
    return build.build(images.open_images(asked), target)


def test_the_checksums_of_the_test_are_those_of_the_standard():
    assert tfrecord_files.crc32c(b"123456789") == 0xE3069283


def test_a_conversion_writes_the_very_files_that_tfds_writes(frames, truth, tmp_path):
    target = convert(frames, tmp_path / "out")
    for path in truth[1].iterdir():
        ours = (target / path.name).read_bytes()
        if path.name == "dataset_info.json":
            assert json.loads(ours) == json.loads(path.read_bytes())
        else:
            assert ours == path.read_bytes(), path.name
    others = {path.name for path in target.iterdir()} - set(os.listdir(truth[1]))
    assert others == {"manifest.json"}
    assert not target.with_name("1.2.0.incomplete").exists()


def test_what_does_not_read_back_is_not_kept(tmp_path, monkeypatch):
    path, records = tmp_path / "a-train.array_record-00000-of-00001", [b"one", b"two"]
    with monkeypatch.context() as patch:
        patch.setattr(shards, "read", lambda path: iter([b"one", b"owt"]))
        with pytest.raises(UserError, match="holds other records than were written"):
            shards.write(path, records)
        patch.setattr(shards, "read", lambda path: iter([b"one"]))
        with pytest.raises(UserError, match="holds other records than were written"):
            shards.write(path, records)
    assert not list(tmp_path.iterdir())
    assert shards.write(path, records).records == 2
    assert list(shards.read(path)) == records


def test_any_number_of_shards_gives_the_same_records(frames, truth, tmp_path):
    target = convert(frames, tmp_path / "out", shard_bytes=700)
    assert len(list(target.glob("tiny_frames-train.array_record-*"))) > 3
    for split in ("train", "train[5:9]+test", "train[:50%]"):
        expected, found = (
            open_tfds("tiny_frames/red", str(data_dir), split, "image", "label")
            for data_dir in (truth[0], tmp_path / "out")
        )
        assert len(found) == len(expected) > 3
        assert all(found[i] == expected[i] for i in range(len(expected)))
        assert found.class_names == ("a", "b", "c")


def test_one_split_alone_can_be_converted(frames, tmp_path):
    target = convert(frames, tmp_path / "out", splits=["test"])
    assert list(tfds.builder_from_directory(target).info.splits) == ["test"]
    assert not list(target.glob("*train*"))


def damage(path, change):
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))


def flip(at):
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("number", "change", "match"),
    [
        (2, flip(40), r"00002-of-00003 record 0 \(byte 0\) .*checksum of its content"),
        (2, flip(0), r"record 0 \(byte 0\) is damaged, the checksum of its length"),
        (2, flip(9), r"record 0 \(byte 0\) is damaged, the checksum of its length"),
        (2, flip(-1), r"record 12 \(byte \d+\) .*the checksum of its content"),
        (2, lambda data: data[:-1], r"record 12 \(byte \d+\) is truncated"),
        (2, lambda data: data[:5], r"record 0 \(byte 0\) is truncated"),
        (2, lambda data: data[:0], r"has 0 records, not the 13"),
        (
            2,
            lambda data: data + tfrecord_files.framed(b"x"),
            "more than the 13 records",
        ),
        (
            1,
            lambda data: tfrecord_files.framed(b"x"),
            "00001-of-00003 has more than the 0",
        ),
        (1, None, "tiny_frames-train.tfrecord-00001-of-00003: No such file"),
    ],
)
def test_a_damaged_tfrecord_is_found(frames, tmp_path, number, change, match):
    path = frames / f"tiny_frames-train.tfrecord-{number:05}-of-00003"
    if change:
        damage(path, change)
    else:
        path.unlink()
    with pytest.raises(UserError, match=match):
        convert(frames, tmp_path / "out")
    assert not NAME.folder(tmp_path / "out").exists()


def test_a_conversion_of_something_else_is_refused(frames, truth, tmp_path):
    with pytest.raises(
        UserError, match="prepared as array_record, which needs no conv"
    ):
        convert(truth[1], tmp_path)
    with pytest.raises(UserError, match="no split 'val'; it has train, test"):
        convert(frames, tmp_path, splits=["val"])
    (frames / "features.json").unlink()
    with pytest.raises(UserError, match="cannot be read as a TFDS data set.*features"):
        convert(frames, tmp_path)


def test_a_preparation_is_found_by_folder_and_by_data_dir(frames, tmp_path):
    data_dir = tmp_path / "frames"
    for text in ("tiny_frames/red", "tiny_frames/red:1.2.0"):
        name = metadata.DatasetName.parse(text)
        assert metadata.find(data_dir, name) == frames
        assert metadata.find(frames, name) == frames
    with pytest.raises(UserError, match="holds tiny_frames/red:1.2.0: set --dataset="):
        metadata.find(frames, metadata.DatasetName.parse("tiny_frames/blue"))
    with pytest.raises(UserError, match="holds no readable tiny_frames/blue"):
        metadata.find(data_dir, metadata.DatasetName.parse("tiny_frames/blue"))
    with pytest.raises(UserError, match="'tiny frames' is not a data set's name"):
        metadata.DatasetName.parse("tiny frames")


@pytest.mark.parametrize(
    ("part", "train"), [("", 19), ("train", 15)], ids=["splits", "classes"]
)
def test_a_folder_keeps_bytes_labels_order_and_paths(folder, out, part, train):
    root = folder / part
    content = of_images(root, out / "pets/1.0.0", shard_bytes=9_000)
    assert len(content["splits"]["train"]["shards"]) > 2
    for split, count in {"train": train, "val": 4}.items():
        expected = image_folders.open_folder(str(root), split, "train")
        found = open_tfds("pets", str(out), split, "image", "label")
        assert len(found) == content["splits"][split]["records"] == count
        assert [found[i] for i in range(count)] == [expected[i] for i in range(count)]
        assert [record["path"].decode() for record in found.records] == expected.paths
        assert found.class_names == expected.class_names == ("ant", "bee", "cat")
    assert of_images(root, out / "again/1.0.0", shard_bytes=9_000) == content


def test_a_damaged_image_is_named_or_left_out(folder, out):
    victim = folder / "train" / "bee" / "3.png"
    damage(victim, lambda data: data[:200])
    (folder / "val" / "cat" / "1.png").write_bytes(b"")
    target = out / "pets/1.0.0"
    with pytest.raises(
        UserError, match=r"bee/3.png cannot be decoded .*--on_error=skip"
    ):
        of_images(folder, target, splits=["train"])
    assert not target.exists()
    shutil.rmtree(target.with_name("1.0.0.incomplete"))

    content = of_images(folder, target, shard_bytes=5_000, on_error="skip")
    assert [note["record"] for note in content["skipped"]] == [
        "train/bee/3.png",
        "val/cat/1.png",
    ]
    assert content["skipped"][1]["reason"] == "is empty (0 bytes)"
    found = open_tfds("pets", str(out), "train", "image", "label")
    paths = [record["path"].decode() for record in found.records]
    expected = image_folders.open_folder(str(folder), "train", "train").paths
    assert paths == [path for path in expected if path != "train/bee/3.png"]


def test_files_of_bands_stay_as_they_are_and_train(folder, out):
    tifffile = pytest.importorskip("tifffile")
    shutil.rmtree(folder / "val")
    bands = np.arange(6 * 5 * 4, dtype=np.uint16).reshape(6, 5, 4)
    for name in ("ant", "bee", "cat"):
        shutil.rmtree(folder / "train" / name)
        (folder / "train" / name).mkdir()
        np.save(folder / "train" / name / "a.npy", bands)
        np.savez(folder / "train" / name / "b.npz", bands + 1)
        tifffile.imwrite(folder / "train" / name / "c.tiff", bands + 2, planarconfig=1)
    assert of_images(folder, out / "pets/1.0.0")["splits"]["train"]["records"] == 9
    found = open_tfds("pets", str(out), "train", "image", "label")
    expected = image_folders.open_folder(str(folder), "train", "train")
    assert [found[i] for i in range(9)] == [expected[i] for i in range(9)]

    def pixels(**data):
        data |= {"num_examples": 9, "num_classes": 3, "channels": 4}
        data |= {"pixels": "uint16", "train_transform": "", "image_size": (6, 5)}
        data = tiny_config(data=data | {"num_workers": 0}).data
        source, where = open_source(data, "train"), {"seed": 1, "start": 0, "stop": 1}
        with pipeline.train_batches(source, data, batch_size=9, **where) as batches:
            return next(iter(batches))["image"]

    prepared = pixels(name="pets", data_dir=str(out), split="train")
    assert prepared.dtype == np.uint16 and prepared.max() == bands.max() + 2
    loose = pixels(name="folder", data_dir=str(folder), split="train")
    np.testing.assert_array_equal(prepared, loose)

    bad = folder / "train" / "bee" / "a.npy"
    damage(bad, lambda data: data[:99])
    with pytest.raises(UserError, match=r"bee/a.npy cannot be decoded .*--on_error"):
        of_images(folder, out / "again/1.0.0")
    shutil.rmtree(out / "again")
    for array, reason in ((np.ones(9), r"shape \(9,\)"), (bands * np.nan, "NaN")):
        np.save(bad, array)
        with pytest.raises(UserError, match=f"bee/a.npy has .*{reason}"):
            of_images(folder, out / "again/1.0.0")
        shutil.rmtree(out / "again")


def test_unchecked_images_are_taken_as_they_are(folder, out):
    victim = folder / "train" / "bee" / "3.png"
    damage(victim, lambda data: data[:200])
    of_images(folder, out / "pets/1.0.0", check=False)
    found = open_tfds("pets", str(out), "train", "image", "label")
    assert victim.read_bytes() in [found[i]["image"] for i in range(19)]


def test_shards_and_splits_without_a_readable_image(folder, out):
    paths = image_folders.open_folder(str(folder), "train", "train").paths
    for path in paths[:6]:
        (folder / path).write_bytes(b"none")
    target = out / "pets/1.0.0"
    content = of_images(folder, target, ["train"], 3_000, "skip")
    assert content["splits"]["train"]["shards"][0]["records"] == 0
    found = open_tfds("pets", str(out), "train[1:]", "image", "label")
    assert found.records[0]["path"].decode() == paths[7]

    for path in paths:
        (folder / path).write_bytes(b"none")
    with pytest.raises(UserError, match="split 'train' has no readable record"):
        of_images(folder, out / "other", ["train"], 3_000, "skip")


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("pets-train", flip(900), "pets-train.*(mismatch|orrupt)"),
        ("pets-train", lambda data: data[:-9], "pets-train.*truncated"),
        ("pets-train", None, "pets-train.* is missing"),
        ("pets-train", [b"x"] * 19, "has file_bytes .*, not"),
        ("pets-train", [b"x"], "has records 1, not 19"),
        ("features.json", flip(3), "features.json has changed"),
        ("label.labels.txt", None, "label.labels.txt is missing"),
        ("manifest.json", None, "no manifest.json to verify"),
        ("manifest.json", flip(0), "manifest.json is damaged"),
    ],
)
def test_verify_finds_what_changed(folder, out, file, change, match):
    target = out / "pets/1.0.0"
    content, seen = of_images(folder, target), []
    assert metadata.verify(target, seen.append) == content
    assert sum(seen) == 19 + 4
    (path,) = target.glob(f"{file}*")
    if change is None:
        path.unlink()
    elif callable(change):
        damage(path, change)
    else:
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for record in change:
            writer.write(record)
        writer.close()
    with pytest.raises(UserError, match=match):
        metadata.verify(target)


def test_a_set_begun_in_another_way_is_not_continued(folder, out):
    target = out / "pets/1.0.0"
    with build.begin(target, {"kind": "folder", "shard_bytes": 1}):
        pass
    with pytest.raises(UserError, match=r"other flags \(.*shard_bytes.*remove it"):
        of_images(folder, target)


def test_a_set_that_only_lacks_its_name_gets_it(folder, out, monkeypatch):
    target = out / "pets/1.0.0"
    with monkeypatch.context() as patch:
        patch.setattr(build.Staging, "finish", lambda self: None)
        of_images(folder, target)
    shutil.rmtree(target.with_name("1.0.0.incomplete") / ".state")
    assert not target.exists()
    assert of_images(folder, target) == metadata.verify(target)


def test_existing_busy_and_impossible_targets_are_refused(folder, out, monkeypatch):
    target = out / "pets/1.0.0"
    place = target.with_name("1.0.0.incomplete")
    place.mkdir(parents=True)
    busy = pytest.raises(UserError, match="another process is preparing .*pets/1.0.0")
    with lock_folder(place, ""), busy:
        of_images(folder, target)

    usage = shutil.disk_usage(out)._replace(free=3_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(UserError, match=r"0.0 MB free, but about 0.\d MB"):
            of_images(folder, target)
    target.mkdir()
    with pytest.raises(UserError, match=r"pets/1.0.0 exists: add --verify"):
        of_images(folder, target)
    (out / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot create .*Not a directory"):
        of_images(folder, out / "file" / "1.0.0")


def test_a_class_name_that_a_label_file_cannot_hold_is_refused(folder, out):
    (folder / "train" / "bee").rename(folder / "train" / " bee")
    with pytest.raises(
        UserError, match="class folder ' bee' starts or ends with a space"
    ):
        of_images(folder, out / "out", ["train"])


def test_splits_are_divided_evenly():
    parts = shards.divide("train", 23, 1_000, 290)
    assert [(s.start, s.stop) for s in parts] == [(0, 5), (5, 11), (11, 17), (17, 23)]
    assert parts[3].file_name("a") == "a-train.array_record-00003-of-00004"
    assert len(shards.divide("train", 3, 1_000, 1)) == 3
    assert len(shards.divide("train", 3, 0, 256)) == 1


def test_a_builder_of_the_users_own_needs_no_tensorflow(builder_class, truth, tmp_path):
    name = metadata.DatasetName("tiny_frames", "", "")
    target, content = tfds_builder.build_with_tfds(name, tmp_path / "out")
    assert target == NAME.folder(tmp_path / "out")
    shard = "tiny_frames-train.array_record-00000-of-00001"
    assert (target / shard).read_bytes() == (truth[1] / shard).read_bytes()
    assert metadata.verify(target) == content
    assert content["splits"]["test"]["records"] == 7
    # TFDS's note of the default configuration came along.
    source = open_tfds("tiny_frames", str(tmp_path / "out"), "test", "image", "label")
    assert len(source) == 7
    with pytest.raises(build.Exists, match="1.2.0 exists: add --verify"):
        tfds_builder.build_with_tfds(name, tmp_path / "out")
    with pytest.raises(UserError, match=r"no configuration 'blue'; it has red"):
        tfds_builder.build_with_tfds(
            metadata.DatasetName("tiny_frames", "blue", ""), tmp_path / "out"
        )


def test_a_build_that_was_killed_goes_on(builder_class, tmp_path, monkeypatch):
    target = NAME.folder(tmp_path / "out")
    inner = NAME.folder(target.with_name("1.2.0.incomplete") / "tfds")
    half = inner.with_name("incomplete.ABCDEF_1.2.0") / "half"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"written when TFDS was killed")
    with monkeypatch.context() as patch:
        patch.setattr(tfds_builder, "_move_up", lambda made, folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tfds_builder.build_with_tfds(NAME, tmp_path / "out")
    assert not half.exists() and not target.exists()
    # Killed while the files were being moved up.
    (inner / "features.json").rename(inner.parents[3] / "features.json")
    monkeypatch.setattr(tfds_builder, "_prepare", lambda *args: 1 / 0)  # Not again.
    assert tfds_builder.build_with_tfds(NAME, tmp_path / "out")[0] == target
    assert metadata.verify(target)["splits"]["train"]["records"] == 23


def test_files_to_be_fetched_by_hand_are_asked_for(
    builder_class, tmp_path, monkeypatch
):
    text = "Put tiny.tar\n  here."
    monkeypatch.setattr(builder_class, "MANUAL_DOWNLOAD_INSTRUCTIONS", text)
    manual = tmp_path / "out" / "downloads" / "manual"
    with pytest.raises(UserError, match=f"put them in {manual} .*Put tiny.tar here."):
        tfds_builder.build_with_tfds(NAME, tmp_path / "out")

    def open_tar(self, dl_manager):
        return {"train": (dl_manager.manual_dir / "tiny.tar").read_bytes()}

    monkeypatch.setattr(builder_class, "_split_generators", open_tar)
    manual.mkdir(parents=True)
    (manual / "large.tar").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"Put tiny.tar here. \(it failed with.*No such"
    ):
        tfds_builder.build_with_tfds(NAME, tmp_path / "out")


def test_a_set_that_nobody_knows_gets_a_hint(tmp_path):
    with pytest.raises(UserError, match="no such set; did you mean cifar10 or"):
        tfds_builder.build_with_tfds(metadata.DatasetName("cifra10", "", ""), tmp_path)
    with pytest.raises(UserError, match="--imports=no_such_module: No module named"):
        tfds_builder.build_with_tfds(NAME, tmp_path, imports=["no_such_module"])


def test_without_tensorflow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_builder.importlib.util, "find_spec", lambda name: None)
    match = r"TensorFlow to prepare it: pip install -e '\.\[prepare\]' in the clone"
    with pytest.raises(UserError, match=match):
        tfds_builder.build_with_tfds(metadata.DatasetName("mnist", "", ""), tmp_path)

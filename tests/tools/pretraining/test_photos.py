"""Photographs without labels: what is trained on, held out and left out."""

import csv
import itertools
import os
import shutil

import mask_folder
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tar_files import jpeg, shard

from vit_jax.data import fingerprint
from vit_jax.data.sources import parquet
from vit_jax.data.sources.arrays import IN_MEMORY, open_arrays
from vit_jax.data.sources.open import open_unchecked, opened_by
from vit_jax.errors import UserError
from vit_jax.tools.pretraining import photos


def write(folder, count, first=0, name="{}.png"):
    """Writes images that all differ."""
    for i in range(first, first + count):
        path = folder / name.format(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 3), (i % 256, i // 256, 7)).save(path)


@pytest.fixture
def classes(tmp_path):
    """A folder of 30 images of two classes."""
    write(tmp_path / "photos", 20, 0, "ant/{}.png")
    write(tmp_path / "photos", 10, 20, "bee/{}.png")
    return tmp_path / "photos"


def find(workdir, *places, labels="", **given):
    return photos.find([*map(str, places)], given, str(workdir), str(labels))


def paths(found, split):
    source = found.open(split)
    return {source.describe(i) for i in range(len(source))}


def counts(found):
    """Returns the numbers of training and held-out images, which are disjoint."""
    train, held = (
        paths(found, each) for each in (found.data["split"], found.validation)
    )
    assert not train & held and len(train) == found.count
    return len(train), len(held)


def test_a_place_may_be_a_link(classes, tmp_path):
    (tmp_path / "link").symlink_to(classes)
    found, same = (
        find(tmp_path / "run", each) for each in (tmp_path / "link", classes)
    )
    assert counts(found) == counts(same) == (24, 6)


def test_images_at_any_depth_are_found(tmp_path):
    place = tmp_path / "photos"
    write(place, 3)
    write(place, 20, 10, "a/b/c/{}.png")
    write(place, 20, 40, "d/{}.PNG")
    (place / "d" / "notes.txt").write_text("to be sorted")
    (place / "a" / "empty.jpg").write_bytes(b"")
    (place / ".hidden.png").write_bytes(b"")
    found = find(tmp_path / "run", place)
    assert counts(found) == (41, 2) and found.labelled is None
    assert "other files left out: 1 (.txt)" in found.description
    assert "not named in UTF-8: 1, such as 'a/empty.jpg'" in found.description
    assert found.data["num_classes"] == 0
    assert set(found.open("train")[0]) == {"image"}
    # The same again, and after both folders are moved.
    first = fingerprint.fingerprint(found.open("train"))
    text = (tmp_path / "run" / "photos.csv").read_text()
    assert find(tmp_path / "run", place) == found
    place.rename(tmp_path / "moved")
    moved = find(tmp_path / "other", tmp_path / "moved")
    assert (tmp_path / "other" / "photos.csv").read_text() == text.replace(
        str(place), str(tmp_path / "moved")
    )
    assert not fingerprint.differences(first, moved.open("train"))


def test_a_list_follows_its_workdir(classes, tmp_path):
    found = find(tmp_path / "run", classes, labels=classes)
    raw = {"data": found.data, "evals": {"knn": found.labelled, "val": {}}}
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = photos.with_workdir(raw, str(tmp_path / "moved"))
    place = str(tmp_path / "moved" / "photos.csv")
    assert moved["data"] == found.data | {"data_dir": place}
    assert moved["evals"] == {"knn": found.labelled | {"data_dir": place}, "val": {}}
    # A copied workdir reads its own list; a table of the user may have the same name.
    (tmp_path / "moved" / photos.CHOSEN_FILE).write_text("{}")
    copied = photos.with_workdir(moved, str(tmp_path / "copy"))
    assert copied["data"]["data_dir"] == str(tmp_path / "copy" / "photos.csv")
    users = {"data_dir": str(shutil.copy(place, tmp_path / "photos.csv"))}
    moved = photos.with_workdir(
        raw | {"evals": {"knn": users}}, str(tmp_path / "moved")
    )
    assert moved["evals"] == {"knn": users}


def test_about_a_twentieth_is_held_out(tmp_path):
    write(tmp_path / "photos", 100)
    assert counts(find(tmp_path, tmp_path / "photos")) == (95, 5)


def test_folders_of_classes_are_scored_on_held_out_images(classes, tmp_path):
    found = find(tmp_path / "run", classes)
    assert counts(found) == (24, 6)
    assert found.labelled == {
        "name": "table",
        "data_dir": str(tmp_path / "run" / "photos.csv"),
        "image_key": "image",
        "label_key": "label",
        "train": "train",
        "test": found.validation,
    }
    with (tmp_path / "run" / "photos.csv").open() as file:
        held = [row["label"] for row in csv.DictReader(file) if row["split"] == "val"]
    assert sorted(held) == ["ant"] * 4 + ["bee"] * 2
    assert "folders of 2 classes" in found.description
    assert set(found.open("train")[0]) == {"image"}
    # Albums are not classes.
    unlabelled = find(tmp_path / "run", classes, labels=photos.NO_LABELS)
    assert counts(unlabelled) == (28, 2) and unlabelled.labelled is None
    write(classes, 1, 50)  # An image outside of them.
    assert find(tmp_path / "run", classes).labelled is None


def test_folders_of_splits(tmp_path):
    place = tmp_path / "photos"
    write(place, 8, 0, "train/ant/{}.png")
    write(place, 8, 10, "train/bee/{}.png")
    write(place, 3, 20, "unsorted/{}.png")
    write(place, 4, 30, "test/ant/{}.png")
    found = find(tmp_path, place)
    assert counts(found) == (15, 4)  # A fifth of those with a class.
    assert (found.data["split"], found.labelled["train"]) == (
        "train+unlabelled",
        "train",
    )
    assert "images of 'test' left out: 4" in found.description
    write(place, 4, 40, "val/bee/{}.png")
    write(place, 1, 50, "val/wasp/{}.png")
    found = find(tmp_path, place)
    assert counts(found) == (19, 4)  # Of the fifth, k-NN could not know the class.
    assert not any("wasp" in path for path in paths(found, found.data["split"]))


def test_of_several_validation_splits_one_is_read(tmp_path):
    place = tmp_path / "photos"
    for i, name in enumerate(("train", "val", "dev", "Test", "eval")):
        write(place, 5, 10 * i, f"{name}/{{}}.png")
    found = find(tmp_path, place)
    assert counts(found) == (5, 5)
    for name in ("dev", "Test", "eval"):
        assert f"images of {name!r} left out: 5" in found.description


def test_a_class_of_trains_is_not_a_split(classes, tmp_path):
    write(classes, 10, 60, "train/{}.png")
    found = find(tmp_path, classes)
    assert found.data["split"] == "train" and "3 classes" in found.description
    (classes / "train").rename(classes / "test")
    assert "3 classes" in find(tmp_path, classes).description


def test_several_folders_are_one_set(classes, tmp_path):
    write(tmp_path / "more", 10, 100)
    found = find(tmp_path, tmp_path / "more", classes, classes / "ant")
    assert sum(counts(found)) == 40
    assert found.data["split"] == "train+unlabelled" and found.labelled
    files = sorted((tmp_path / "more").iterdir())
    assert sum(counts(find(tmp_path, *files))) == 10


@pytest.mark.parametrize("header", ["file_name,taken", "anything"])
def test_tables_of_paths(classes, tmp_path, header):
    rows = [str(path.relative_to(classes)) for path in sorted(classes.rglob("*.png"))]
    more = header.count(",") * ",2021"
    (classes / "t.csv").write_text("\n".join([header, *(row + more for row in rows)]))
    found = find(tmp_path, classes / "t.csv")
    assert counts(found) == (28, 2) and found.labelled is None
    (tmp_path / "only").mkdir()
    shutil.move(classes / "t.csv", tmp_path / "only")
    given = {"image_dir": str(classes), "image_key": header.split(",")[0]}
    assert sum(counts(find(tmp_path, tmp_path / "only", **given))) == 30


def test_splits_of_a_table(classes, tmp_path):
    rows = ["path,split"]
    for i, path in enumerate(sorted(classes.rglob("*.png"))):
        rows.append(f"{path},{('train', 'val', 'extra', 'test')[i % 4]}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    assert counts(find(tmp_path, tmp_path / "t.csv")) == (15, 8)


def test_images_that_labels_hold_out_are_not_trained_on(classes, tmp_path):
    write(classes.parent / "photos", 40, 100, "raw/{}.png")
    place = tmp_path / "some"
    place.mkdir()
    shutil.move(classes / "ant", place)
    shutil.move(classes / "bee", place)
    shutil.move(place, classes)
    found = find(tmp_path / "run", classes, labels=classes / "some")
    assert found.labelled == {
        "name": "table",
        "data_dir": str(tmp_path / "run" / "split.csv"),
        "train": "train",
        "test": "val",
    }
    labelled = photos.DataConfig(
        name="table", data_dir=found.labelled["data_dir"], num_classes=2
    )
    scored = open_unchecked(labelled, "val")
    scored = {scored.describe(i) for i in range(len(scored))}
    train, held = (paths(found, k) for k in (found.data["split"], found.validation))
    assert len(scored) == 6 and not scored & (train | held)
    assert (len(train), len(held)) == (61, 3)
    assert "holds out: 6" in found.description
    several = tmp_path / "several.csv"
    rows = (f"{p},{tags}\n" for p, tags in zip(train, itertools.cycle(("a|b", "b"))))
    several.write_text("image,labels\n" + "".join(rows))
    with pytest.raises(UserError, match=r"labels=.*several.csv has several labels"):
        find(tmp_path / "run", classes, labels=several)


def test_a_set_of_the_project_by_its_name(tmp_path):
    found = find(tmp_path, "digits")
    assert found.count == len(found.open(found.data["split"])) == 1_370
    assert len(found.open(found.validation)) == 72 and found.labelled is None
    scored = find(tmp_path, "digits", labels="digits")
    assert scored.count == 1_442 - 100
    assert scored.labelled == {
        "name": "digits",
        "train": scored.data["split"],
        "test": scored.validation,
    }
    held = scored.open(scored.validation)
    assert len(held) == 100 and len({int(label) for label in held.labels}) == 10


def test_a_set_of_the_hub_by_its_name(tmp_path, monkeypatch):
    # Sorted by class, as many sets of the hub are, and with a column that no one reads.
    rows = [{"img": {"bytes": b"%d" % i, "path": ""}, "y": i // 10} for i in range(60)]
    for split, part in {"train": rows[:40], "unlabeled": rows[40:]}.items():
        path = tmp_path / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(part), path)
    monkeypatch.setattr(parquet, "download", lambda name: str(tmp_path))
    found = find(tmp_path, "someone/photos")
    assert found.data == {
        "name": "hf://datasets/someone/photos",
        "image_key": "img",
        "num_classes": 0,
        "split": "train[0:19]+train[20:39]+unlabeled[0:9]+unlabeled[10:19]",
    }
    assert found.validation == (
        "train[19:20]+train[39:40]+unlabeled[9:10]+unlabeled[19:20]"
    )
    assert set(found.open(found.validation)[0]) == {"image"}


def test_tar_shards(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "set"
    for first in (0, 30):
        samples = [{f"{i}.jpg": jpeg(i), f"{i}.cls": b"0"} for i in range(first, 60)]
        shard(place / f"{first}.tar", *samples)
    found = find(tmp_path, place)
    assert found.count == len(found.open(found.data["split"])) == 86
    assert len(found.open(found.validation)) == 4
    assert found.data["num_classes"] == 0 and found.labelled is None
    assert find(tmp_path, *place.iterdir()) == found
    assert find(tmp_path, place / "0.tar").count == 57
    assert find(tmp_path, place, labels=place).labelled["name"] == "tar"
    relative = os.path.relpath(place)
    assert find(tmp_path, place, labels=relative).labelled["name"] == "tar"
    write(tmp_path / "photos", 4)
    with pytest.raises(UserError, match=r"0.tar is given with other places"):
        find(tmp_path, place / "0.tar", tmp_path / "photos")


def test_arrays_in_memory(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (50, 7, 5, 3), np.uint8)
    arrays = {"train": (images, np.arange(50) % 2)}
    with opened_by(lambda _, split, __: open_arrays(arrays, split, IN_MEMORY)):
        found = find(tmp_path, IN_MEMORY)
        assert found.count == len(found.open(found.data["split"])) == 48
        assert len(found.open(found.validation)) == 2
        assert find(tmp_path, IN_MEMORY, labels=IN_MEMORY).count == 40
        arrays["train"] = images[:1].repeat(9, 0), np.zeros(9, int)
        with pytest.raises(UserError, match="9 images that are all equal"):
            find(tmp_path, IN_MEMORY)


def test_masks_are_left_out(tmp_path):
    mask_folder.write(tmp_path / "set", 10)
    found = find(tmp_path, tmp_path / "set")
    assert counts(found) == (8, 2)
    assert "masks left out: 10 (the folder 'masks')" in found.description
    write(tmp_path / "pairs", 6)
    write(tmp_path / "pairs", 6, 0, "{}_mask.png")
    found = find(tmp_path, tmp_path / "pairs")
    assert counts(found) == (4, 2) and "masks left out: 6 (names" in found.description


def test_what_is_no_set_of_photographs_is_said(classes, tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "one", 1)
    for i in range(5):
        write(tmp_path / "equal", 1, name=f"{i}.png")
    write(tmp_path / "split", 5, name="train/{}.png")
    write(tmp_path / "split", 1, 9, name="val/{}.png")
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a.txt", "b.txt", "c.zip"):
        (texts / name).write_text("no image")
    for places, message in (
        ([tmp_path / "empty"], "empty has no images at any depth: give"),
        ([texts], r"texts has no images at any depth, only files 2 \.txt, 1 \.zip"),
        ([texts / "c.zip"], r"c\.zip is neither an image nor a table.*unpack"),
        ([tmp_path / "split"], "split has one image in its validation split"),
        ([tmp_path / "one"], "one has one image: give 4"),
        ([tmp_path / "equal"], "equal has 5 images that are all equal"),
        (["nowhere"], "nowhere does not exist as a folder or table"),
        (["./nowhere/at/all"], "does not exist as a folder or table"),
        ([classes, "cifar10"], "cifar10 does not exist as a file or folder: several"),
        ([], "no photographs"),
        ([""], "no photographs"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            find(tmp_path / "run", *places)
        assert "\n" not in str(caught.value)

import dataclasses
import os
import shutil

import numpy as np
import pytest

from vit_jax.data import decode, image_files, pipeline
from vit_jax.data.fingerprint import differences, fingerprint, unchecked
from vit_jax.data.imagenet import OBJECTNET_CLASSES
from vit_jax.data.sources import folder as folder_reader
from vit_jax.data.sources.base import _warned
from vit_jax.data.sources.folder import splits_of
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import layout
from vit_jax.tools.preparing import images, metadata
from vit_jax.tools.preparing.request import Request
from vit_jax.tools.sweeps import recipes


@pytest.fixture
def data(data_config, folder):
    return data_config(name="folder", data_dir=str(folder))


def test_a_folder_gives_each_file_once_with_the_label_of_its_class(data, folder):
    source = open_source(data, "train")
    assert source.class_names == ("ant", "bee", "cat")
    described = [source.describe(i) for i in range(len(source))]
    assert sorted(described) == sorted(map(str, (folder / "train").rglob("*.png")))
    for i, path in enumerate(described):
        assert f"/{source.class_names[source[i]['label']]}/" in path


def test_every_format_and_letter_case_counts_and_nothing_else(
    data, folder, photograph, encode
):
    where = folder / "train" / "bee" / "deeper" / "still"
    where.mkdir(parents=True)
    formats = {"a.JPG": "JPEG", "b.JpEg": "JPEG", "c.WEBP": "WEBP", "d.Gif": "GIF"}
    formats |= {"e.BMP": "BMP", "f.PNG": "PNG", "wrong.png": "JPEG"}
    for name, format in formats.items():
        (where / name).write_bytes(encode(photograph, format))
    (where / "__x.png").write_bytes(encode(photograph, "PNG"))
    for name in (".hidden.png", "notes.txt", "._a.jpg"):
        (where / name).write_bytes(b"x")
    (folder / "train" / "ant").rename(folder / "train" / "__background__")
    (folder / "train" / "bee" / "__pycache__").mkdir()
    (folder / "train" / "bee" / "__pycache__" / "a.png").write_bytes(b"x")
    hidden = folder / "train" / ".git"
    hidden.mkdir()
    (hidden / "a.png").write_bytes(b"x")

    source = open_source(data, "train")
    assert source.class_names == ("__background__", "bee", "cat")
    assert len(source) == 19 + len(formats) + 1
    for i in range(len(source)):
        assert decode.decode(source[i]["image"]).shape == (37, 53, 3)
    # Predict reads the same files.
    found = [path for path, _ in image_files.find([str(folder / "train")])]
    assert sorted(found) == sorted(str(folder / path) for path in source.paths)


def test_a_slice_holds_every_class_and_slices_partition(data):
    first, second = (open_source(data, f"train[{s}]") for s in (":60%", "60%:"))
    assert {first[i]["label"] for i in range(len(first))} == {0, 1, 2}
    both = first.paths + second.paths
    assert both == open_source(data, "train").paths
    assert len(open_source(data, "train+val")) == 23
    val = open_source(data, "val")  # It lacks the class in the middle.
    assert {val[i]["label"] for i in range(len(val))} == {0, 2}


def test_names_of_macos_are_those_of_other_systems(data, folder):
    # macOS writes an accent as a letter of its own.
    whole, apart = "\u00e9", "e\u0301"
    (folder / "train" / "ant").rename(folder / "train" / whole)
    (folder / "val" / "ant").rename(folder / "val" / apart)
    shutil.copytree(folder / "train" / "bee", folder / "train" / apart)
    train, val = open_source(data, "train"), open_source(data, "val")
    assert train.class_names == val.class_names == ("bee", "cat", whole)
    assert np.bincount(train.labels_of_paths).tolist() == [6, 4, 9 + 6]
    assert np.bincount(val.labels_of_paths).tolist() == [0, 2, 2]


def test_what_a_folder_lacks_is_named(data, folder):
    def refused(match, split="train", **changed):
        with pytest.raises(UserError, match=match):
            open_source(dataclasses.replace(data, **changed), split)

    refused(r"split 'test'.*has train, val", "test")
    refused(r"data\.num_classes=5.*config\.data\.num_classes=3", num_classes=5)
    for data_dir in ("", str(folder / "absent")):
        refused(rf"'{data_dir}'.*data_dir/<split>/<class>", data_dir=data_dir)
    (folder / "empty").mkdir()
    refused(r"empty has no class folders: .*; or set .*num_classes=0 to", "empty")
    (folder / "val" / "dog").mkdir()
    refused(r"has class 'dog'.*ant, bee, cat", "val")
    (folder / "train" / "beetle").mkdir()
    refused("train/beetle has no images")


def test_a_folder_without_splits_is_one_split_named_all(data_config, folder):
    data = data_config(name="folder", data_dir=str(folder / "train"), split="all[:70%]")
    train, rest = open_source(data, "all[:70%]"), open_source(data, "all[70%:]")
    assert (len(train), len(rest)) == (13, 6)
    assert train.class_names == ("ant", "bee", "cat")
    assert {train[i]["label"] for i in range(13)} == {0, 1, 2}
    assert train.record_id(0).split("/")[0] in train.class_names
    assert train.describe(0) == str(folder / "train" / train.record_id(0))
    assert not set(train.paths) & set(rest.paths)
    match = r"no folder .*has ant, bee, cat; if those are classes.*split=all\[:90%\]"
    with pytest.raises(UserError, match=match):
        open_source(data_config(name="folder", data_dir=data.data_dir), "test")


def test_a_folder_without_splits_has_a_part_to_train_and_one_to_validate_on(
    data_config, folder
):
    flat = folder / "train"
    data = data_config(name="folder", data_dir=str(flat))
    train, val = (open_source(data, split) for split in ("train", "val"))
    assert train.class_names == val.class_names == ("ant", "bee", "cat")
    whole = open_source(data_config(name="folder", data_dir=str(flat)), "all")
    assert np.bincount(val.labels_of_paths).tolist() == [2, 1, 1]
    assert sorted(train.paths + val.paths) == sorted(whole.paths)
    # The part is the same where labels are not read, and wherever it is asked for.
    bare = open_source(data_config(**vars_of(data, num_classes=0)), "val")
    assert bare.paths == val.paths
    found = layout.find(str(flat), {}, str(folder / "run"))
    assert {*found.open("val").paths} == {*val.paths}
    assert splits_of(flat) == ["train", "val"] and splits_of(folder) == ["train", "val"]
    assert recipes.find(str(flat)).test == "val"
    half, rest = (open_source(data, f"train[{s}]") for s in (":50%", "50%:"))
    assert half.paths + rest.paths == train.paths


def test_splits_one_level_below_are_named(data_config, folder):
    (folder / "zip").mkdir()
    for split in ("train", "val"):
        (folder / split).rename(folder / "zip" / split)
    data = data_config(name="folder", data_dir=f"{folder}//")
    match = f"{folder}/zip has the splits train, val: give that folder"
    for opening in (
        lambda: open_source(data, "train"),
        lambda: layout.find(f"{folder}//", {}, str(folder / "run")),
        lambda: splits_of(folder),
        lambda: recipes.find(str(folder)),
    ):
        with pytest.raises(UserError, match=match):
            opening()
    shutil.move(folder / "zip" / "train", folder / "all")
    shutil.rmtree(folder / "zip")
    with pytest.raises(UserError, match="all has the folders ant, bee, cat: give that"):
        layout.find(str(folder), {}, str(folder / "run"))


def vars_of(data, **changed):
    keys = ("name", "data_dir", "num_classes")
    return {key: getattr(data, key) for key in keys} | changed


@pytest.fixture
def elsewhere(tmp_path_factory, photograph, encode):
    """A folder with 3 images outside of the data set."""
    where = tmp_path_factory.mktemp("elsewhere")
    (where / "deep").mkdir()
    for name in ("x.png", "y.png", "deep/z.png"):
        (where / name).write_bytes(encode(photograph, "PNG"))
    return where


def test_links_out_of_the_folder_are_followed(data, folder, elsewhere):
    (folder / "train" / "bee" / "linked").symlink_to(elsewhere)
    (folder / "train" / "cat" / "one.png").symlink_to(elsewhere / "x.png")
    (folder / "train" / "ant").rename(elsewhere / "ants")
    (folder / "train" / "ant").symlink_to(elsewhere / "ants")
    source = open_source(data, "train")
    # What the first link leads to holds the ants as well: twelve, and one file.
    assert len(source) == 19 + 3 + 9 + 1
    names = {source.record_id(i) for i in range(len(source))}
    assert {"train/bee/linked/deep/z.png", "train/cat/one.png"} < names
    for i in range(len(source)):
        assert decode.decode(source[i]["image"]).shape == (37, 53, 3)


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("train/bee/up", "train"),  # A circle.
        ("train/bee/all", "."),
        ("train/bee/root", "/"),
        ("train/bee/twin", "train/ant"),  # The same images under two labels.
        ("val/ant/leak", "train/ant"),  # Training images in validation.
        ("train/bee/a.png", "train/ant/0.png"),
        ("train/dog", "train/ant"),
        ("again", "train"),  # A split that is another one.
    ],
)
@pytest.mark.parametrize("num_classes", [3, 0])
def test_links_back_into_the_data_set_are_an_error(
    data, folder, link, target, num_classes
):
    (folder / link).symlink_to(os.path.normpath(folder / target))
    data = dataclasses.replace(data, split="train", num_classes=num_classes)
    with pytest.raises(UserError, match=rf"{link} is a link"):
        open_source(data, link.split("/")[0])


def test_links_in_a_circle_and_pipes_that_would_hang_are_errors(
    data, folder, elsewhere
):
    (folder / "train" / "loop").symlink_to("loop")  # No class.
    assert len(open_source(data, "train")) == 19
    (elsewhere / "deep" / "again").symlink_to(elsewhere)
    linked, loop = folder / "train/bee/linked", folder / "train/ant/loop.png"
    pipe = folder / "train/ant/pipe.jpg"
    for path, make, match in (
        (linked, lambda: linked.symlink_to(elsewhere), r"again is a link .*a circle"),
        (loop, lambda: loop.symlink_to("loop.png"), r"ant/loop\.png is a link"),
        (pipe, lambda: os.mkfifo(pipe), r"pipe\.jpg is a pipe"),
    ):
        make()
        with pytest.raises(UserError, match=match):
            open_source(data, "train")
        path.unlink()


def test_what_cannot_be_read_names_the_file_and_can_be_skipped(data, folder):
    bad = folder / "val" / "ant"
    (bad / "gone.png").symlink_to(folder.parent / "nowhere.png")
    (bad / "empty.png").write_bytes(b"")
    (bad / "text.jpg").write_text("no image")
    whole = (bad / "0.png").read_bytes()
    (bad / "cut.png").write_bytes(whole[: len(whole) // 2])
    data = dataclasses.replace(
        data, image_size=(37, 53), eval_transform="", on_error="skip"
    )
    source = open_source(data, "val")
    assert len(source) == 8
    with pipeline.eval_batches(source, data, batch_size=3) as batches:
        counted = [(b["skipped"].sum(), b["mask"].sum()) for b in batches]
    assert np.sum(counted, axis=0).tolist() == [4, 4]
    data = dataclasses.replace(data, on_error="raise")
    match = r"val/ant/\w+\.(png|jpg) .*(cannot be|is empty)"
    batches = pipeline.eval_batches(source, data, batch_size=8)
    with batches, pytest.raises(UserError, match=match):
        list(batches)


def test_a_folder_that_cannot_be_listed_is_not_passed_over(data, folder, monkeypatch):
    (folder / "train" / "ant" / "closed").mkdir()
    original = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"ant/closed cannot be listed \(Permission"):
        open_source(data, "train")


def test_of_objectnet_the_overlapping_classes_are_read(data_config, tmp_path):
    for name in (*OBJECTNET_CLASSES, "air_freshener", "zipper"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / f"{name}.png").write_bytes(b"x")
    data = data_config(name="objectnet", data_dir=str(tmp_path), num_classes=113)
    source = open_source(data, "images")
    assert len(source) == 113
    for i in range(113):
        assert source.class_names[source[i]["label"]] in source.record_id(i)
    assert source.class_names[8:10] == ("binder_closed", "bottle_cap")
    (tmp_path / "images" / "wok" / "wok.png").unlink()
    (tmp_path / "images" / "wok").rmdir()
    with pytest.raises(UserError, match="images lacks class 'wok'"):
        open_source(data, "images")


def test_stray_folders_are_passed_over_by_training_and_prepare_alike(
    data, folder, caplog
):
    for stray in ("__pycache__", "train/__pycache__", "val/__MACOSX", "notes", ".git"):
        (folder / stray).mkdir()
        (folder / stray / "cache.pyc").write_bytes(b"0")
    (folder / "notes/plot.png").write_bytes(b"0")
    (folder / "train/__MACOSX").mkdir()
    (folder / "train/__MACOSX/a.jpg").write_bytes(b"0")

    def prepared():
        name = metadata.DatasetName("ours", "", "1.0.0")
        return images.open_images(Request("folder", folder, name, decode=False)).sources

    assert list(prepared()) == ["train", "val"]
    assert caplog.messages == [
        f"{folder}: folder 'notes' has no class folder with images; it is skipped"
    ]
    folder_reader._name_other_folders.cache_clear()
    _warned.clear()
    open_source(data, "train")
    assert caplog.messages[1:] == caplog.messages[:1]
    for split, source in prepared().items():
        trained = open_source(data, split)
        assert source.class_names == trained.class_names == ("ant", "bee", "cat")
        assert source.paths == trained.paths
    # A class without images may be a mistake: both say so.
    (folder / "train/dog").mkdir()
    for read in (prepared, lambda: open_source(data, "train")):
        with pytest.raises(UserError, match="class folder .*dog has no images"):
            read()


@pytest.fixture
def unlabelled(tmp_path, photograph, encode, data_config):
    """A folder of images at several depths, without classes: 7 to train on, 2 others."""
    names = ("a.jpg", "b.PNG", "c.webp", "000/a.jpg", "000/x/d.jpg", "000/x/y/e.png")
    for i, name in enumerate((*names, "001/f.gif")):
        write_image(tmp_path / "train" / name, np.roll(photograph, i, 1), encode)
    for name in ("g.png", "deep/h.png"):
        write_image(tmp_path / "val" / name, photograph, encode)
    for name in ("notes.txt", ".hidden.png", "__MACOSX/a.png"):
        write_image(tmp_path / "train" / name, photograph, encode)
    keys = {"train_transform": "", "eval_transform": "", "image_size": (37, 53)}
    return data_config(name="folder", data_dir=str(tmp_path), num_classes=0, **keys)


def write_image(path, pixels, encode):
    formats = {".jpg": "JPEG", ".webp": "WEBP", ".gif": "GIF"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(pixels, formats.get(path.suffix, "PNG")))


def test_without_labels_every_image_below_a_split_is_a_record(unlabelled, tmp_path):
    source = open_source(unlabelled, "train")
    assert (len(source), source.class_names) == (7, ())
    ids = [source.record_id(i) for i in range(7)]
    assert {"train/a.jpg", "train/b.PNG", "train/000/x/y/e.png"} < set(ids)
    for i, name in enumerate(ids):
        assert source[i].keys() == {"image"}
        assert source.describe(i) == str(tmp_path / name)
        assert decode.decode(source[i]["image"]).shape == (37, 53, 3)
    data = dataclasses.replace(unlabelled, on_error="skip")
    (tmp_path / "train/000/x/d.jpg").write_bytes(b"no image")
    with pipeline.eval_batches(source, data, batch_size=8) as batches:
        (batch,) = batches
    assert batch.keys() == {"image", "index", "mask", "skipped"}
    assert (batch["skipped"].sum(), batch["mask"].sum()) == (1, 6)
    stored = fingerprint(source)
    assert unchecked(stored, []) == ""
    (tmp_path / "train/a.jpg").rename(tmp_path / "train/new.jpg")
    found = differences(stored, open_source(unlabelled, "train"))
    assert found == ["names of the image files or their order differ"]
    (tmp_path / "train/new.jpg").rename(tmp_path / "train/a.jpg")

    first, rest = (open_source(unlabelled, f"train[{s}]") for s in (":3", "3:"))
    assert first.paths + rest.paths == ids
    assert len(open_source(unlabelled, "train+val")) == 9
    # The order is hashed from the path below data_dir, as with labels.
    whole = open_source(unlabelled, "all")
    assert [path for path in whole.paths if path in ids] == ids
    assert len(whole) == 9


def test_images_that_lie_in_data_dir_itself_are_the_split_all(unlabelled):
    inner = dataclasses.replace(
        unlabelled, data_dir=f"{unlabelled.data_dir}/train", split="all[:4]"
    )
    train, rest = open_source(inner, "all[:4]"), open_source(inner, "all[4:]")
    assert (len(train), len(rest)) == (4, 3)
    assert {"a.jpg", "000/x/d.jpg"} < {*train.paths, *rest.paths}
    match = r"'train': no folder .* has 000, 001; all images below it are one split "
    with pytest.raises(UserError, match=rf"{match}named 'all': write .*split=all\["):
        open_source(dataclasses.replace(inner, split="train"), "train")


def test_folders_of_classes_are_read_without_labels_in_the_same_order(
    data_config, folder, photograph, encode
):
    write_image(folder / "train" / "of_no_class.png", photograph, encode)
    (folder / "train" / "dog").mkdir()  # An error only where it is a class.
    data = data_config(name="folder", data_dir=str(folder), num_classes=0)
    source = open_source(data, "train")
    (folder / "train" / "dog").rmdir()
    with_labels = open_source(dataclasses.replace(data, num_classes=3), "train")
    kept = [path for path in source.paths if path != "train/of_no_class.png"]
    assert kept == with_labels.paths
    assert len(source) == 20


def test_a_split_without_images_is_a_user_error(unlabelled, tmp_path, caplog):
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    with pytest.raises(UserError, match=r"empty has no images \(.*: add some, or name"):
        open_source(unlabelled, "empty")
    open_source(unlabelled, "train")
    assert caplog.messages == [
        f"{tmp_path}: folder 'empty' has no images; it is skipped"
    ]

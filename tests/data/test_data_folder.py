import numpy as np
import pytest

from vit_jax.data import decode
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError


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
    for name in (".hidden.png", "notes.txt", "._a.jpg"):
        (where / name).write_bytes(b"x")
    hidden = folder / "train" / ".git"
    hidden.mkdir()
    (hidden / "a.png").write_bytes(b"x")

    source = open_source(data, "train")
    assert len(source) == 19 + len(formats)
    for i in range(len(source)):
        assert decode.decode(source[i]["image"]).shape == (37, 53, 3)


def test_a_slice_holds_every_class_and_slices_partition(data):
    first, second = (open_source(data, f"train[{s}]") for s in (":60%", "60%:"))
    assert {first[i]["label"] for i in range(len(first))} == {0, 1, 2}
    both = first.paths + second.paths
    assert both == open_source(data, "train").paths
    assert len(open_source(data, "train+val")) == 23


def test_labels_of_another_split_are_those_of_training(data):
    source = open_source(data, "val")  # It lacks the class in the middle.
    assert {source[i]["label"] for i in range(len(source))} == {0, 2}


def test_a_class_that_training_lacks_is_a_user_error(data, folder):
    (folder / "val" / "dog").mkdir()
    with pytest.raises(UserError, match=r"has class 'dog'.*ant, bee, cat"):
        open_source(data, "val")


def test_an_empty_class_folder_is_a_user_error(data, folder):
    (folder / "train" / "beetle").mkdir()
    with pytest.raises(UserError, match="train/beetle has no images"):
        open_source(data, "train")


def test_a_missing_split_lists_the_folders(data):
    with pytest.raises(UserError, match=r"split 'test'.*has train, val"):
        open_source(data, "test")


def test_a_missing_folder_says_how_it_must_look(data_config, tmp_path):
    for data_dir in ("", str(tmp_path / "absent")):
        data = data_config(name="folder", data_dir=data_dir)
        with pytest.raises(UserError, match=rf"'{data_dir}'.*data_dir/<split>/<class>"):
            open_source(data, "train")


def test_a_split_without_classes_is_a_user_error(data, folder):
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no class folders"):
        open_source(data, "empty")


def test_another_number_of_classes_than_folders_is_a_user_error(data_config, folder):
    data = data_config(name="folder", data_dir=str(folder), classes=5)
    with pytest.raises(UserError, match=r"data\.classes=5.*config\.data\.classes=3"):
        open_source(data, "train")


def test_the_flowers_are_read(data_config, flowers):
    data = data_config(name="folder", data_dir=str(flowers), classes=5)
    train, val = open_source(data, "train"), open_source(data, "val")
    assert len(train) + len(val) == 3670
    image = decode.decode(train[17]["image"])
    assert image.dtype == np.uint8
    assert min(image.shape[:2]) == 160

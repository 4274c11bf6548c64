"""How images lie: every layout that is found, and the part that is set aside."""

import csv
import json
import shutil

import image_folder
import mask_folder
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vit_jax.data import splits
from vit_jax.data.sources import parquet
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import layout


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    image_folder.write(root)
    return root


def find(place, workdir, **stated):
    return layout.find(str(place), stated, str(workdir))


def sizes(found):
    splits = (found.data["split"], found.validation, found.test)
    return [len(found.open(split)) for split in splits if split]


@pytest.mark.parametrize(
    ("train", "validation", "test", "expected"),
    [
        ("train", "val", "", [19, 4]),
        ("Training", "VALID", "", [19, 4]),
        ("TRN", "dev", "Testing", [19, 4, 4]),
        # Without images to validate on, three of four of each class stay to train on.
        ("train", "", "test", [15, 4, 4]),
        ("train", "", "", [15, 4]),
    ],
)
def test_folders_of_splits(photos, tmp_path, train, validation, test, expected):
    root = tmp_path / "photos"
    for name, of in ((train, "train"), (validation, "val"), (test, "val")):
        if name:
            shutil.copytree(photos / of, root / name)
    found = find(root, tmp_path)
    assert sizes(found) == expected
    assert found.open(found.data["split"]).class_names == ("ant", "bee", "cat")
    assert (tmp_path / "split.csv").exists() == (not validation)


def test_folders_of_classes_keep_a_part_of_each_apart(photos, tmp_path):
    found = find(photos / "train", tmp_path)
    assert "one folder per class; 4 of 19 images" in found.description
    with (tmp_path / "split.csv").open() as file:
        rows = list(csv.DictReader(file))
    apart = [row["label"] for row in rows if row["split"] == "val"]
    assert sorted(apart) == ["ant", "ant", "bee", "cat"]
    assert all(row["image"].startswith(str(photos)) for row in rows)
    again = tmp_path / "again"
    find(photos / "train", again)
    assert (again / "split.csv").read_bytes() == (tmp_path / "split.csv").read_bytes()


@pytest.mark.parametrize(
    ("columns", "split"), [(("file_name", "Species"), True), (("path", "label"), False)]
)
def test_tables(photos, tmp_path, columns, split):
    place = photos / columns[0]
    place.mkdir()
    with (place / "photos.tsv").open("w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(columns + ("split",) * split)
        for path in sorted(photos.glob("*/*/*.png")):
            of, name, _ = path.relative_to(photos).parts
            table.writerow((f"../{of}/{name}/{path.name}", name) + (of,) * split)
    for given in (place, place / "photos.tsv"):  # A folder that holds it alone.
        found = find(given, tmp_path)
        assert sizes(found) == [19, 4]
        assert not found.data.get("multi_label")


def test_several_labels_are_seen(photos, tmp_path):
    table = photos / "several.csv"
    paths = [path.relative_to(photos) for path in sorted(photos.glob("*/*/*.png"))]
    labels = ["ant|bee", "bee|cat", ""] * 8
    lines = [f"{path},{label}" for path, label in zip(paths, labels, strict=False)]
    table.write_text("\n".join(["image,labels", *lines]) + "\n")
    found = find(table, tmp_path)
    assert found.data["multi_label"]
    train, apart = found.open("train"), found.open("val")
    assert len(train) + len(apart) == 23
    assert train.class_names == ("ant", "bee", "cat")
    several = [tuple(x) for x in train.labels_of_paths + apart.labels_of_paths]
    assert sorted(several) == sorted([(0, 1)] * 8 + [(1, 2)] * 8 + [()] * 7)
    # One of each combination at least.
    assert {tuple(x) for x in apart.labels_of_paths} == {(0, 1), (1, 2), ()}


def test_a_set_of_the_hub_by_its_name(tmp_path, monkeypatch):
    # Sorted by class, as many sets of the hub are.
    rows = [
        {"img": {"bytes": b"", "path": ""}, "fine_label": i // 10} for i in range(30)
    ]
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet"
    )
    monkeypatch.setattr(parquet, "download", lambda name: str(tmp_path))
    found = find("someone/photos", tmp_path)
    assert found.data == {
        "name": "hf://datasets/someone/photos",
        "image_key": "img",
        "label_key": "fine_label",
        "split": "interleaved_splits(train, 5)[0]+interleaved_splits(train, 5)[1]"
        "+interleaved_splits(train, 5)[2]+interleaved_splits(train, 5)[3]",
    }
    assert found.validation == "interleaved_splits(train, 5)[4]"
    assert sizes(found) == [24, 6]
    apart = found.open(found.validation)
    assert [apart.record_id(i) for i in range(2)] == ["train/4", "train/9"]
    labels = [apart[i]["label"] for i in range(6)]
    assert labels == [0, 0, 1, 1, 2, 2]


def test_a_column_of_masks_on_the_hub(tmp_path, monkeypatch):
    mask_folder.write(tmp_path, 10)

    def cell(folder, i):
        return {"bytes": (tmp_path / folder / f"{i}.png").read_bytes(), "path": ""}

    rows = [{"image": cell("images", i), "seg": cell("masks", i)} for i in range(10)]
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet"
    )
    monkeypatch.setattr(parquet, "download", lambda name: str(tmp_path))
    found = find("someone/photos", tmp_path, mask_key="seg")
    assert sizes(found) == [8, 2] and masked(found, found.validation)
    assert len(layout.take_fold(found, 1, 2).open("train")) == 10
    with pytest.raises(UserError, match="give the one with the labels"):
        find("someone/photos", tmp_path)


def test_a_set_of_the_project_by_its_name(tmp_path):
    found = find("digits", tmp_path)
    assert (found.data["split"], found.test) == ("train[:80%]", "test")
    assert sum(sizes(found)) == 1_797


def test_the_part_that_is_set_aside():
    groups = ["a"] * 100 + ["b"] * 5 + ["c"] * 2 + ["d"]
    apart = splits.held_out(groups)
    by_group = {g: apart[np.array(groups) == g].sum() for g in "abcd"}
    assert by_group == {"a": 20, "b": 1, "c": 1, "d": 0}
    assert splits.held_out(["a"] * 100_000).sum() == 10_000


def test_what_is_no_set_of_images_is_said(photos, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "tables").mkdir()
    for name in ("a", "b"):
        (tmp_path / "single" / name).mkdir(parents=True)
        shutil.copy(next(photos.rglob("*.png")), tmp_path / "single" / name)
        (tmp_path / "tables" / f"{name}.csv").write_text("image,label\n")
    (tmp_path / "t.csv").write_text("image,what\na.png,b\n")
    for place, message in (
        (tmp_path / "empty", "has no images in folders"),
        (tmp_path / "single", "has one image of each class: give two or more"),
        (tmp_path / "tables", "several tables"),
        (tmp_path / "t.csv", "give the one with the labels"),
        ("nowhere", "nowhere does not exist as a folder or table, nor as a data set: "),
        ("./nowhere/at/all", "does not exist as a folder or table"),
    ):
        with pytest.raises(UserError, match=message):
            find(place, tmp_path)


def test_folders_of_splits_without_classes_need_a_table(photos, tmp_path):
    rows = ["path,label,split"]
    for i, file in enumerate(sorted(photos.rglob("*.png"))[:8]):
        split = "test" if i % 4 == 3 else "train"
        (tmp_path / "set" / split).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / "set" / split / f"{i}.png")
        rows.append(f"{split}/{i}.png,{'ab'[i % 2]},{split}")
    with pytest.raises(UserError, match="test has images but no folders of classes"):
        find(tmp_path / "set", tmp_path / "run")
    (tmp_path / "set" / "labels.csv").write_text("\n".join(rows))
    found = find(tmp_path / "set", tmp_path / "run")
    assert "a table with paths in 'path' and labels in 'label'" in found.description
    assert sizes(found) == [4, 2, 2]


def test_a_table_without_labels_is_no_split(photos, tmp_path):
    files = sorted(photos.rglob("*.png"))[:8]
    rows = [f"{file},{'ab'[i % 2]}" for i, file in enumerate(files)]
    (tmp_path / "train.csv").write_text("\n".join(["path,label", *rows]))
    (tmp_path / "test.csv").write_text("\n".join(["path", *map(str, files)]))
    found = find(tmp_path, tmp_path / "run")
    assert (found.validation, found.test) == ("val", "")
    assert sum(sizes(found)) == 8


def test_columns_of_classes_are_found(photos, tmp_path):
    def find_with(other):
        lines = ["image;age;cat;dog"]
        for i, path in enumerate(sorted(photos.glob("*/*/*.png"))):
            lines.append(f"{path};7{i};{i % 2};{other(i)}")
        (tmp_path / "t.csv").write_text("\n".join(lines))
        found = find(tmp_path / "t.csv", tmp_path / "run")
        assert sum(sizes(found)) == 23
        return found

    found = find_with(lambda i: 1 - i % 2)
    assert "labels in 'cat,dog'" in found.description
    assert not found.data.get("multi_label")
    assert find_with(lambda i: 1 if i > 19 else -1).data["multi_label"]


def test_rows_that_are_not_used_are_counted(photos, tmp_path):
    lines = ["image,label,split"]
    for i, path in enumerate(sorted(photos.glob("*/*/*.png"))):
        split = ("train", "val", "spare", "", "train")[i % 5]
        lines.append(f"{path},{path.parent.name},{split}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found = find(tmp_path / "t.csv", tmp_path / "run")
    assert sizes(found) == [9, 5]
    assert "5 rows of split 'spare' are not used" in found.description


def test_measurements_are_not_taken_for_classes(photos, tmp_path):
    paths = sorted(photos.glob("*/*/*.png"))

    def find_with(label, column="label", **given):
        lines = [f"image,{column}", *(f"{p},{label(i)}" for i, p in enumerate(paths))]
        (tmp_path / "t.csv").write_text("\n".join(lines))
        return find(tmp_path / "t.csv", tmp_path / "run", **given)

    for label in (lambda i: 0.5 + i, lambda i: 40 + i % 15):
        found = find_with(label)
        assert found.data["target_key"] == "label" and sizes(found) == [19, 4]
        with pytest.raises(
            UserError, match="t.csv has .* column 'label'.*--target=label"
        ):
            find_with(label, label_key="label")
    # Decimal commas, and a text among numbers.
    for label, cell in (
        (lambda i: f'"{i},5"', "row 1 has '0,5'"),
        (lambda i: "old" if i == 3 else i + 0.5, "row 4 has 'old'"),
    ):
        with pytest.raises(UserError, match="column 'label'.*--target=label"):
            find_with(label)
        with pytest.raises(UserError, match=f"{cell} in 'age'"):
            find_with(label, "age")
    # Class numbers, names that differ, and measurements in few steps.
    for label in (lambda i: i % 15, lambda i: f"a{i % 15}", lambda i: 0.5 * (i % 7)):
        found = find_with(label)
        assert sum(sizes(found)) == 23 and "target_key" not in found.data
    # A column that is not called like labels.
    for label in (lambda i: 40 + i % 15, lambda i: "" if i % 3 else 0.5 * (i % 7)):
        assert find_with(label, "age").data["target_key"] == "age"
    with pytest.raises(UserError, match="'age'.*--target=age.*data.label_key=age"):
        find_with(lambda i: 40 + i % 5, "age")
    assert find_with(lambda i: 40 + i % 5, "age", target_key="age").test == ""
    assert find_with(lambda i: 40 + i % 5, "age", label_key="age").config.has_labels
    with pytest.raises(UserError, match="age, sex.*--target=age.*data.label_key"):
        find_with(lambda i: f"{40 + i},m", "age,sex")


def test_folds_of_numbers_are_parts_of_the_rows(photos, tmp_path):
    paths = sorted(photos.glob("*/*/*.png"))
    lines = ["image,age,kg", *(f"{p},{i},{2 * i}" for i, p in enumerate(paths))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found = find(tmp_path / "t.csv", tmp_path / "run", target_key="age,kg")
    seen = []
    for fold in range(3):
        part = layout.take_fold(found, fold, 3)
        seen += part.open(part.validation).known_targets()[:, 1].tolist()
    assert sorted(seen) == [2 * i for i in range(23)]


def masked(found, split):
    """Returns whether every record of a split has a mask."""
    source = found.open(split)
    return all("mask" in source[i] for i in range(len(source)))


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ({"images": "masks"}, [8, 2]),
        ({"images/training": "annotations/training"}, [8, 2]),
        ({"img/train": "labels/train", "img/val": "labels/val"}, [10, 10]),
        (
            {"img/train2017": "masks/train2017", "img/val2017": "masks/val2017"},
            [10, 10],
        ),
        ({"train/images": "train/mask", "test/images": "test/mask"}, [8, 2, 10]),
    ],
)
def test_folders_of_masks_are_found(tmp_path, folders, expected):
    for first, (images, masks) in enumerate(folders.items()):
        mask_folder.write(tmp_path / "set", 10, images, masks, 10 * first)
    (tmp_path / "set" / "about.csv").write_text("name,licence\n")
    found = find(tmp_path / "set", tmp_path)
    assert (found.data["name"], sizes(found)) == ("masks", expected)
    assert masked(found, found.data["split"]) and masked(found, found.validation)
    assert "masks in" in found.description
    assert not (tmp_path / "split.csv").exists()


def test_test_masks_without_classes_score_nothing(tmp_path):
    mask_folder.write(tmp_path / "set", 10, "images/train", "masks/train")
    mask_folder.write(tmp_path / "set", 3, "images/test", "masks/test", 10)
    for path in (tmp_path / "set/masks/test").iterdir():
        Image.new("L", mask_folder.SIZE[::-1], 255).save(path)
    assert find(tmp_path / "set", tmp_path).test == ""


def test_texts_beside_images_are_no_masks(photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "set" / "images")
    (tmp_path / "set" / "labels").mkdir()
    (tmp_path / "set" / "labels" / "0.txt").write_text("0 0.5 0.5 1 1")
    with pytest.raises(UserError, match="has one folder with images"):
        find(tmp_path / "set", tmp_path)


def test_two_folders_are_one_set_of_masks(tmp_path):
    mask_folder.write(tmp_path, 10, "a/photos", "b/c/drawn")
    (tmp_path / "about.csv").write_text("name,licence\n")
    place, keys = layout.common_folder(
        str(tmp_path / "a/photos"), str(tmp_path / "b/c/drawn")
    )
    assert place == str(tmp_path)
    stated = {key.removeprefix("data."): value for key, value in keys.items()}
    found = find(place, tmp_path, **stated)
    assert sizes(found) == [8, 2] and masked(found, found.validation)
    for pair in (("a/photos", "a"), ("a/photos", "a/photos"), ("a/photos", "nowhere")):
        with pytest.raises(UserError, match=str(tmp_path / pair[1])):
            layout.common_folder(*(str(tmp_path / name) for name in pair))


@pytest.mark.parametrize("key", ["mask", "drawn"])
def test_tables_of_masks(tmp_path, key):
    mask_folder.write(tmp_path, 10)
    rows = [f"images/{i}.png,masks/{i}.png" for i in range(10)]
    (tmp_path / "set").mkdir()
    rows = [",".join(f"../{path}" for path in row.split(",")) for row in rows]
    (tmp_path / "set" / "t.csv").write_text("\n".join([f"path,{key}", *rows]))
    stated = {} if key == "mask" else {"mask_key": key}
    for place in (tmp_path / "set", tmp_path / "set" / "t.csv"):
        found = find(place, tmp_path, **stated)
        assert sizes(found) == [8, 2] and masked(found, "all")
        assert f"masks in {key!r}" in found.description


def test_a_column_of_labels_comes_before_one_of_masks(tmp_path):
    mask_folder.write(tmp_path, 6)
    rows = [f"images/{i}.png,masks/{i}.png,{'ab'[i % 2]}" for i in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(["path,mask,label", *rows]))
    found = find(tmp_path / "t.csv", tmp_path / "run")
    assert "labels in 'label'" in found.description
    found = find(tmp_path / "t.csv", tmp_path / "run", mask_key="mask")
    assert masked(found, found.data["split"])


def test_of_few_images_with_masks_one_validates(tmp_path):
    for count in (2, 3):
        mask_folder.write(tmp_path / f"{count}", count)
        assert sizes(find(tmp_path / f"{count}", tmp_path)) == [count - 1, 1]
    mask_folder.write(tmp_path / "1", 1)
    with pytest.raises(UserError, match="/1 has one training image: give two"):
        find(tmp_path / "1", tmp_path)
    few = find(tmp_path / "3", tmp_path)
    with pytest.raises(UserError, match="folds=4: 3 images are too few"):
        layout.take_fold(few, 0, 4)


def test_folds_of_masks_score_each_image_once(tmp_path):
    mask_folder.write(tmp_path, 7)
    found = find(tmp_path, tmp_path / "run")
    validated = []
    for fold in range(3):
        one = layout.take_fold(found, fold, 3)
        apart, train = one.open(one.validation), one.open(one.data["split"])
        assert len(apart) + len(train) == 7
        validated += [apart.record_id(i) for i in range(len(apart))]
    assert sorted(validated) == [f"images/{i}.png" for i in range(7)]


def listed(workdir):
    with (workdir / "split.csv").open() as file:
        return list(csv.DictReader(file))


def animals(rows, split):
    return {row["group"] for row in rows if row["split"] == split}


@pytest.fixture
def grouped(tmp_path):
    """Two classes of ten animals each, with four photographs of each animal."""
    for i in range(80):
        path = tmp_path / "grouped" / "xy"[i // 40] / f"animal{i // 4}_{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(path)
    return tmp_path / "grouped"


def test_groups_are_held_out_as_a_whole(grouped, tmp_path):
    found = find(grouped, tmp_path, group_key=r"(.*)_\d+")
    assert "16 of 80 images, 4 of 20 groups, held out" in found.description
    rows = listed(tmp_path)
    assert len(animals(rows, "train")) == 16 and len(animals(rows, "val")) == 4
    assert not animals(rows, "train") & animals(rows, "val")
    assert found.data["group_key"] == "group" and sizes(found) == [64, 16]
    seen = set()
    for fold in range(3):
        layout.take_fold(found, fold, 3)
        rows = listed(tmp_path)
        seen |= animals(rows, "val")
        assert not animals(rows, "train") & animals(rows, "val")
    assert len(seen) == 20
    with pytest.raises(UserError, match="folds=21: 20 groups cannot be"):
        layout.take_fold(found, 0, 21)
    # The user's own splits must have no group in common.
    (grouped / "train").mkdir()
    for name in "xy":
        (grouped / name).rename(grouped / "train" / name)
    shutil.copytree(grouped / "train", grouped / "val")
    with pytest.raises(
        UserError, match=r"group_key=.*animal\d+' are in the splits train"
    ):
        find(grouped, tmp_path, group_key=r"(.*)_\d+")


def test_groups_of_several_labels_and_of_masks(grouped, tmp_path):
    rows = [
        f"grouped/{path.parent.name}/{path.name},x|{path.parent.name},{path.name[:8]}"
        for path in sorted(grouped.glob("*/*.png"))
    ]
    place = tmp_path / "tags.csv"
    place.write_text("\n".join(["image,tags,animal", *rows]) + "\n")
    found = find(place, tmp_path, group_key="animal")
    assert found.data["multi_label"] and "groups, held out" in found.description
    layout.take_fold(found, 1, 4)
    rows = listed(tmp_path)
    assert not animals(rows, "train") & animals(rows, "val")
    # Masks are not listed in a file: their parts are split expressions.
    mask_folder.write(tmp_path / "drawn", 10)
    found = find(tmp_path / "drawn", tmp_path, group_key=r"([0-3])\.png|(.)")
    assert found.validation.startswith("grouped_splits(all, 5)")
    assert "a part of the 10 groups of training images is held" in found.description
    found = layout.take_fold(found, 1, 3)
    assert len(found.open("all")) == sum(sizes(found)) == 10
    assert {*found.open(found.validation).record_groups}.isdisjoint(
        found.open(found.data["split"]).record_groups
    )


def test_groups_on_the_hub_are_a_column(tmp_path, monkeypatch):
    rows = [
        {"image": {"bytes": b"", "path": ""}, "label": i % 3, "patient": f"p{i // 4}"}
        for i in range(40)
    ]
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet"
    )
    monkeypatch.setattr(parquet, "download", lambda name: str(tmp_path))
    found = find("someone/photos", tmp_path, group_key="patient")
    ids = [found.open(split) for split in (found.validation, found.data["split"])]
    patients = [
        {int(each.record_id(i).split("/")[1]) // 4 for i in range(len(each))}
        for each in ids
    ]
    assert sizes(found) == [32, 8] and patients[0].isdisjoint(patients[1])
    with pytest.raises(UserError, match="data.group_key='site'"):
        sizes(find("someone/photos", tmp_path, group_key="site"))


@pytest.mark.parametrize(
    "tags",
    [
        [["tree", "lake"], ["lake"], ["tree"], []],
        ["tree, lake", "lake", "tree", "lake"],
        [[1, 0], [0], [1], []],
    ],
)
def test_several_labels_on_the_hub(tmp_path, monkeypatch, tags):
    image = {"bytes": b"", "path": ""}
    rows = [{"image": image, "tags": tags[i % 4], "site": i // 2} for i in range(40)]
    written = pa.Table.from_pylist(rows)
    names = {"feature": {"names": ["lake", "tree"], "_type": "ClassLabel"}}
    about = {"info": {"features": {"tags": names}}}
    written = written.replace_schema_metadata({"huggingface": json.dumps(about)})
    pq.write_table(written, tmp_path / "train-00000-of-00001.parquet")
    monkeypatch.setattr(parquet, "download", lambda name: str(tmp_path))
    found = find("someone/photos", tmp_path, group_key="site")
    assert found.data["multi_label"] and "several labels" in found.description
    train, apart = found.open(found.data["split"]), found.open(found.validation)
    assert train.class_names == apart.class_names == ("lake", "tree")
    several = {
        source.record_id(i): source[i]["label"]
        for source in (train, apart)
        for i in range(len(source))
    }
    assert [sorted(several[f"train/{i}"]) for i in range(3)] == [[0, 1], [0], [1]]
    assert train.entries().labels is not None

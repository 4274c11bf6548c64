"""Groups of images: what they are called, and folds that do not divide them."""

import csv

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import groups, splits
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.open import open_unchecked
from vit_jax.errors import UserError

KEY = "group_key='x'"


def drawn(count=300, per_group=4, classes=3, seed=0):
    """Groups of uneven size, each of one class with unequal shares."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(count // per_group, size=count)
    of_group = rng.choice(classes, p=[0.7, 0.2, 0.1], size=count)
    return [f"animal {g}" for g in groups], of_group[groups].tolist()


@pytest.mark.parametrize("several", [False, True])
def test_folds_keep_groups_whole_and_share_the_classes(several):
    names, labels = drawn()
    given = [[label, 3] for label in labels] if several else labels
    fold = groups.folds(names, given, 5, KEY)
    assert np.ptp(np.bincount(fold)) <= 2
    assert len({*zip(names, fold.tolist(), strict=True)}) == len({*names})
    counts = np.array([np.bincount(np.array(labels)[fold == k]) for k in range(5)])
    if not several:  # Within one group of four of an equal share.
        assert np.ptp(counts, axis=0).max() <= 8
    np.testing.assert_array_equal(fold, groups.folds(names, given, 5, KEY))


def test_a_class_in_one_group_is_always_trained_on():
    names = ["a", "a", "b", "b", "c", "c", "d"]
    labels = [0, 0, 0, 1, 1, 1, 2]
    fold = groups.folds(names, labels, 2, KEY)
    assert fold[6] == -1
    for k in (0, 1):
        here, others = (np.array(labels)[at] for at in (fold == k, fold != k))
        assert {*here.tolist()} <= {*others.tolist()}
    # As parts of a split, each record must be in one of them.
    part = groups.parts_of({"all": (names, labels)}, KEY)("all", 2)
    assert part[6] == 0 and {*part.tolist()} == {0, 1}


def test_a_large_group_is_not_what_is_held_out():
    names = ["site"] * 80 + [f"{i}" for i in range(20)]
    apart = groups.held_out(names, [i % 2 for i in range(100)], KEY)
    assert not apart[:80].any() and 0 < apart.sum() <= 20


@pytest.mark.parametrize(
    ("key", "path", "group"),
    [
        (r"(.*)_\d+", "cats/tom_12_3.jpg", "tom_12"),
        (r"(.*)_\d+", "cats/tom.jpg", "cats/tom.jpg"),
        (r"/(site\d+)_", "cats/site7_3.jpg", "site7"),
        (r"^(?:\w+)/(\w)", "cats/tom_3.jpg", "t"),
    ],
)
def test_rules_on_file_names(key, path, group):
    assert groups.of_paths(key, [path, "x/a_1.jpg", "y/site1_b"], "photos")[0] == group


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("site", "group_key='site': photos has no columns"),
        (r"(x", r"group_key='\(x' is not a regular expression"),
        (r"\(x", "has no parentheses"),
        (r"(z)_", r"gives none of the 2 images of photos a group, such as a_1.jpg"),
    ],
)
def test_rules_that_are_wrong(key, problem):
    with pytest.raises(UserError, match=problem):
        groups.of_paths(key, ["a_1.jpg", "b_1.jpg"], "photos")


def test_too_few_groups():
    with pytest.raises(UserError, match="x.*all 3 images are in one group, 'a'"):
        groups.folds(["a"] * 3, [0, 1, 0], 2, KEY)
    with pytest.raises(UserError, match="x.*2 groups cannot be divided into 3 parts"):
        groups.folds(["a", "b"], [0, 1], 3, KEY)


@pytest.fixture
def photos(tmp_path):
    """Twelve animals with three photographs each, in two folders of classes."""
    for i in range(12):
        for k in range(3):
            path = tmp_path / "photos" / ("cat", "dog")[i % 2] / f"animal{i}_{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((8, 8), 20 * i + k, np.uint8)
            Image.fromarray(pixels).save(path)
    return tmp_path / "photos"


def animals(source):
    return {
        source.describe(i).rpartition("/")[2].split("_")[0] for i in range(len(source))
    }


def test_splits_of_a_folder_a_table_and_parquet_files(photos, tmp_path):
    rule = {"group_key": r"(.*)_\d+", "num_classes": 2}
    of_folder = DataConfig(name="folder", data_dir=str(photos), split="train", **rule)
    table = tmp_path / "photos.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label", "animal"])
        for path in sorted(photos.glob("*/*.png")):
            rows.writerow([path, path.parent.name, path.name.split("_")[0]])
    whole = {"name": "table", "data_dir": str(table), "split": "all", "num_classes": 2}
    parts = [f"grouped_splits(all, 4)[{i}]" for i in range(4)]
    arranged = [
        (of_folder, ("train", "val")),
        (of_folder, ("grouped_splits(all, 2)[0]", "grouped_splits(all, 2)[1]")),
        (DataConfig(**whole, group_key="animal"), ("+".join(parts[:3]), parts[3])),
        (DataConfig(**whole, group_key=rule["group_key"]), parts),
    ]
    for data, names in arranged:
        opened = [open_unchecked(data, name) for name in names]
        assert sum(map(len, opened)) == 36
        assert sum(len(animals(source)) for source in opened) == 12
        assert all({*source.known_labels().tolist()} == {0, 1} for source in opened)
        assert opened[0].record_groups[0] in opened[0].describe(0)
    with pytest.raises(
        UserError, match="groups of the images are unknown: set data.gr"
    ):
        open_unchecked(DataConfig(**whole), parts[0])
    with pytest.raises(UserError, match="data.group_key='site'.*has no such column"):
        open_unchecked(DataConfig(**whole, group_key="site"), "all")


def test_a_sum_of_parts_is_the_whole_split():
    records = {"train": drawn(60)}
    parts_of = groups.parts_of(records, KEY)
    total = " + ".join(f"grouped_splits(train, 3)[{i}]" for i in range(3))
    chosen = splits.Numbering.of(total, {"train": 60}, "photos", parts_of)
    assert sorted(chosen.record_id(i) for i in range(60)) == sorted(
        f"train/{i}" for i in range(60)
    )
    names = [chosen.record_id(i) for i in (0, 59)]
    assert chosen.locate(names).tolist() == [0, 59]

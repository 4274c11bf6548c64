"""Which split an evaluation reads, and what its classes are."""

import dataclasses
import pathlib
import shutil

import image_folder
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vit_jax.data.config import DataConfig
from vit_jax.data.sources.open import open_unchecked
from vit_jax.errors import NoSplit, UserError
from vit_jax.evaluators import classification, splits
from vit_jax.evaluators.knn import NeighboursConfig
from vit_jax.tools.sweeps import fine_tuning, recipes
from vit_jax.training import config as configuration

ROOT = pathlib.Path(__file__).parents[2]


def opened(**spec):
    data = DataConfig(name="x", num_classes=10)
    spec = NeighboursConfig(**{"name": "digits"} | spec)
    return splits.EvalSplits(data).open("one", spec, "", model_classes=False)


@pytest.mark.parametrize("lacking", [(), ("test",), ("test", "val")])
def test_the_next_split_is_tested_on_only_where_one_is_absent(lacking, monkeypatch):
    asked, open_it = [], open_unchecked

    def there(data, split):
        asked.append(split)
        if split in lacking:
            raise NoSplit(f"no split {split!r}")
        return open_it(data, "test")

    monkeypatch.setattr(splits, "open_unchecked", there)
    found = opened()
    expected = next(name for name in splits.TESTS if name not in lacking)
    assert asked == [*lacking, expected]
    assert (found.split, found.title) == (expected, f"digits {expected}")


def test_a_split_that_cannot_be_opened_is_not_replaced(monkeypatch):
    def damaged(data, split):
        raise UserError(f"{split} lacks a file: prepare it again")

    monkeypatch.setattr(splits, "open_unchecked", damaged)
    with pytest.raises(UserError, match="test lacks a file"):
        opened()


@pytest.mark.parametrize("name", ["digits", "vtab/dtd"])
def test_an_absent_split_is_told_apart_from_other_errors(name):
    with pytest.raises(NoSplit, match="has"):
        open_unchecked(DataConfig(name=name, num_classes=10), "dev")


@pytest.mark.parametrize("labelled", [True, False])
def test_a_run_with_masks_evaluates_them_or_labels_of_others(labelled):
    data = DataConfig(name="synthetic", mask_key="mask", num_classes=4)
    reads = splits.EvalSplits(data)
    keys = {"model_classes": False, "labelled": labelled}
    own = reads.open("one", NeighboursConfig(), "val", **keys)
    assert own.data.has_labels == labelled
    assert ("mask" in own.source[0]) == (not labelled)
    assert own.data.num_classes > 1_000 if labelled else own.data.num_classes == 4
    other = reads.open("two", NeighboursConfig(name="digits"), "test", **keys)
    assert not other.data.mask_key
    assert other.data.has_labels == labelled
    masked = NeighboursConfig(name="synthetic", mask_key="other")
    found = reads.open("three", masked, "val", **keys)
    assert found.data.mask_key == ("" if labelled else "other")


def test_records_in_another_order_of_classes_keep_everything_else():
    data = DataConfig(name="digits", num_classes=10)
    source = open_unchecked(data, "test[:40]")
    numbers = np.random.default_rng(0).permutation(10)
    names = tuple(np.array(source.class_names)[np.argsort(numbers)])
    found = splits.Relabeled(source, names, numbers)
    assert len(found) == 40
    assert found.images is source.images
    assert found.labels.dtype == source.labels.dtype
    for i in (0, 17):
        assert found[i]["label"] == found.labels[i] == numbers[source.labels[i]]
        assert names[found.labels[i]] == source.class_names[source.labels[i]]
        assert (found[i]["image"] == source[i]["image"]).all()
        assert found.describe(i) == source.describe(i)
        assert found.record_id(i) == source.record_id(i)


@pytest.mark.parametrize("test", ["test", "val", "validation"])
@pytest.mark.parametrize("recipe", ["flowers", "flowers_finetune"])
def test_train_and_test_folders_are_taken_alike_by_every_verb(recipe, test, tmp_path):
    for split, count in (("train", 3), (test, 2)):
        for name in ("ant", "bee", "cat", "dog", "elk"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.new("L", (9, 7), 20 * i)
                image.save(tmp_path / split / name / f"{i}.png")
    config = configuration.load(
        f"{ROOT}/configs/{recipe}.py", {"data.data_dir": str(tmp_path)}
    )
    alone = configuration.load_evaluation(
        f"{ROOT}/configs/eval/classification.py:data={tmp_path}", {}
    )
    own = DataConfig(
        **dataclasses.asdict(alone.data), num_classes=config.data.num_classes
    )

    def check(expected, evaluated):
        # Training's evaluation, and evaluate.
        for one, data, order, split in (
            (config, config.data, splits.VALIDATIONS, expected),
            (alone, own, splits.TESTS, evaluated),
        ):
            (name,) = one.evals
            spec = one.evals[name]
            reads = splits.EvalSplits(data, order=order)
            found = reads.open(name, spec, spec.split, model_classes=True)
            assert (found.split, len(found.source)) == (split, 10)
        assert recipes.find(str(tmp_path)).test == evaluated

    check(test, test)
    # A flat folder of unlabelled images is no split.
    for other in ("test", "val"):
        if other != test:
            (tmp_path / other).mkdir()
            shutil.copy(tmp_path / "train/ant/0.png", tmp_path / other)
    check(test, test)
    if test != "test":  # Training looks at val, and reports are on test.
        shutil.rmtree(tmp_path / "test")
        shutil.copytree(tmp_path / test, tmp_path / "test")
        check(test, "test")


@pytest.mark.parametrize("label", [None, -1, "absent"])
def test_labels_that_stand_for_none_are_told_before_a_run(tmp_path, label):
    Image.new("RGB", (7, 9)).save(tmp_path / "image.png")
    cells = [(tmp_path / "image.png").read_bytes()] * 3
    columns = {"label": pa.array([label] * 3, pa.int64())} if label != "absent" else {}
    pq.write_table(pa.table({"image": cells} | columns), tmp_path / "train.parquet")
    match = {
        None: "this column of parquet is empty",
        -1: "parquet train record 0 has label -1",
        "absent": "parquet has no such column",
    }[label]
    data = DataConfig(name="parquet", data_dir=str(tmp_path), num_classes=0)
    read = splits.EvalSplits(data)
    with pytest.raises(UserError, match=f"evals.one needs labels: .*{match}.*; or "):
        read.open("one", NeighboursConfig(), "train", model_classes=False)
    found = read.open(
        "two", NeighboursConfig(), "train", model_classes=False, labelled=False
    )
    assert len(found.source) == 3
    assert found.data.num_classes == 0


def test_class_folders_without_splits_are_read_as_training_splits_them(tmp_path):
    image_folder.write(tmp_path)
    flat = str(tmp_path / "train")
    data = DataConfig(name="folder", data_dir=flat, num_classes=3)
    spec = classification.ClassificationConfig()
    found = {}
    for order in (splits.VALIDATIONS, splits.TESTS):
        reads = splits.EvalSplits(data, order=order)
        opened = reads.open("val", spec, spec.split, model_classes=True)
        found[opened.split] = len(opened.source)
    assert found == {"val": 4, "all": 19}  # Of a run, and of `evaluate`.
    other = classification.ClassificationConfig(data_dir=flat)
    reads = splits.EvalSplits(data, order=splits.VALIDATIONS)
    assert reads.open("b", other, "", model_classes=True).split == "all"
    recipe = recipes.find(flat)
    assert (recipe.train, recipe.test) == ("train", "val")
    fine_tuning._check_folders(recipe.test, flat)
    with pytest.raises(UserError, match="--test=test: .* has no folder 'test'"):
        fine_tuning._check_folders("test", flat)


def test_labels_that_a_folder_knows_are_known_of_parts_and_of_other_numbers(tmp_path):
    image_folder.write(tmp_path)
    data = DataConfig(name="folder", data_dir=str(tmp_path), num_classes=3)
    source = open_unchecked(data, "train")
    labels, rows = source.known_labels(), np.array([17, 3, 8, 1])
    part = splits.Subset(source, rows)
    assert part.known_labels().tolist() == labels[rows].tolist()
    assert [part[i]["label"] for i in range(4)] == labels[rows].tolist()
    new = np.array([2, 3, 0])
    other = splits.Relabeled(source, ("cat", "dog", "ant", "bee"), new)
    assert other.known_labels().tolist() == new[labels].tolist()
    assert [other[int(i)]["label"] for i in rows] == new[labels[rows]].tolist()
    # Labels that are no class are unknown: reading the records names the wrong one.
    assert splits.Relabeled(source, ("cat",), new[:1]).known_labels() is None

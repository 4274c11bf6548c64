import json
import pathlib

import pytest

from vit_jax.data.sources import vtab
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import recipes

ROOT = pathlib.Path(__file__).parents[3]
PAPER = json.loads((ROOT / "tests" / "golden" / "paper_tables.json").read_text())
TABLE_4 = {  # TFDS name: the paper's name, percent held out, classes.
    "imagenet2012": ("ImageNet", 1, 1000),
    "cifar100": ("CIFAR100", 2, 100),
    "cifar10": ("CIFAR10", 2, 10),
    "oxford_iiit_pet": ("Pets", 10, 37),
    "oxford_flowers102": ("Flowers", 10, 102),
}


def test_table_4_has_all_its_data_sets():
    assert recipes.TABLE_4.keys() == TABLE_4.keys()


@pytest.mark.parametrize("dataset", TABLE_4)
def test_a_data_set_of_the_paper_is_its_row_of_table_4(dataset):
    name, held_out, num_classes = TABLE_4[dataset]
    steps, rates = PAPER["table4"][name]
    found = recipes.find(dataset, "/data")
    assert (found.steps, list(found.rates), found.num_classes) == (
        steps,
        rates,
        num_classes,
    )
    kept = 100 - held_out
    assert (found.train, found.data_dir) == ("train", "/data")
    assert (found.part, found.held_out) == (f"train[:{kept}%]", f"train[{kept}%:]")
    assert found.test == ("validation" if dataset == "imagenet2012" else "test")
    assert found.transforms((384, 384), "area") == {
        "train_transform": "resize((448, 448), interpolation='area') | random_crop | flip",
        "eval_transform": "resize(interpolation='area')",
    }
    averaged = dataset == "imagenet2012"
    assert found.average((384, 384)) == 0.0
    assert found.average((512, 512)) == (0.9999 if averaged else 0.0)


@pytest.mark.parametrize("name", vtab.TASKS)
def test_a_task_of_vtab_is_the_row_of_table_4_with_its_own_transforms(name):
    steps, rates = PAPER["table4"]["VTAB"]
    found = recipes.find(f"vtab/{name}")
    assert (found.steps, list(found.rates), found.warmup) == (steps, rates, 200)
    assert found.mu_dtype == "bfloat16"  # scenic.momentum_hp
    assert (found.part, found.held_out) == ("train800", "val200")
    assert (found.train, found.test) == ("train800val200", "test")
    words = found.transforms((384, 384), "area")["train_transform"]
    assert ("random_crop" in words) == ("crop" in vtab.TASKS[name].ops)
    assert ("flip" in words) == ("flip" in vtab.TASKS[name].ops)


def test_a_set_that_is_not_in_the_paper_is_treated_as_those_of_its_size():
    sizes = [(1_442, 500), (19_999, 500), (20_000, 10_000), (10**6, 20_000)]
    assert [recipes.steps_for(n) for n, _ in sizes] == [steps for _, steps in sizes]
    found = recipes.find("svhn_cropped")
    assert (found.part, found.held_out) == ("train[:90%]", "train[90%:]")
    assert (found.num_classes, found.steps, found.test) == (0, 0, "test")
    assert "not in the paper" in found.source


def test_digits_are_not_mirrored():
    found = recipes.find("digits").transforms((16, 24), "bicubic")["train_transform"]
    assert found == "resize((19, 28), interpolation='bicubic') | random_crop"


@pytest.mark.parametrize(
    ("there", "test"),
    [("test val", "test"), ("val", "val"), ("validation", "validation")],
)
def test_a_folder_is_tested_on_what_it_has(tmp_path, there, test):
    for name in ("train", *there.split()):
        (tmp_path / name / "roses").mkdir(parents=True)
        (tmp_path / name / "roses" / "1.png").write_bytes(b"x")
    found = recipes.find(str(tmp_path))
    assert (found.dataset, found.data_dir) == ("folder", str(tmp_path))
    assert found.test == test
    assert found.title == tmp_path.name
    assert recipes.find("digits").title == "digits"
    assert recipes.find(str(tmp_path), test="train2").test == "train2"


@pytest.mark.parametrize("there", ["train", "test val", "", "roses daisies"])
def test_a_folder_with_one_split_is_refused_with_what_it_needs(tmp_path, there):
    for name in there.split():
        (tmp_path / name / "x").mkdir(parents=True)
        (tmp_path / name / "x" / "1.png").write_bytes(b"x")
    with pytest.raises(UserError, match="put training images into .*/train/"):
        recipes.find(str(tmp_path))


def test_what_vtab_does_not_have_is_refused():
    with pytest.raises(UserError, match="VTAB-1k has no such task; it has vtab/ and"):
        recipes.find("vtab/dsprites")
    with pytest.raises(
        UserError, match="--test=val200: vtab/dtd is tested only on its"
    ):
        recipes.find("vtab/dtd", test="val200")

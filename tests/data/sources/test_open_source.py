"""Data sets by their name, in a config and on a command line."""

import ast
import os
import subprocess
import sys

import image_folder
import numpy as np
import pytest

from vit_jax.data.sources import arrays
from vit_jax.data.sources import open as spec
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError


def test_digits_are_all_there_once_and_stratified(data_config):
    data = data_config(name="digits", num_classes=10, image_size=(8, 8), channels=1)
    train, test = open_source(data, "train"), open_source(data, "test")
    assert len(train) + len(test) == 1797
    assert train.images.shape[1:] == (8, 8, 1)
    assert (train.images.dtype, train.images.max()) == (np.uint8, 255)
    share = np.bincount(test.labels) / np.bincount([*train.labels, *test.labels])
    np.testing.assert_allclose(share, 0.2, atol=0.006)

    from sklearn.datasets import load_digits

    ours = np.concatenate([train.images, test.images])[..., 0] * (16 / 255)
    key = lambda images: sorted(map(tuple, np.round(images).reshape(1797, 64)))
    assert key(ours) == key(load_digits().images)


def test_digits_repeat_the_grey_value_for_three_channels(data_config):
    data = data_config(name="digits", num_classes=10)
    images = open_source(data, "train[:7]+test[3:5]").images
    assert images.shape == (9, 8, 8, 3)
    np.testing.assert_array_equal(images[..., 0], images[..., 2])


def test_made_images_depend_on_split_and_number_only(data_config):
    data = data_config(num_examples=11)
    source = open_source(data, "train")
    assert source.images.shape == (11, 13, 17, 3)
    np.testing.assert_array_equal(source.labels, np.arange(11) % 3)
    np.testing.assert_array_equal(
        open_source(data, "train[4:6]").images[1], source.images[5]
    )
    assert (arrays.synthetic_image("val", 5, 3, (13, 17, 3)) != source.images[5]).any()
    assert len(open_source(data_config(), "anything")) == arrays.DEFAULT_EXAMPLES


def test_another_number_of_classes_than_the_set_has_is_a_user_error(data_config):
    with pytest.raises(
        UserError, match=r"data\.num_classes=7, but digits has 10 classes"
    ):
        open_source(data_config(name="digits", num_classes=7), "train")


def test_another_size_than_the_config_states_is_a_user_error(data_config):
    data = data_config(name="digits", num_classes=10, num_examples=1500)
    with pytest.raises(UserError, match=r"data\.num_examples=1500.* has 1442"):
        open_source(data, "train")
    assert len(open_source(data, "test")) == 355  # It states data.split alone.


def test_importing_the_package_loads_neither_jax_nor_tfds():
    code = (
        "import sys, vit_jax.data.pipeline as p;"
        "heavy = {'jax', 'tensorflow_datasets', 'sklearn', 'grain', 'tensorflow'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert out.stdout == "[]\n", out.stderr


def test_batches_of_photographs_import_no_code_of_other_features(tmp_path):
    image_folder.write(tmp_path)
    code = f"""
import sys
from vit_jax.data import pipeline
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.open import open_source

data = DataConfig(
    name="folder",
    data_dir={str(tmp_path)!r},
    num_classes=3,
    train_transform="random_resized_crop",
)
source = open_source(data, "train")
how = dict(batch_size=2, seed=0, start=0, stop=1)
with pipeline.train_batches(source, data, **how) as batches:
    next(batches)
print([name for name in sys.modules if name.startswith("vit_jax.data.")])
"""
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    imported = {name.rpartition(".")[2] for name in ast.literal_eval(out.stdout)}
    assert {"pipeline", "folder", "label", "image", "host"} <= imported
    others = {"bands", "mask", "masks", "caption", "captions", "tokenizer", "table"}
    others |= {"arrays", "tfds", "vtab", "catalogue", "class_names", "imagenet"}
    others |= {"views", "naflex", "multi_crop", "scale_crop", "randaugment"}
    others |= {"custom", "device", "geometric", "mixing", "photometric", "display"}
    assert not imported & others


@pytest.mark.parametrize(
    ("text", "name", "data_dir", "split"),
    [
        ("cifar10#test", "cifar10", "", "test"),
        ("cifar10", "cifar10", "", "train"),
        ("folder@/a/b#val", "folder", "/a/b", "val"),
        ("cifar10@~/d#train[:98%]+test", "cifar10", "~/d", "train[:98%]+test"),
        ("eurosat/rgb:2.0.0@gs://b/x@y#a", "eurosat/rgb:2.0.0", "gs://b/x@y", "a"),
        ("folder@/c#/d#val", "folder", "/c#/d", "val"),
    ],
)
def test_a_spec_is_read_into_its_parts(text, name, data_dir, split):
    data_dir = os.path.expanduser(data_dir)
    found = spec.parse_spec(text, "train")
    assert found == spec.Spec(name, data_dir, split)
    assert spec.parse_spec(str(found), "other") == found


def test_commas_of_a_split_do_not_separate():
    found = spec.parse_specs("a#even_splits(test, 3)[1],folder@/b#val,c", "test")
    assert found == [
        spec.Spec("a", "", "even_splits(test, 3)[1]"),
        spec.Spec("folder", "/b", "val"),
        spec.Spec("c", "", "test"),
    ]


@pytest.mark.parametrize("text", ["", "#train", "folder@#val", "@/a#val", "synthetic#"])
def test_a_spec_with_an_empty_part_is_refused(text):
    with pytest.raises(
        UserError, match=r"is not NAME\[@DIR\]\[#SPLIT\]: write for example"
    ):
        spec.parse_spec(text, "train")


def test_a_spec_opens_its_split_whatever_the_classes(folder):
    source = spec.parse_spec(f"folder@{folder}#val", "train").open()
    assert sorted(map(source.record_id, range(len(source)))) == [
        f"val/{name}/{i}.png" for name in ("ant", "cat") for i in range(2)
    ]
    assert len(spec.parse_spec("digits#test", "train").open()) == 355
    assert len(spec.parse_spec("synthetic#val[:7]", "train").open()) == 7
    with pytest.raises(UserError, match="split 'best': digits has no split 'best'"):
        spec.parse_spec("digits#best", "train").open()

"""Data sets named on a command line."""

import os

import pytest

from vit_jax.data.sources import open as spec
from vit_jax.errors import UserError


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
    with pytest.raises(UserError, match=r"is not NAME\[@DIR\]\[#SPLIT\]: write as"):
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

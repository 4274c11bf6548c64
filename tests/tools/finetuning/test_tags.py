"""Several labels in one row: separators and lists that are recognised, or are not."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.sources import table
from vit_jax.data.tags import labels_in
from vit_jax.tools.finetuning import layout, tags

TAGS = ("white, flower", "flower", "white, tree", "tree, flower", "flower")
SPECIES = ("tench, Tinca tinca", "goldfish, Carassius auratus", "shark", "shark")
PLACES = ("Paris, France", "Lyon, France", "Bonn, Germany", "Ulm, Germany")


def recognised(values):
    rows = [{"label": value} for value in values]
    of = table.Table(pathlib.Path("photos.csv"), ("label",), rows)
    return tags.recognise(of, ["label"])


@pytest.mark.parametrize(
    ("values", "separator"),
    [
        (TAGS, ","),
        ([text.replace(", ", "|") for text in TAGS], "|"),
        ([text.replace(", ", "; ") for text in TAGS], ";"),
        # Names with commas, and a separator that is never part of one.
        (("crane, bird|lake", "crane, machine", "lake"), "|"),
        # One part in twelve occurs once.
        (
            (*TAGS * 3, "white, rare", *[f"white, {k}" for k in "ab" * 2], "a", "b"),
            None,
        ),
        (SPECIES, None),
        (PLACES, None),
        (("rock|roll", "jazz", "jazz"), None),
        (("1,5", "2,5", "1,7", "2,7"), None),  # Decimal commas.
        (("daisy", "rose", "daisy"), None),
        ((1, 2, 2), None),
    ],
)
def test_separators(values, separator):
    keys, about = recognised(values)
    assert keys["multi_label"] == (separator is not None)
    assert keys.get("label_separator") == separator
    has_one = any({*",|"} & {*str(value)} for value in values)
    assert ("data.multi_label" in about) == (has_one or separator is not None)


@pytest.mark.parametrize(
    "cell", [["a", "b"], '["a", "b"]', "['a', 'b']", '["a, c", "b"]']
)
def test_lists(cell):
    assert recognised([cell, "a"])[0] == {"multi_label": True}
    assert labels_in(cell)[1] == "b" and len(labels_in(cell)) == 2


def test_a_table_of_tags_is_read_as_it_was_recognised(tmp_path):
    for i in range(10):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / f"{i}.png")
    place = tmp_path / "photos.jsonl"
    # A name with a comma, which the list of the split must not divide.
    names = [["crane, bird", "lake"], ["lake"], ["tree"], ["tree", "lake"], []] * 2
    rows = [{"image": f"{i}.png", "tags": each} for i, each in enumerate(names)]
    place.write_text("\n".join(map(json.dumps, rows)))
    found = layout.find(str(place), {}, str(tmp_path / "run"))
    assert "lists of labels" in found.description
    classes = [found.open(split).class_names for split in ("train", "val")]
    assert classes == [("crane, bird", "lake", "tree")] * 2
    found = layout.take_fold(found, 1, 2)
    assert found.open("train").class_names == classes[0]

    place = tmp_path / "photos.csv"
    lines = [f'{i}.png,"{text}"' for i, text in enumerate(TAGS * 2)]
    place.write_text("\n".join(["image,tags", *lines]))
    found = layout.find(str(place), {}, str(tmp_path / "run"))
    assert "several per row, separated by ','" in found.description
    assert found.open("train").class_names == ("flower", "tree", "white")
    one_each = {"multi_label": False}
    found = layout.find(str(place), one_each, str(tmp_path / "run"))
    assert "white, flower" in found.open("train").class_names
    assert "separated" not in found.description


def test_a_separator_that_no_name_has():
    assert tags.unused_separator(["a", "b, c"]) == "|"
    assert tags.unused_separator(["a|b", "c"]) == ";"
    assert tags.unused_separator(["a|b", "c;d"]) == "\t"

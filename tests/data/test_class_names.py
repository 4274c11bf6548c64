"""The rule that matches the classes of data with those of a model."""

import functools

import numpy as np
import pytest

from vit_jax.data import class_names, imagenet
from vit_jax.data.class_names import arrange, imagenet_order, match
from vit_jax.errors import UserError

SYNSETS, ENGLISH = imagenet.synsets(), imagenet.class_names()
COLOURS = ("red", "blue", "forest", "dark blue")
TEXT_ORDER = tuple(sorted(map(str, range(12))))
ALPHABET = tuple(sorted(ENGLISH, key=str.casefold))
NUMBERS = tuple(sorted(map(str, range(1000))))
PART = (SYNSETS[20], SYNSETS[7])  # Like ImageNet-100: its own order.
# As in transformers' config.json: synonyms, and two names that occur twice.
LISTS = tuple(
    {134: "crane", 517: "crane", 639: "maillot, tank suit"}.get(k, f"{name}, Latin {k}")
    for k, name in enumerate(ENGLISH)
)


def found(names, model_names, num_classes=None, **how):
    num_classes = num_classes or len(model_names)
    return match(names, model_names, num_classes, where="here", **how)


@pytest.mark.parametrize(
    ("names", "model_names", "indices", "way"),
    [
        (COLOURS, COLOURS, [0, 1, 2, 3], "names"),
        (("Blue", "dark_blue", "FOREST", "red "), COLOURS, [1, 3, 2, 0], "names"),
        (("forest", "dark-blue"), COLOURS, [2, 3], "names"),  # A part.
        (("A",), ("a", "A"), [1], "names"),  # To the letter first.
        (("a", "a"), ("a", "a"), [0, 1], "names"),  # Equal twice, place by place.
        # Whole numbers are numbers of classes, whatever the order of the folders.
        (("0", "1", "10", "2"), tuple("abcdefghijk"), [0, 1, 10, 2], "class numbers"),
        (("002", "1"), COLOURS, [2, 1], "class numbers"),
        (("1", "10"), TEXT_ORDER, [1, 2], "names"),  # But not where they are names.
        (("01", "10"), TEXT_ORDER, [1, 2], "names"),
        (("0", "11"), tuple(f"class_{k}" for k in TEXT_ORDER), [0, 3], "class numbers"),
        # ImageNet, whatever the model calls its classes.
        (SYNSETS, ENGLISH, range(1000), "WordNet ids"),
        (PART, ENGLISH, [20, 7], "WordNet ids"),
        (PART, LISTS, [20, 7], "WordNet ids"),
        (PART, ALPHABET, [ALPHABET.index(ENGLISH[k]) for k in (20, 7)], "WordNet ids"),
        ((f"{PART[0]}-Hen", f"{PART[1]}_ray"), ENGLISH, [20, 7], "WordNet ids"),
        (("Ga\u0308nse", "b"), ("b", "g\xe4nse"), [1, 0], "names"),  # Of macOS.
        (PART, NUMBERS, [NUMBERS.index("20"), NUMBERS.index("7")], "WordNet ids"),
        ((ENGLISH[7], "hammerhead"), SYNSETS, [7, 4], "ImageNet's names"),
        ((ENGLISH[7],), PART, [1], "ImageNet's names"),
        (("999", "20"), LISTS, [999, 20], "class numbers"),
        (("7",), ALPHABET, [ALPHABET.index(ENGLISH[7])], "class numbers"),
        (("Latin 0", "tench"), LISTS, None, "Latin 0, tench are all the model's"),
        (("Latin 9", "goldfish"), LISTS, [9, 1], "names"),
        (("crane (bird)", "crane, machine"), ENGLISH, [134, 517], "names"),
        (ENGLISH, LISTS, range(1000), "ImageNet's names"),
        (ALPHABET, SYNSETS, map(ENGLISH.index, ALPHABET), "ImageNet's names"),
        # What the model lacks, and what is ambiguous.
        (("blue", "zebra"), COLOURS, None, "lack 1 of 2: 'zebra' .nearest: 'red'"),
        (("cat", "dog"), ("Katze", "Hund"), None, "'cat' .nearest: 'Katze'.*'dog'"),
        (("3", "4"), COLOURS, None, "lack 1 of 2: '4' .nearest: '3'"),
        ((SYNSETS[0], "n0"), ENGLISH, None, "lack 1 of 2: 'n0' "),
        (("1", "01"), COLOURS, None, "1, 01 are all the model's class 1"),
        (("a", "b"), ("a", "a", "b"), None, "'a' may be any .* 0, 1"),
        (("crane",), ENGLISH, None, "'crane' may be any .* 134, 517"),
        (("crane",), LISTS, None, "'crane' may be any .* 134, 517"),
        (("maillot",), ENGLISH, None, "'maillot' may be any .* 638, 639"),
        (("maillot",), LISTS, None, "'maillot' may be any .* 638, 639"),
    ],
)
def test_classes_are_matched(names, model_names, indices, way):
    if indices is None:
        with pytest.raises(UserError, match=f"here: .*{way}"):
            found(names, model_names)
        return
    got = found(names, model_names)
    assert got.indices.tolist() == list(indices)
    assert got.way == way


@pytest.mark.parametrize(
    ("names", "indices", "way"),
    [
        ((SYNSETS[3], SYNSETS[999]), [3, 999], "WordNet ids"),
        (("ostrich",), [9], "ImageNet's names"),
        (("4", "10"), [4, 10], "class numbers"),
    ],
)
def test_1000_classes_without_names_are_imagenets(names, indices, way):
    got = found(names, (), 1000)
    assert (got.indices.tolist(), got.way) == (indices, way)
    with pytest.raises(UserError, match="2 classes, but the model has 999"):
        found(PART, (), 999)


def test_only_position_decides_and_is_told():
    got = found(("a1", "a2", "b"), (), 3)
    assert (got.way, got.indices.tolist()) == ("position", [0, 1, 2])
    assert "a1, a2, b" in got.line
    assert "warning" not in got.line
    told = found(("a1", "a10", "a2"), (), 3).line
    assert "a1, a10, a2" in told
    assert "warning: by the numbers in the names it would be a1, a2, a10" in told
    assert "label k" in found((), COLOURS).line
    assert not found((), (), 3).line
    by_position = functools.partial(class_names.match_by_position, where="here")
    stated = by_position(("x", "blue", "y", "z"), COLOURS, 4)
    assert (stated.way, stated.indices.tolist()) == ("position", [0, 1, 2, 3])
    with pytest.raises(UserError, match="3 classes, but the model has 4"):
        by_position(("x", "blue", "y"), COLOURS, 4)


def test_a_line_is_told_unless_names_and_order_agree():
    assert not found(COLOURS, COLOURS).line
    assert not found(("Red", "BLUE", "forest", "dark_blue"), COLOURS).line
    for names in (COLOURS[::-1], COLOURS[:2], tuple("0123")):
        assert found(names, COLOURS).line


def test_stated_names_follow_the_models_order():
    known = ("cat", "dog", "eel")
    assert arrange(("Eel", "cat", "dog"), known, where="x") == ("cat", "dog", "Eel")
    renamed = ("Katze", "Hund", "Aal")
    assert arrange(renamed, known, where="x") == renamed
    assert arrange(("cat", "Hund", "eel"), known, where="x") == ("cat", "Hund", "eel")
    assert arrange(renamed, (), where="x") == renamed
    assert arrange(ALPHABET, SYNSETS, where="x") == ENGLISH
    with pytest.raises(UserError, match="x: .*'Aal'"):  # Neither order nor new names.
        arrange(("dog", "cat", "Aal"), known, where="x")


@pytest.mark.parametrize("names", [(), SYNSETS, ENGLISH, LISTS])
def test_the_order_of_imagenet_is_recognised(names):
    assert (imagenet_order(names, 1000) == np.arange(1000)).all()


def test_other_thousands_are_not_imagenets():
    own = tuple(f"kind {k} of 7" for k in range(1000))
    assert imagenet_order(own, 1000) is None
    assert imagenet_order((), 999) is None
    assert imagenet_order(COLOURS, 4) is None
    part = imagenet_order(PART, 2)
    assert (part[20], part[7], (part >= 0).sum()) == (0, 1, 2)
    assert class_names.POSITION == found(own[:1], (), 1).way

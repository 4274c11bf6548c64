"""The rule that matches the classes of data with those of a model, see docs/labels.md.

Letters: K classes of the data, C classes of the model.
"""

import difflib
import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from vit_jax.data import imagenet
from vit_jax.errors import UserError

NAMES, POSITION = "names", "position"  # The ways that an evaluation may state.
NUMBERS, WORDNET, ENGLISH = "class numbers", "WordNet ids", "ImageNet's names"

_SHOWN = 5  # Names in a message.
# Of 1,000 names so many stand where ImageNet has them, or anywhere: the rest is spelt
# otherwise. Names of other classes agree with a handful.
_AGREE = imagenet.NUM_CLASSES // 4

_Classes = Mapping[str, Sequence[int]]  # By name.


class Match(NamedTuple):
    """The classes of data among those of a model.

    Attributes:
      indices: the model's index of each class of the data.
      way: how they were matched: NAMES, NUMBERS, WORDNET, ENGLISH or POSITION.
      line: for the user; "" if both sides have the same names in the same order.
    """

    indices: Integer[np.ndarray, " K"]
    way: str
    line: str


class _Way(NamedTuple):
    """A vocabulary in which the model's classes are looked up.

    Attributes:
      name: of the way.
      exact: names as they are written to classes; empty if those are ambiguous.
      levels: plain name to classes, the most exact spellings first.
      shown: plain name to the name as it is written.
      more: what a name may be followed by, as in "tench, Tinca tinca".
    """

    name: str
    exact: _Classes
    levels: tuple[_Classes, ...]
    shown: Mapping[str, str]
    more: str = "$"

    def find(self, name: str) -> Sequence[int]:
        """Returns the classes that a name may stand for."""
        if name in self.exact:
            return self.exact[name]
        spelt = (name, re.split(self.more, name)[0])
        found = (level.get(_plain(one)) for level in self.levels for one in spelt)
        return next(filter(None, found), ())


def match(
    names: Sequence[str],
    model_names: Sequence[str],
    num_classes: int,
    *,
    where: str,
    by: str = NAMES,
    hint: str = "",
) -> Match:
    """Matches the classes of data with those of a model.

    Case, "_" and "-" do not count, nor zeros in front of a number, nor what stands behind
    a WordNet id ("n02085620-Chihuahua"). Names that are all whole numbers are class
    numbers if the model has no such names. WordNet ids, English names and numbers of
    ImageNet find the classes of a model that has ImageNet's.

    Args:
      names: of the data, in the order of its labels; empty if it has none.
      model_names: of the model, in the order of its outputs; empty if it has none.
      num_classes: number of the model's classes.
      where: what the message of an error begins with.
      by: NAMES, or POSITION to compare class k of the data with the model's class k.
      hint: what else to do about names that the model lacks.

    Raises:
      UserError: the model lacks a name, or a name stands for several of its classes, or
        two names for one.
    """
    names, model_names = tuple(names), tuple(model_names)
    if by == POSITION or not names:
        return _by_position(names, model_names, num_classes, where)
    way, found = _look_up(names, model_names, num_classes)
    if not any(found) and not model_names:
        return _by_position(names, model_names, num_classes, where)
    if not all(found):
        unknown = _describe_unknown(names, model_names, num_classes, found)
        raise UserError(f"{where}: {unknown}: rename or remove them{hint}")
    if len(names) == num_classes and all(k in one for k, one in enumerate(found)):
        indices = np.arange(num_classes)  # Names that occur twice agree there too.
    else:
        _check_unambiguous(names, found, num_classes, where)
        indices = np.array([one[0] for one in found])
    return Match(indices, way.name, _describe(names, indices, way.name, num_classes))


def arrange(
    stated: Sequence[str], known: Sequence[str], *, where: str
) -> tuple[str, ...]:
    """Returns stated names of known classes in the order of those.

    Args:
      stated: a name for each class, in label order unless the names say otherwise.
      known: the names that the classes have; empty if they have none.
      where: what the message of an error begins with.

    Returns:
      The names in the order of `known` if they are the same names in another order;
      as they are if they rename classes.

    Raises:
      UserError: some are names of other places, and others are of no class.
    """
    stated, known = tuple(stated), tuple(known)
    if not known or len(stated) != len(known):
        return stated
    _, found = _look_up(stated, known, len(known))
    if all(not one or k in one for k, one in enumerate(found)):
        return stated
    indices = match(stated, known, len(known), where=where).indices
    return tuple(stated[k] for k in np.argsort(indices))


def imagenet_order(
    model_names: Sequence[str], num_classes: int
) -> Integer[np.ndarray, "1000"] | None:
    """Returns the model's index of each class of ImageNet, -1 of one that it lacks.

    Args:
      model_names, num_classes: as of `match`. 1,000 classes without names are ImageNet's.

    Returns:
      None if the model's classes are not ImageNet's.
    """
    numbers = imagenet.NUM_CLASSES
    if not model_names:
        return np.arange(numbers) if num_classes == numbers else None
    synsets = _places([name] for name in imagenet.synsets())
    found = [synsets.get(_plain(name), ()) for name in model_names]
    if not all(found):
        if num_classes != numbers:
            return None
        if numbered := _numbers_in(model_names):
            return np.array([numbered[str(k)][0] for k in range(numbers)])
        found = list(map(_english().find, model_names))
        if sum(k in one for k, one in enumerate(found)) >= _AGREE:
            return np.arange(numbers)
        if sum(len(one) == 1 for one in found) < _AGREE:
            return None
    order = np.full(numbers, -1)
    for k, one in enumerate(found):
        if len(one) == 1:
            order[one[0]] = k
    return order


def _look_up(
    names: Sequence[str], model_names: Sequence[str], num_classes: int
) -> tuple[_Way, list[Sequence[int]]]:
    """Returns the first way that finds the most names, and the classes of each name."""
    tried = []
    for way in _ways(names, model_names, num_classes):
        tried.append((way, list(map(way.find, names))))
        if all(tried[-1][1]):
            break
    return max(tried, key=lambda each: sum(map(bool, each[1])))


def _ways(
    names: Sequence[str], model_names: Sequence[str], num_classes: int
) -> list[_Way]:
    """Returns the ways to look names up, in the order in which they are tried."""
    order = imagenet_order(model_names, num_classes)
    # Of a part of ImageNet "maillot" may also be "maillot, tank suit".
    exact = order is None or len(names) == num_classes
    levels = (_places([name] for name in model_names),)
    if order is not None:
        others = _places(name.split(",")[1:] for name in model_names)
        levels = (_places(map(_spellings, model_names)), others)
    shown = {_plain(name): name for name in model_names}
    more = "$" if order is None else ","
    of_names = _Way(NAMES, _places_of(model_names), levels, shown, more)
    ways = [of_names if exact else of_names._replace(exact={})]
    numbers = all(name.isdecimal() for name in names)
    if numbers and not any(map(ways[0].find, names)):
        places = _numbers_in(model_names) or {str(k): [k] for k in range(num_classes)}
        if order is not None and num_classes == imagenet.NUM_CLASSES:
            places = {str(c): [int(k)] for c, k in enumerate(order) if k >= 0}
        return [_Way(NUMBERS, {}, (places,), {key: key for key in places})]
    if order is None:
        return ways

    def of_model(classes: _Classes) -> _Classes:
        return {
            key: found
            for key, places in classes.items()
            if (found := [int(order[c]) for c in places if order[c] >= 0])
        }

    for way in (_wordnet(), _english()):
        levels = tuple(map(of_model, way.levels))
        shown = {key: way.shown[key] for key in way.shown.keys() & levels[0].keys()}
        exact_ = of_model(way.exact) if exact else {}
        ways.append(way._replace(exact=exact_, levels=levels, shown=shown))
    return ways


@functools.cache
def _wordnet() -> _Way:
    """Returns the way from WordNet ids to the class numbers of ImageNet."""
    names = imagenet.synsets()
    places = _places([name] for name in names)
    return _Way(WORDNET, {}, (places,), {name: name for name in names}, "[ _-]")


@functools.cache
def _english() -> _Way:
    """Returns the way from English names to the class numbers of ImageNet."""
    names = imagenet.class_names()
    places = _places(map(_spellings, names))
    shown = {_plain(name): name for name in names}
    return _Way(ENGLISH, _places_of(names), (places,), shown, ",")


def _spellings(name: str) -> set[str]:
    """Returns how else an English name of ImageNet is written, and its first synonym.

    "crane (bird)" is also "crane, bird", "crane bird" and, ambiguous, "crane".
    """
    other = re.sub(r" \((.*)\)", r", \1", name)
    return {name, other, other.replace(",", ""), other.split(",")[0]}


def _places(spellings: Iterable[Iterable[str]]) -> dict[str, list[int]]:
    """Returns plain name to the classes of which it is one of the spellings."""
    places = {}
    for k, names in enumerate(spellings):
        for key in {_plain(name) for name in names}:
            places.setdefault(key, []).append(k)
    return places


def _places_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Returns name to the classes that are called so, to the letter."""
    places = {}
    for k, name in enumerate(names):
        places.setdefault(name, []).append(k)
    return places


def _numbers_in(names: Sequence[str]) -> dict[str, list[int]]:
    """Returns number to place of names as "7" or "class 7" from 0 on; else {}."""
    parts = [re.fullmatch(r"(.*?)(\d+)", _plain(name)) for name in names]
    if not all(parts) or len({part[1] for part in parts}) > 1:
        return {}
    places = _places([part[2]] for part in parts)
    return places if places.keys() == set(map(str, range(len(names)))) else {}


def _plain(name: str) -> str:
    # macOS takes accents apart in the names of files.
    name = unicodedata.normalize("NFC", name)
    name = re.sub(r"[\s_-]+", " ", name).strip().casefold()
    return str(int(name)) if name.isdecimal() else name


def _by_position(names, model_names, num_classes, where) -> Match:
    if names and len(names) != num_classes:
        raise UserError(
            f"{where} has {len(names)} classes, but the model tells {num_classes} "
            "classes apart and nothing says which is which: fine-tune it on these, name "
            "the model's classes (convert --labels=FILE), or take an evaluation of its "
            "features, as kind='fewshot'"
        )
    line = ""
    if names and names != model_names:
        line = (
            f"class k is taken as the model's class k, in the order {_listed(names)}"
            f"{_other_order(names)}"
        )
    elif model_names and not names:
        line = "has no class names: label k is taken as the model's class k"
    return Match(np.arange(num_classes), POSITION, line)


def _other_order(names: Sequence[str]) -> str:
    """Returns a warning if names are in the order of texts, and numbers in them not."""
    parts = [re.split(r"(\d+)", name) for name in names]
    keys = [[int(p) if p.isdecimal() else p for p in one] for one in parts]
    natural = [names[i] for i in sorted(range(len(names)), key=keys.__getitem__)]
    if list(names) == natural or list(names) != sorted(names):
        return ""
    return f"; warning: by the numbers in the names it would be {_listed(natural)}"


def _describe_unknown(names, model_names, num_classes, found) -> str:
    unknown = [name for name, one in zip(names, found, strict=True) if not one]
    known = {}
    for way in _ways(names, model_names, num_classes):
        known |= way.shown
    shown = []
    for name in unknown[:_SHOWN]:
        (near,) = difflib.get_close_matches(_plain(name), list(known), 1, 0.0)
        shown.append(f"{name!r} (nearest: {known[near]!r})")
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return (
        f"the model's {num_classes:,} classes lack {len(unknown)} of {len(names):,}: "
        f"{', '.join(shown)}{more}"
    )


def _check_unambiguous(names, found, num_classes, where) -> None:
    """Raises UserError if a name stands for several classes, or a class has several."""
    owners = {}
    for name, one in zip(names, found, strict=True):
        if len(one) > 1:
            raise UserError(
                f"{where}: class {name!r} may be any of the model's classes "
                f"{', '.join(map(str, one))}: rename it, as by its WordNet id or number"
            )
        owners.setdefault(one[0], []).append(name)
    for index, several in owners.items():
        if len(several) > 1:
            raise UserError(
                f"{where}: classes {_listed(several)} are all the model's class {index} "
                f"of {num_classes:,}: merge or rename them"
            )


def _describe(names, indices, way, num_classes) -> str:
    same = np.array_equal(indices, np.arange(num_classes))
    if same and way == NAMES:
        return ""
    part = f"{len(names):,} of " if len(names) < num_classes else ""
    return f"{part}the model's {num_classes:,} classes, matched by {way}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")

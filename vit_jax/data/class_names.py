"""Reads class names, and matches classes of data with those of a model (docs/labels.md).

Letters: K classes of the data, C classes of the model.
"""

import difflib
import functools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from vit_jax.data import imagenet
from vit_jax.data.sources.base import composed
from vit_jax.errors import UserError

NAMES, POSITION = "names", "position"
NUMBERS, WORDNET, ENGLISH = "class numbers", "WordNet ids", "ImageNet's names"

_SHOWN = 5  # Names in a message.
# Minimum number of names that agree with ImageNet's 1,000, since some may be spelt
# differently. Names of other classes agree with a handful.
_AGREE = imagenet.NUM_CLASSES // 4

_Classes = Mapping[str, Sequence[int]]  # Class numbers by name.


class Match(NamedTuple):
    """The classes of data among those of a model.

    Attributes:
      indices: the model's index of each class of the data.
      way: NAMES, NUMBERS, WORDNET, ENGLISH or POSITION.
      line: note for the user; "" if both have the same names in the same order.
    """

    indices: Integer[np.ndarray, " K"]
    way: str
    line: str


class _Way(NamedTuple):
    """A vocabulary in which the model's classes are looked up.

    Attributes:
      name: name of the vocabulary.
      exact: exact names to classes; empty if exact names are ambiguous.
      levels: plain name to classes, the most exact spellings first.
      shown: plain name to the name as it is written.
      more: pattern at which a name may end, such as the comma in "tench, Tinca tinca".
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
        classes = (level.get(_plain(one)) for level in self.levels for one in spelt)
        return next(filter(None, classes), ())


def read(path: str | os.PathLike, what: str) -> tuple[str, ...]:
    """Reads names from a text file, one per line in label order.

    Args:
      path: path of the file.
      what: name of the file in messages.

    Raises:
      UserError: the file cannot be read, or a line before the last has no name.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{what} cannot be read: save it as UTF-8 ({error})") from error
    except OSError as error:
        raise UserError(f"{what} cannot be read: {error}") from error
    names = [composed(line.strip()) for line in lines]
    while names and not names[-1]:
        names.pop()
    if not names or not all(names):
        line = names.index("") + 1 if names else 1
        raise UserError(f"{what} has no name in line {line}: give one name per line")
    return tuple(names)


def match(
    names: Sequence[str],
    model_names: Sequence[str],
    num_classes: int,
    *,
    where: str,
    hint: str = "",
) -> Match:
    """Matches the classes of data with those of a model, by their names.

    Case, "_", "-", leading zeros of a number, and text after a WordNet id
    ("n02085620-Chihuahua") are ignored. If all names are whole numbers, and the model
    has no such names, they are class numbers. For a model that has ImageNet's classes,
    WordNet ids, English names and numbers of ImageNet are looked up.

    Args:
      names: class names of the data in label order; may be empty.
      model_names: class names of the model in output order; may be empty.
      num_classes: number of the model's classes.
      where: beginning of error messages.
      hint: another remedy for names that the model lacks.

    Raises:
      UserError: the model lacks a name, a name stands for several of its classes, or
        two names stand for one class.
    """
    names, model_names = tuple(names), tuple(model_names)
    if not names:
        return match_by_position(names, model_names, num_classes, where=where)
    way, matches = _look_up(names, model_names, num_classes)
    if not any(matches) and not model_names:
        return match_by_position(names, model_names, num_classes, where=where)
    if not all(matches):
        unknown = _describe_unknown(names, model_names, num_classes, matches)
        raise UserError(f"{where}: {unknown}: rename or remove them{hint}")
    if len(names) == num_classes and all(k in one for k, one in enumerate(matches)):
        indices = np.arange(num_classes)  # Holds for repeated names too.
    else:
        _check_unambiguous(names, matches, num_classes, where)
        indices = np.array([one[0] for one in matches])
    return Match(indices, way.name, _describe(names, indices, way.name, num_classes))


def match_by_position(
    names: Sequence[str],
    model_names: Sequence[str],
    num_classes: int,
    *,
    where: str,
    hint: str = "",
) -> Match:
    """Matches class k of data with a model's class k.

    Args:
      names, model_names, num_classes, where, hint: arguments of `match`.

    Raises:
      UserError: the data have names, but not as many as the model has classes.
    """
    names, model_names = tuple(names), tuple(model_names)
    if names and len(names) != num_classes:
        raise UserError(
            f"{where} has {len(names)} classes, but the model has {num_classes} and no "
            "names to match them: fine-tune it on these, name the model's classes "
            "(convert --labels=FILE), or use an evaluation of its features, such as "
            "kind='fewshot'"
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


def arrange(
    names: Sequence[str], known: Sequence[str], *, where: str
) -> tuple[str, ...]:
    """Sorts new names of known classes into the order of the known names.

    New names that rename classes keep their order.

    Raises:
      UserError: some names are known in another order, and others are unknown; the
        message begins with `where`.
    """
    names, known = tuple(names), tuple(known)
    if not known or len(names) != len(known):
        return names
    _, matches = _look_up(names, known, len(known))
    if all(not one or k in one for k, one in enumerate(matches)):
        return names
    indices = match(names, known, len(known), where=where).indices
    return tuple(names[k] for k in np.argsort(indices))


def imagenet_order(
    model_names: Sequence[str], num_classes: int
) -> Integer[np.ndarray, "1000"] | None:
    """Returns the model's index of each class of ImageNet, -1 if it lacks the class.

    The result is None if the model's classes are not ImageNet's. 1,000 classes without
    names count as ImageNet's.

    Args:
      model_names: class names of the model in output order; may be empty.
      num_classes: number of the model's classes.
    """
    count = imagenet.NUM_CLASSES
    if not model_names:
        return np.arange(count) if num_classes == count else None
    synsets = _places([name] for name in imagenet.synsets())
    matches = [synsets.get(_plain(name), ()) for name in model_names]
    if not all(matches):
        if num_classes != count:
            return None
        if numbered := _numbers_in(model_names):
            return np.array([numbered[str(k)][0] for k in range(count)])
        matches = list(map(_english().find, model_names))
        if sum(k in one for k, one in enumerate(matches)) >= _AGREE:
            return np.arange(count)
        if sum(len(one) == 1 for one in matches) < _AGREE:
            return None
    order = np.full(count, -1)
    for k, one in enumerate(matches):
        if len(one) == 1:
            order[one[0]] = k
    return order


def _look_up(
    names: Sequence[str], model_names: Sequence[str], num_classes: int
) -> tuple[_Way, list[Sequence[int]]]:
    """Returns the way that matches the most names, and the classes of each name."""
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
    # In a part of ImageNet "maillot" may also be "maillot, tank suit".
    exact = order is None or len(names) == num_classes
    levels = (_places([name] for name in model_names),)
    if order is not None:
        others = _places(name.split(",")[1:] for name in model_names)
        levels = (_places(map(_spellings, model_names)), others)
    shown = {_plain(name): name for name in model_names}
    more = "$" if order is None else ","
    of_names = _Way(NAMES, _exact(model_names), levels, shown, more)
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
            key: indices
            for key, places in classes.items()
            if (indices := [int(order[c]) for c in places if order[c] >= 0])
        }

    for way in (_wordnet(), _english()):
        levels = tuple(map(of_model, way.levels))
        shown = {key: way.shown[key] for key in way.shown.keys() & levels[0].keys()}
        exact_ = of_model(way.exact) if exact else {}
        ways.append(way._replace(exact=exact_, levels=levels, shown=shown))
    return ways


@functools.cache
def _wordnet() -> _Way:
    """Returns the way to look up WordNet ids as class numbers of ImageNet."""
    names = imagenet.synsets()
    places = _places([name] for name in names)
    return _Way(WORDNET, {}, (places,), {name: name for name in names}, "[ _-]")


@functools.cache
def _english() -> _Way:
    """Returns the way to look up English names as class numbers of ImageNet."""
    names = imagenet.class_names()
    places = _places(map(_spellings, names))
    shown = {_plain(name): name for name in names}
    return _Way(ENGLISH, _exact(names), (places,), shown, ",")


def _spellings(name: str) -> set[str]:
    """Returns spellings of an English name of ImageNet, and its first synonym.

    "crane (bird)" is also "crane, bird", "crane bird" and the ambiguous "crane".
    """
    other = re.sub(r" \((.*)\)", r", \1", name)
    return {name, other, other.replace(",", ""), other.split(",")[0]}


def _places(spellings: Iterable[Iterable[str]]) -> dict[str, list[int]]:
    """Returns the classes of each plain name."""
    return _exact({_plain(name) for name in names} for names in spellings)


def _exact(names: Iterable[str | Iterable[str]]) -> dict[str, list[int]]:
    """Returns the classes of each name; a class may have several names."""
    places = {}
    for k, each in enumerate(names):
        for name in [each] if isinstance(each, str) else each:
            places.setdefault(name, []).append(k)
    return places


def _numbers_in(names: Sequence[str]) -> dict[str, list[int]]:
    """Returns the positions of numbers in names like "7" or "class 7", else {}."""
    parts = [re.fullmatch(r"(.*?)(\d+)", _plain(name)) for name in names]
    if not all(parts) or len({part[1] for part in parts}) > 1:
        return {}
    places = _places([part[2]] for part in parts)
    return places if places.keys() == set(map(str, range(len(names)))) else {}


def _plain(name: str) -> str:
    name = re.sub(r"[\s_-]+", " ", composed(name)).strip().casefold()
    return str(int(name)) if name.isdecimal() else name


def _other_order(names: Sequence[str]) -> str:
    """Returns a warning if names are sorted as texts, but the numbers in them are not."""
    parts = [re.split(r"(\d+)", name) for name in names]
    keys = [[int(p) if p.isdecimal() else p for p in one] for one in parts]
    natural = [names[i] for i in sorted(range(len(names)), key=keys.__getitem__)]
    if list(names) == natural or list(names) != sorted(names):
        return ""
    return f"; warning: by the numbers in the names it would be {_listed(natural)}"


def _describe_unknown(names, model_names, num_classes, matches) -> str:
    unknown = [name for name, one in zip(names, matches, strict=True) if not one]
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


def _check_unambiguous(names, matches, num_classes, where) -> None:
    """Raises UserError if a name stands for several classes, or a class has several."""
    owners = {}
    for name, one in zip(names, matches, strict=True):
        if len(one) > 1:
            raise UserError(
                f"{where}: class {name!r} may be any of the model's classes "
                f"{', '.join(map(str, one))}: rename it, for example to its WordNet id or number"
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

"""Whether the classes of a model and of a data set are the same, by their names."""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

_WORDNET = re.compile(r"n\d{8}")  # What ImageNet calls its classes.


def numbers(
    names: Sequence[str], of_model: Sequence[str]
) -> Integer[np.ndarray, " K"] | None:
    """Returns the model's number of each class, where it has another order.

    Args:
      names: of the data, in the order of its labels.
      of_model: of the model, in the order of its outputs.

    Returns:
      None where the order is the same, and where the names do not tell: there are none,
      or not the same ones on both sides, each once. Case, "_" and "-" do not count.
    """
    plain, known = list(map(_plain, names)), list(map(_plain, of_model))
    places = {name: place for place, name in enumerate(known)}
    same = plain == known or sorted(plain) != sorted(known)
    if same or len(places) < len(known):
        return None
    return np.array([places[name] for name in plain])


def difference(names: Sequence[str], of_model: Sequence[str]) -> str:
    """Tells that names differ, for a note; "" if they do not, or need not agree.

    The names of one of them may be missing, or those of WordNet, in whose order
    ImageNet's classes are wherever they are named otherwise.

    Args:
      names, of_model: as of `numbers`, as many.
    """
    if not names or not of_model or _wordnet(names) or _wordnet(of_model):
        return ""
    pairs = list(zip(map(_plain, names), map(_plain, of_model), strict=True))
    others = [i for i, (one, other) in enumerate(pairs) if one != other]
    if not others:
        return ""
    first = others[0]
    return (
        f"{len(others)} of {len(names)} classes are not called what the model calls "
        f"them (class {first} is {names[first]!r}, the model's {of_model[first]!r}): "
        "they are compared by their numbers"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _wordnet(names: Sequence[str]) -> bool:
    return list(names) == sorted(names) and all(map(_WORDNET.fullmatch, names))

"""Groups of images that a split keeps together, such as the photographs of one patient.

`data.group_key` names the groups: a column, or a rule on file names, which is a regular
expression whose first group, in parentheses, is the name of an image's group. Letters:
N images.
"""

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Integer

from vit_jax.data import splits
from vit_jax.data.sources.base import warn
from vit_jax.errors import UserError

# From the name of a split and a number of parts to the part of each of its records.
PartsOf = Callable[[str, int], Integer[np.ndarray, " N"]]
_TRIES = 10  # Seeds, if a class with several groups is not in two folds.
_MOST_PARTS = 20  # The time of scikit-learn grows with the number of parts.


def rule(group_key: str) -> re.Pattern | None:
    """Returns the regular expression in `data.group_key`; None for a column's name.

    Raises:
      UserError: it is not a valid regular expression.
    """
    if "(" not in group_key:
        return None
    try:
        pattern = re.compile(group_key)
    except re.error as error:
        raise UserError(
            f"data.group_key={group_key!r} is not a regular expression ({error}): write "
            r"for example '(.*)_\d+', where the parentheses hold the name of a group"
        ) from error
    if not pattern.groups:
        raise UserError(
            f"data.group_key={group_key!r} has no parentheses around the name of a group: "
            r"write for example '(.*)_\d+'"
        )
    return pattern


def of_paths(group_key: str, paths: Sequence[str], place: object) -> list[str]:
    """Returns the group of each path by a rule; a path without a match is a group.

    The rule is searched in the file name, or in the path if the rule has a slash.

    Args:
      group_key: `data.group_key`.
      paths: paths relative to the folder of the data set.
      place: folder or table, for messages.

    Raises:
      UserError: the key is not a rule, or it matches no path.
    """
    pattern = rule(group_key)
    if pattern is None:
        raise UserError(
            f"data.group_key={group_key!r}: {place} has no columns: give a rule on file "
            r"names, such as '(.*)_\d+', whose first parentheses hold the name of a group"
        )
    whole = "/" in group_key
    found = [
        pattern.search(path if whole else os.path.basename(path)) for path in paths
    ]
    names = [match[1] if match and match[1] else None for match in found]
    return named(group_key, names, paths, place)


def named(
    group_key: str, names: Sequence[str | None], paths: Sequence[str], place: object
) -> list[str]:
    """Returns the group of each path, the path itself where a name is missing.

    Args:
      group_key: `data.group_key`, for messages.
      names: name of each group, such as the cells of a column; "" or None if missing.
      paths: paths or numbers of the records.
      place: folder or table, for messages.

    Raises:
      UserError: all names are missing.
    """
    key = f"data.group_key={group_key!r}"
    without = [path for path, name in zip(paths, names, strict=True) if not name]
    if len(without) == len(paths):
        raise UserError(
            f"{key} gives none of the {len(paths):,} images of {place} a group, such as "
            f"{paths[0]}: mend it"
        )
    if without:
        warn(
            f"{key}: {len(without):,} of {len(paths):,} images of {place} have no group, "
            f"such as {min(without)}; each counts as one"
        )
    return [name or path for path, name in zip(paths, names, strict=True)]


def held_out(
    groups: Sequence[str], labels: Sequence | None, key: str
) -> Bool[np.ndarray, " N"]:
    """Returns a mask of images to hold out for validation: whole groups, about a fifth.

    Args and errors are those of `folds`.
    """
    share = min(splits.HELD_OUT, splits.MOST_HELD_OUT / len(groups))
    count = max(2, min(round(1 / share), _MOST_PARTS, len({*groups})))
    return folds(groups, labels, count, key) == count - 1


def folds(
    groups: Sequence[str], labels: Sequence | None, count: int, key: str
) -> Integer[np.ndarray, " N"]:
    """Returns the fold of each image; images of a group have the same fold.

    With one class per image, the folds have about the same share of each class, as far
    as the groups allow (scikit-learn's StratifiedGroupKFold); else about the same
    number of images (GroupKFold). The last folds are nearest to an equal size. If all
    images of a class would be in one fold, they get -1, so that they are always
    trained on.

    Args:
      groups: name of each image's group.
      labels: class of each image, or list of its classes; None if unknown.
      count: number of folds.
      key: name of `group_key` for messages.

    Raises:
      UserError: there are fewer groups than folds.
    """
    names, numbers = np.unique(np.asarray(groups), return_inverse=True)
    if len(names) == 1:
        raise UserError(
            f"{key}: all {len(groups):,} images are in one group, {str(names[0])!r}: give a "
            "finer one, or leave it out"
        )
    if len(names) < count:
        raise UserError(
            f"{key}: {len(names)} groups cannot be divided into {count} parts: lower the "
            "number of parts"
        )
    several = labels is not None and np.ndim(labels[0]) > 0
    if labels is None:
        return _ordered(_balanced(numbers, None, count, 0), count)
    classes = [each if several else [each] for each in labels]
    single = _of_one(classes, numbers, numbers)  # Cannot be divided at all.
    best = None
    for seed in range(_TRIES):
        fold = _balanced(numbers, None if several else labels, count, seed)
        kept = _of_one(classes, fold, numbers)
        if best is None or kept.sum() < best[1].sum():
            best = fold, kept
        if kept.sum() <= single.sum():
            break
    fold, kept = best
    return np.where(kept, -1, _ordered(fold, count))


def _of_one(
    classes: Sequence[Sequence],
    parts: Integer[np.ndarray, " N"],
    groups: Integer[np.ndarray, " N"],
) -> Bool[np.ndarray, " N"]:
    """Returns a mask of the groups with a class that occurs in one part only."""
    seen: dict = {}
    for part, each in zip(parts.tolist(), classes, strict=True):
        for one in each:
            seen.setdefault(one, set()).add(part)
    alone = [any(len(seen[one]) == 1 for one in each) for each in classes]
    # Whole groups: their other images would be on the other side.
    return np.isin(groups, groups[np.flatnonzero(alone)])


def _ordered(fold: Integer[np.ndarray, " N"], count: int) -> Integer[np.ndarray, " N"]:
    """Numbers the folds so that the last are nearest to an equal size."""
    size = np.bincount(fold, minlength=count)
    order = np.argsort(-np.abs(size - len(fold) / count), kind="stable")
    return np.argsort(order)[fold]


def _balanced(
    numbers: Integer[np.ndarray, " N"],
    labels: Sequence | None,
    count: int,
    seed: int,
) -> Integer[np.ndarray, " N"]:
    """Returns folds by scikit-learn; with `labels` they are stratified if possible."""
    from sklearn import model_selection

    # Unshuffled groups give folds of equal size.
    by_size = model_selection.GroupKFold(
        count, shuffle=seed > 0, random_state=seed or None
    )
    stratified = model_selection.StratifiedGroupKFold(
        count, shuffle=True, random_state=seed
    )
    targets = np.zeros(len(numbers), int) if labels is None else np.asarray(labels)
    only_size = (
        labels is None or seed % 2
    )  # Other folds, if few groups allow only these.
    for kind in (by_size,) if only_size else (stratified, by_size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Classes with few images.
            try:
                parts = [part for _, part in kind.split(targets, targets, numbers)]
            except ValueError:  # Every class has fewer images than there are folds.
                continue
        if all(map(len, parts)):
            break
    fold = np.empty(len(numbers), np.int64)
    for number, part in enumerate(parts):
        fold[part] = number
    return fold


def parts_of(
    records: Mapping[str, tuple[Sequence[str], Sequence | None]], key: str
) -> PartsOf:
    """Returns the function with which `splits.select` resolves "grouped_splits".

    Args:
      records: split -> groups and labels of its records, as for `folds`.
      key: name of `group_key` for messages.
    """
    known: dict = {}

    def parts(name: str, count: int) -> Integer[np.ndarray, " N"]:
        if (name, count) not in known:
            # Classes that cannot be divided are in the first part.
            known[name, count] = folds(*records[name], count, key).clip(0)
        return known[name, count]

    return parts


def of_files(group_key: str, files: Sequence[tuple], root: object) -> dict[str, str]:
    """Returns the group of each file by a rule; `files` are (path, label, bytes)."""
    paths = [path for path, _, _ in files]
    return dict(zip(paths, of_paths(group_key, paths, root), strict=True))


def of_splits(
    files: Mapping[str, Sequence[tuple]], group_of: Mapping[str, str], group_key: str
) -> PartsOf:
    """Returns `parts_of` for the files of splits, (path, label, bytes) each."""
    records = {}
    for name, rows in files.items():
        labels = [label for _, label, _ in rows]
        known = labels if labels and labels[0] is not None else None
        records[name] = [group_of[path] for path, _, _ in rows], known
    return parts_of(records, f"data.group_key={group_key!r}")

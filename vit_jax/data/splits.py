"""Split expressions for every source: "train", "train[:90%]", "train[800:1000]+val".

The syntax and its rounding are those of TFDS (https://www.tensorflow.org/datasets/
splits), so that a recipe can move between TFDS and a folder unchanged.
`tfds.even_splits(split, n)[i]` is written "even_splits(train, 3)[1]".
"interleaved_splits(train, 5)[4]", which TFDS does not have, is every fifth record from
the fifth on: a part with all classes, even if records are sorted by class.
"grouped_splits(all, 5)[4]" is the last of five parts that keep the images of a group
together (`data.group_key`, see groups.py), with about the same share of each class.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.errors import NoSplit, UserError

# Usual names of splits, in upper or lower case; the first that exists is used.
TRAIN = ("train", "training", "trn")
VALIDATION = ("val", "valid", "validation", "dev")
TEST = ("test", "testing", "eval")
HELD_OUT, MOST_HELD_OUT = 0.2, 10_000  # Training images held out for validation.
_SEED = 0
_PARTS = re.compile(
    r"(?P<kind>even|interleaved|grouped)_splits\((?P<of>.+),\s*(?P<n>\d+)\s*\)\[(?P<i>\d+)\]"
)


@dataclasses.dataclass(frozen=True)
class Numbering:
    """Numbers of the records of a source in the splits of its data set.

    They are part of the permanent names of records, "<split>/<number in the whole
    split>".

    Attributes:
      sizes: split name -> number of records of the whole split.
      parts: (split name, record numbers) in the order of the source, output of
        `select`.
    """

    sizes: Mapping[str, int]
    parts: Sequence[tuple[str, Sequence[int]]]

    @classmethod
    def of(
        cls,
        split: str,
        sizes: Mapping[str, int],
        source: str,
        parts_of: Callable | None = None,
    ) -> "Numbering":
        """Resolves a split expression, with the arguments and errors of `select`."""
        return cls(dict(sizes), tuple(select(split, sizes, source, parts_of)))

    def __len__(self) -> int:
        return sum(len(numbers) for _, numbers in self.parts)

    def record_id(self, i: int) -> str:
        """Returns the name of record i of the source, such as "train/17"."""
        for name, numbers in self.parts:
            if i < len(numbers):
                return f"{name}/{numbers[i]}"
            i -= len(numbers)
        raise IndexError(i)

    def locate(self, record_ids: Sequence[str]) -> Integer[np.ndarray, " N"]:
        """Returns the positions of the named records that are in this source.

        Raises:
          KeyError: the data set has no record of that name.
        """
        positions = []
        for record_id in record_ids:
            split, _, number = record_id.rpartition("/")
            # Only one spelling is valid: "train/017" may be a mistake.
            valid = re.fullmatch("0|[1-9][0-9]*", number)
            if not valid or int(number) >= self.sizes.get(split, 0):
                raise KeyError(record_id)
            start = 0
            for name, numbers in self.parts:
                if name == split and int(number) in numbers:
                    positions.append(start + numbers.index(int(number)))
                start += len(numbers)
        return np.array(positions, np.int64)


def first_of(usual: Sequence[str], names: Sequence[str] | Mapping) -> str:
    """Returns the first usual name among some names, in their spelling; or ""."""
    spelling = {name.lower(): name for name in names}
    return next((spelling[name] for name in usual if name in spelling), "")


def held_out(groups: Sequence[str], share: float = HELD_OUT) -> np.ndarray:
    """Returns a mask of images to hold out: a part of each group, with a fixed seed.

    If a group has two or more images, at least one is held out and one stays. At most
    10,000 images are held out in all, apart from such single ones.

    Args:
      groups: group of each image.
      share: fraction of a group that is held out.
    """
    share = min(share, MOST_HELD_OUT / len(groups))
    mask = np.zeros(len(groups), bool)
    for members in _shuffled(groups):
        count = max(round(share * len(members)), int(len(members) > 1))
        mask[members[:count]] = True
    return mask


def folds(groups: Sequence[str], count: int) -> np.ndarray:
    """Returns the fold of each image; each fold has the same part of each group.

    If a group has only one image, its fold is -1, so that it is always trained on.
    """
    fold = np.full(len(groups), -1)
    dealt = 0
    for members in _shuffled(groups):
        if len(members) > 1:  # Dealing continues where the previous group ended.
            fold[members] = (dealt + np.arange(len(members))) % count
            dealt += len(members)
    return fold


def _shuffled(groups: Sequence[str]) -> Iterator[np.ndarray]:
    """Yields the images of each group in random order, with a fixed seed."""
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    rng = np.random.default_rng(_SEED)
    for group in sorted(members):
        yield rng.permutation(np.array(members[group]))


def names(split: str) -> list[str]:
    """Returns the split names in an expression: train and val for "train[:9%]+val"."""
    result = []
    for term in _terms(split):
        parts = _PARTS.fullmatch(term)
        result += names(parts["of"]) if parts else [term.split("[")[0]]
    return result


def select(
    split: str,
    sizes: Mapping[str, int],
    source: str,
    parts_of: Callable[[str, int], np.ndarray] | None = None,
) -> list[tuple[str, Sequence[int]]]:
    """Resolves a split expression to (split name, record numbers) per term.

    Args:
      split: split expression.
      sizes: split name -> number of records.
      source: name of the data set, for messages.
      parts_of: function from a split and a number of parts to the part of each record,
        for "grouped_splits"; None if the records have no groups.

    Raises:
      NoSplit: a split is unknown.
      UserError: a slice is malformed, no record is selected, or groups are unknown.
    """
    for name in names(split):
        if name not in sizes:
            raise NoSplit(
                f"split {split!r}: {source} has no split {name!r}; "
                f"it has {', '.join(sorted(sizes)) or 'none'}"
            )
    terms = _terms(split)
    parts = [part for term in terms for part in _resolve(term, sizes, parts_of)]
    if not sum(len(numbers) for _, numbers in parts):
        raise UserError(
            f"split {split!r} of {source} selects no record of {dict(sizes)}"
        )
    return parts


def _terms(split: str) -> list[str]:
    """Cuts a sum at the plus signs outside of parentheses."""
    terms, depth = [""], 0
    for letter in split:
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            terms.append("")
        else:
            terms[-1] += letter
    return [term.strip() for term in terms]


def _resolve(
    term: str, sizes: Mapping[str, int], parts_of: Callable | None
) -> list[tuple[str, Sequence[int]]]:
    parts = _PARTS.fullmatch(term)
    if parts:
        n, i = int(parts["n"]), int(parts["i"])
        if i >= n:
            raise UserError(f"split {term!r}: {n} parts are numbered 0 to {n - 1}")
        if parts["kind"] == "grouped":
            return [(parts["of"], _grouped(term, parts["of"], n, i, sizes, parts_of))]
        terms = _terms(parts["of"])
        inner = [part for t in terms for part in _resolve(t, sizes, parts_of)]
        if parts["kind"] == "interleaved":
            return [(name, numbers[i::n]) for name, numbers in inner]
        return [(name, _even(numbers, n, i)) for name, numbers in inner]
    name = term.split("[")[0]
    # Only slices need TFDS, whose import takes half a second.
    bounds = (0, sizes[name]) if term == name else _bounds(term, name, sizes[name])
    return [(name, range(*bounds))]


def _grouped(
    term: str,
    name: str,
    n: int,
    i: int,
    sizes: Mapping[str, int],
    parts_of: Callable | None,
) -> list[int]:
    """Returns the records in the i-th of n parts that keep groups together."""
    if name not in sizes:
        raise UserError(
            f"split {term!r}: give the name of a split, such as grouped_splits(train, 5)[4]"
        )
    if parts_of is None:
        raise UserError(
            f"split {term!r}: the groups of the images are unknown: set data.group_key, "
            "for image files, a table or Parquet files"
        )
    return np.flatnonzero(parts_of(name, n) == i).tolist()


def _even(numbers: range, n: int, i: int) -> range:
    """Returns the i-th of n successive parts; the first ones may be longer by one."""
    size, longer = divmod(len(numbers), n)
    start = i * size + min(i, longer)
    return numbers[start : start + size + (i < longer)]


def _bounds(part: str, name: str, size: int) -> tuple[int, int]:
    import tensorflow_datasets as tfds

    # The split gets another name, since "all" is reserved in TFDS.
    info = tfds.core.SplitInfo(name="split", shard_lengths=[size], num_bytes=0)
    try:
        instruction = tfds.core.ReadInstruction.from_spec(f"split{part[len(name) :]}")
        (absolute,) = instruction.to_absolute({"split": info})
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"split {part!r} with {size} records: {str(error).splitlines()[0]}; "
            "write for example train[:90%], train[800:1000] or even_splits(train, 3)[1]"
        ) from error
    return absolute.from_ or 0, size if absolute.to is None else absolute.to

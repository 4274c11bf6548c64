"""Split expressions for every source: "train", "train[:90%]", "train[800:1000]+val".

The syntax and its rounding are those of TFDS (https://www.tensorflow.org/datasets/
splits), so that a recipe can move between TFDS and a folder unchanged.
"""

import re
from collections.abc import Mapping

from vit_jax.errors import UserError


def names(split: str) -> list[str]:
    """Returns the split names in an expression: "train[:9%]+val" has train and val."""
    return [re.split(r"\[", part.strip())[0] for part in split.split("+")]


def select(
    split: str, sizes: Mapping[str, int], source: str
) -> list[tuple[str, range]]:
    """Resolves a split expression to ranges of record numbers.

    Args:
      split: the expression.
      sizes: split name -> number of records.
      source: name of the data set, for messages.

    Returns:
      One (split name, record numbers) for each part of the sum, in its order.

    Raises:
      UserError: an unknown split, a bad slice, or no record selected.
    """
    for name in names(split):
        if name not in sizes:
            raise UserError(
                f"split {split!r}: {source} has no split {name!r}; "
                f"it has {', '.join(sorted(sizes)) or 'none'}"
            )
    parts = []
    for part in split.split("+"):
        name, size = names(part)[0], sizes[names(part)[0]]
        start, stop = 0, size
        # The import takes half a second, so a plain name goes without it.
        if part.strip() != name:
            start, stop = _bounds(part.strip(), name, size)
        parts.append((name, range(start, stop)))
    if not sum(len(numbers) for _, numbers in parts):
        raise UserError(
            f"split {split!r} of {source} selects no record of {dict(sizes)}"
        )
    return parts


def _bounds(part: str, name: str, size: int) -> tuple[int, int]:
    import tensorflow_datasets as tfds

    info = tfds.core.SplitInfo(name=name, shard_lengths=[size], num_bytes=0)
    try:
        instruction = tfds.core.ReadInstruction.from_spec(part)
        (absolute,) = instruction.to_absolute({name: info})
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"split {part!r} with {size} records: {str(error).splitlines()[0]}; "
            "write as train[:90%] or train[800:1000]"
        ) from error
    return absolute.from_ or 0, size if absolute.to is None else absolute.to

"""Which split of a data set an evaluation reads, also where none is stated."""

import dataclasses
import os
from collections.abc import Sequence

from vit_jax.data import catalogue, sources
from vit_jax.data.config import DataConfig
from vit_jax.data.folder import WHOLE, is_split
from vit_jax.data.splits import names as split_names
from vit_jax.errors import NoSplit

# What is read where no split is stated, the first that is there. Training's own
# evaluations leave the test split alone where there is another.
TESTS = ("test", "val", "validation")
VALIDATIONS = ("val", "validation", "test")


def open_first(
    name: str,
    data: DataConfig,
    split: str,
    order: Sequence[str] = TESTS,
    *,
    of_model: bool,
) -> tuple[sources.Source, str, DataConfig]:
    """Opens a split, or without one the first of `order` that is there.

    Args:
      name: of the evaluation, for messages.
      data: `config.data`.
      split: expression, or "".
      order: `TESTS` or `VALIDATIONS`.
      of_model: whether the labels are classes of the model, of which nothing is learnt.

    Returns:
      The source, the expression of what was opened, and `data`, the `split` of a folder
      being one that it has.

    Raises:
      NoSplit: it is not there.
    """
    splits = [split] if split else _unstated(data.name, order)
    if data.name == "folder":
        splits, data = _in_folder(
            name, data, splits, stated=bool(split), of_model=of_model
        )
    first = None
    for one in splits:
        try:
            return sources.open_unchecked(data, one), one, data
        except NoSplit as error:
            first = first or error
    raise first


def first_in_folder(data_dir: str, order: Sequence[str] = TESTS) -> str:
    """Returns the first split of `order` that a folder has, or ""."""
    root = os.path.expanduser(data_dir)
    return next((name for name in order if is_split(root, name)), "")


def _unstated(name: str, order: Sequence[str]) -> Sequence[str]:
    """Returns the splits that an evaluation may read, the likeliest first."""
    entry = catalogue.ENTRIES.get(name.partition(":")[0])
    return (entry.splits["test"],) if entry and "test" in entry.splits else order


def _in_folder(
    name: str, data: DataConfig, splits: Sequence[str], *, stated: bool, of_model: bool
) -> tuple[Sequence[str], DataConfig]:
    """Returns those of some splits that a folder has, the classes of one set aright."""
    root = os.path.expanduser(data.data_dir)

    def there(split):
        first = split_names(split)[0]
        return first == WHOLE or os.path.isdir(os.path.join(root, first))

    if stated:
        found = list(filter(there, splits))
    else:
        found = list(filter(None, [first_in_folder(root, splits)]))
    # A folder of class folders, of which nothing is learnt, is read as a whole.
    if not found and of_model and not stated and not there(data.split):
        found = [WHOLE]
    if not found and os.path.isdir(root):
        how = f"split=, as {WHOLE}"
        if not of_model:
            how = f"train= and test=, as {WHOLE}[:50%] and {WHOLE}[50%:]"
        lacking = " or ".join(map(repr, splits))
        if not stated:
            lacking += " of class folders with images"
        raise NoSplit(
            f"evals.{name}: {data.data_dir} has no folder {lacking}: add it, or state "
            f"{how} if its folders are the classes"
        )
    found = found or list(splits)
    if not there(data.split):  # Of which the class folders count.
        data = dataclasses.replace(data, split=found[0])
    return found, data

"""What no run of a fine-tuning study could do, refused before anything is written."""

import os
import pathlib
from collections.abc import Mapping

from vit_jax.data import own, sources, splits
from vit_jax.errors import UserError
from vit_jax.parallel import mesh as meshes
from vit_jax.studies.fine_tuning import Task
from vit_jax.training import program as programs


def check(task: Task) -> None:
    """Refuses a task that could not be brought to its end.

    Of the data it opens what is trained on, most often one record of it; of the test
    split nothing, for its name is enough.

    Raises:
      UserError: there is no such test split, or a length or the network does not fit.
    """
    config, recipe = task.config, task.recipe
    sizes = _sizes(task)
    if recipe.dataset == "folder":
        _check_folders(recipe.test, recipe.data_dir)
    elif sizes:
        try:
            splits.select(recipe.test, sizes, recipe.title)
        except UserError as error:
            raise UserError(f"--test={recipe.test}: {error}") from error
    # Of no meaning where no length is in epochs.
    lengths = {config.batch_size}
    stated = [v for key, v in config.optim.items() if key.endswith("_epochs")]
    if config.epochs or any(stated):
        parts = (recipe.train, recipe.part)[: len(task.rates)]  # One rate, no trial.
        lengths = {_length(task, split, sizes) for split in parts}
    final, mesh = task.final(task.rates[0], 0), meshes.create(config.mesh.to_dict())
    for examples in sorted(lengths):
        programs.build(final, mesh, examples)


def _sizes(task: Task) -> Mapping[str, int]:
    """Returns split name to number of records, {} where the set does not tell."""
    recipe, name = task.recipe, task.recipe.dataset
    # Tasks of VTAB-1k have roles, not splits; a user's own function may do anything.
    if name == "folder" or name.startswith("vtab/") or own.is_own(name):
        return {}
    # The sizes are those of all splits, however little is opened.
    first = f"{splits.names(recipe.train)[0]}[:1]"
    source = sources.open_unchecked(task.config.data, first)
    numbering = getattr(source, "numbering", None)
    return {} if numbering is None else numbering.sizes


def _length(task: Task, split: str, sizes: Mapping[str, int]) -> int:
    if sizes:
        parts = splits.select(split, sizes, task.recipe.title)
        return sum(len(numbers) for _, numbers in parts)
    return len(sources.open_unchecked(task.config.data, split))


def _check_folders(test: str, data_dir: str) -> None:
    root = pathlib.Path(data_dir).expanduser()
    there = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    for name in splits.names(test):
        if name not in there:
            raise UserError(
                f"--test={test}: {data_dir} has no folder {name!r}; it has "
                f"{', '.join(there) or 'none'}"
            )

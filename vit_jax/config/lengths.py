"""The length of a run, and lengths within it: steps, epochs or a fraction of the run."""

from typing import NamedTuple

from vit_jax.config import fields
from vit_jax.errors import UserError


class RunLength(NamedTuple):
    """The length of a run.

    Attributes:
      total_steps: optimiser steps.
      steps_per_epoch: number of training examples divided by the batch size.
      key: config key of the length, for messages.
    """

    total_steps: int
    steps_per_epoch: float
    key: str = "total_steps"


def length_in_steps(section: object, name: str, run: RunLength) -> int:
    """Returns a length in steps that a section sets in steps, epochs or as a fraction.

    Args:
      section: section with some of the keys `{name}_steps`, `{name}_epochs` and
        `{name}_fraction`.
      name: name of the length, such as "warmup".
      run: length of the run.

    Raises:
      UserError: more than one of these keys is set.
    """
    units = dict(zip(_units(name), (1, run.steps_per_epoch, run.total_steps)))
    given = {unit: getattr(section, unit, 0) for unit in units}
    given = {unit: value for unit, value in given.items() if value}
    if len(given) > 1:
        both = " and ".join(f"{unit}={value}" for unit, value in given.items())
        raise UserError(f"{both}: keep one of them, set the others to 0")
    return sum(max(1, round(value * units[unit])) for unit, value in given.items())


def alternatives(name: str) -> set[str]:
    """Returns the keys of a section that cannot be set together with this one."""
    for pair in ({"total_steps", "epochs"}, {"learning_rate", "base_learning_rate"}):
        if name in pair:
            return pair - {name}
    length = name.rpartition("_")[0]
    units = {*_units(length)}
    # Intervals in both units count both.
    return units - {name} if name in units and not length.endswith("every") else set()


def length_key(section: object, name: str) -> str | None:
    """Returns the key that sets a length, or None if none does."""
    return next((unit for unit in _units(name) if getattr(section, unit, 0)), None)


def depends_on_epochs(section: object) -> bool:
    """Returns whether a length in a section of a config is set in epochs."""
    values = fields.flatten(fields.to_dict(section)).items()
    in_epochs = (value for name, value in values if name.endswith("_epochs"))
    return any(value not in (0, (), (0,)) for value in in_epochs)


def _units(name: str) -> tuple[str, str, str]:
    return f"{name}_steps", f"{name}_epochs", f"{name}_fraction"

"""What to do about parameters that a checkpoint lacks or has too many of."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError


class Row(NamedTuple):
    """What was done to a parameter or to a group of them.

    Attributes:
      what: its name.
      action: in words.
      before: shape in the checkpoint, if it is there.
      after: shape in the model, if it is there.
    """

    what: str
    action: str
    before: tuple[int, ...] | None = None
    after: tuple[int, ...] | None = None


def settle(
    given: dict[str, np.ndarray],
    wanted: Mapping,
    init_allow: Sequence[str] | None,
    *,
    new: Sequence[str] = (),
) -> tuple[list[str], list[Row]]:
    """Decides about what is missing, and takes out what is left over.

    Args:
      given: name to array; left-over parameters are removed from it.
      wanted: name to array or shape, of the model.
      init_allow: regular expressions: what may be missing or left over; None where a
        command has no such flag.
      new: names that are missing on purpose.

    Returns:
      The names that stay as the model initialises them, and a row for each exception.

    Raises:
      UserError: parameters that are missing, left over or of another shape, or a
        pattern that matches none.
    """
    missing = sorted(wanted.keys() - given.keys())
    extra = sorted(given.keys() - wanted.keys())
    allowed = _allowed([*missing, *extra], init_allow or ())
    allowed |= set(new)
    wrong = [
        f"{name} is {given[name].shape} in the checkpoint but "
        f"{wanted[name].shape} in the model"
        for name in sorted(given.keys() & wanted.keys())
        if given[name].shape != wanted[name].shape
    ]
    # A part of the network that lost some of its parameters computes something else, so
    # only whole parts may be missing or left over.
    theirs, ours = ({n.split("/")[0] for n in names} for names in (given, wanted))
    inside = any(
        name.split("/")[0] in parts
        for names, parts in ((extra, ours), (missing, theirs))
        for name in names
        if name not in allowed
    )
    strict = bool(wrong) or inside or init_allow is None
    wrong += [f"{name} is missing" for name in missing if name not in allowed]
    wrong += [f"{name} is left over" for name in extra if name not in allowed]
    if wrong:
        shown = "; ".join(wrong[:4])
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        remedy = "" if strict else "; what may be so, name in config.init_allow"
        raise UserError(f"the checkpoint does not fit the model: {shown}{more}{remedy}")
    rows = [
        Row(
            name,
            f"{'new' if name in new else 'missing'}: as initialised",
            after=wanted[name].shape,
        )
        for name in missing
    ]
    rows += [Row(n, "left over: not used", given.pop(n).shape) for n in extra]
    return missing, rows


def _allowed(names: list[str], patterns: Sequence[str]) -> set[str]:
    """Returns the names that a pattern matches; each must match one."""
    allowed = set()
    for pattern in patterns:
        try:
            matched = set(filter(re.compile(pattern).search, names))
        except re.error as error:
            raise UserError(
                f"init_allow {pattern!r} is not a regular expression: {error}"
            ) from error
        if not matched:
            raise UserError(
                f"init_allow {pattern!r} matches no parameter that is missing or left "
                f"over ({', '.join(names[:4]) or 'there is none'}): take it out"
            )
        allowed |= matched
    return allowed

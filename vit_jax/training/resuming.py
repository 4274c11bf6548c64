"""Which checkpoint a start goes on from: the newest that is intact."""

import os
import sys
from typing import NamedTuple

import jax
from etils import epath

from vit_jax.errors import UserError
from vit_jax.parallel import distributed
from vit_jax.training.state import TrainState
from vit_jax.weights import intact
from vit_jax.weights import workdir as layout


class Restored(NamedTuple):
    """What a start goes on from.

    Attributes:
      state: on the devices; None if there is nothing to go on from.
      step: optimiser steps taken.
      seconds: trained before.
      device_seconds: the same, each start's times its devices.
      notes: lines for the log.
    """

    state: TrainState | None
    step: int
    seconds: float
    device_seconds: float
    notes: list[str]


def newest_intact(workdir: str | os.PathLike) -> tuple[int, list[str]]:
    """Looks for the checkpoint to go on from, and puts damaged ones aside.

    All processes call it. Each reads its share of the files.

    Args:
      workdir: of a run with at least one finished checkpoint.

    Returns:
      Its step, and notes on what is unusual about it.

    Raises:
      UserError: none is intact; then all stay where they are.
    """
    me, everyone = jax.process_index(), jax.process_count()
    damaged, notes = [], []
    for step in reversed(layout.steps(workdir)):
        path = layout.path_of(workdir, step)
        found = intact.damage(path, me, everyone)
        if found:
            say(f"error: the checkpoint {path} is damaged: {'; '.join(found)}")
        if not distributed.gather(found=len(found))["found"].any():
            break
        damaged.append(step)
    else:
        raise UserError(
            f"no checkpoint under {path.parent} is intact (damaged: step "
            f"{', '.join(map(str, damaged))}): move that folder away to begin anew"
        )
    if not intact.has_sums(path):
        notes.append(f"{path} is of an older version, without checksums: not verified")
    for bad in damaged:
        if me == 0:
            aside = _put_aside(layout.path_of(workdir, bad))
            say(f"error: going on from step {step}; the damaged one is kept as {aside}")
        notes.append(f"the checkpoint of step {bad} is damaged")
    return step, notes


def say(text: str) -> None:
    """Prints a line that must be seen, at once."""
    print(text, file=sys.stderr, flush=True)


def _put_aside(path: epath.Path) -> epath.Path:
    names = (
        f"{path.name}.damaged",
        *(f"{path.name}.damaged-{i}" for i in range(2, 99)),
    )
    return path.rename(
        next(p for p in (path.parent / name for name in names) if not p.exists())
    )

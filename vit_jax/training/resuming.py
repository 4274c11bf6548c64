"""Which checkpoint a start goes on from: the newest that is intact."""

import os
import sys
from typing import NamedTuple

import jax

from vit_jax.data import fingerprint
from vit_jax.data.sources import Source
from vit_jax.errors import UserError
from vit_jax.parallel import distributed
from vit_jax.printing import printable
from vit_jax.training import leftovers
from vit_jax.training.state import TrainState
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
        found = layout.find_damage(path, me, everyone)
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
    if not layout.has_checksums(path):
        notes.append(f"{path} is of an older version, without checksums: not verified")
    for bad in damaged:
        if me == 0:
            aside = leftovers.put_aside(layout.path_of(workdir, bad), "damaged")
            say(f"error: going on from step {step}; the damaged one is kept as {aside}")
        notes.append(f"the checkpoint of step {bad} is damaged")
    return step, notes


def check_data(
    stored: dict,
    about: dict,
    source: Source,
    workdir: str | os.PathLike,
    *,
    check: bool,
) -> list[str]:
    """Refuses data that are not those that a run was trained on.

    Args:
      stored: what went with its checkpoint: "data", a fingerprint, which old ones lack.
      about: what goes with those of this start.
      source: training split of this start.
      workdir: of the run.
      check: `config.data.check`.

    Returns:
      Notes: what differs if that is allowed, and what could not be compared.

    Raises:
      UserError: the data differ.
    """
    notes = []
    if "data" in stored:
        found = []
        if stored["data"] != about["data"]:  # Else no second look at all names.
            found = fingerprint.differences(stored["data"], source)
    else:
        found = [
            f"{what} were {stored[key]}, now {about[key]}"
            for key, what in (("examples", "images"), ("class_names", "classes"))
            if stored[key] != about[key]
        ]
        notes.append(
            f"{workdir} is of an older version, without a fingerprint of its data: only "
            "the numbers of images and classes are compared"
        )
    if not found:
        return notes
    changed = f"the training split has changed since {workdir} was begun"
    if check:
        raise UserError(
            f"{changed}: {'; '.join(found)}; restore the data, or go on with them as "
            "they are: --config.data.check=False"
        )
    return [*notes, f"{changed} (data.check=False): {'; '.join(found)}"]


def say(text: str) -> None:
    """Prints a line that must be seen, at once."""
    print(printable(text), file=sys.stderr, flush=True)

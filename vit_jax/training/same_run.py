"""What a workdir must be for a run to begin or go on in it."""

import os

from ml_collections import ConfigDict

from vit_jax import config as configuration
from vit_jax.errors import UserError
from vit_jax.weights import workdir as layout

# What may differ between the parts of one run: it does not touch the result.
_MAY_CHANGE = (
    "every.",
    "keep.",
    "mesh.",
    "sharding.",
    "evals.",
    "optim.accumulate",
    "model.scan",
    "model.remat",
    "model.attention",
    "debug_nans",
    "profile",
    "slow_step",
    "stall_timeout",
    "compilation_cache",
    "local.",
    "init:",
    "data.data_dir",
    "data.check",
    "data.workers",
    "data.threads",
    "data.prefetch",
)


def check_workdir(workdir: str | os.PathLike, config: ConfigDict) -> None:
    """Refuses a workdir that holds a run of another config.

    Raises:
      UserError: with the keys that differ.
    """
    if not layout.has_checkpoint(workdir):
        return
    stored = _completed(layout.read_config(workdir))
    if changed := _decisive(stored, configuration.to_json(config)):
        raise UserError(
            f"{workdir} holds a run of another config ({'; '.join(changed[:6])}): "
            "choose another --workdir, or state the same config"
        )


def decisive(config: ConfigDict) -> list[str]:
    """Returns the keys and values of a config that decide what a run gives."""
    return _decisive({}, configuration.to_json(config))


def _decisive(one: dict, other: dict) -> list[str]:
    lines = configuration.differences(one, other)
    return [line for line in lines if not line.startswith(_MAY_CHANGE)]


def _completed(stored: dict) -> dict:
    """Adds the keys that came after a run was begun, with what it did without them."""
    try:
        return configuration.to_json(configuration.complete(stored))
    except UserError:  # A key has gone since then.
        return stored

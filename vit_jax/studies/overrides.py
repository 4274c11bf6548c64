"""What a user sets of a fine-tuning run by --config.key=value."""

import copy
from collections.abc import Mapping

from vit_jax import config as configuration
from vit_jax.errors import UserError
from vit_jax.schema import COMMON

# Keys that have a flag, or follow from one.
_FLAGS = {
    "init": "--model",
    "seed": "--seeds",
    "optim.rate": "--rates",
    "optim.rate_per_256": "--rates",
    "optim.layer_decay": "--layer_decay",
    "data.name": "--dataset",
    "data.data_dir": "--data_dir",
    "data.image_size": "--resolution",
}
_PARTS = ("data.split", "data.exclude", "data.examples", "evals")


def refuse(overrides: Mapping[str, object]) -> None:
    """Raises UserError if a key is a flag's, or the recipe's, to state."""
    for key in overrides:
        if key in _FLAGS:
            raise UserError(f"--config.{key}: it is set by {_FLAGS[key]} here")
        if key.startswith(_PARTS):
            raise UserError(
                f"--config.{key}: the recipe says what is trained and scored on; state "
                "--dataset and --test"
            )
        if key and key in COMMON:
            raise UserError(f"--config.{key}: it is a section; set a key of it")


def apply(raw: dict, overrides: Mapping[str, object]) -> None:
    """Puts overrides into a raw config, and takes out what they leave unread.

    Args:
      raw: it may lack the number of classes, which is then 0.
      overrides: dotted config key to value.

    Raises:
      UserError: there is no such key, or a value does not fit it.
    """
    for key, value in overrides.items():
        section, _, leaf = key.rpartition(".")
        if section in COMMON:
            (raw.setdefault(section, {}) if section else raw)[leaf] = value
        else:
            raw[key] = value  # Which is no key, as the check below says.
    if raw.get("epochs") and "total_steps" not in overrides:
        raw["total_steps"] = 0
    if raw["optim"]["name"] != "sgd" and "optim.momentum" not in overrides:
        del raw["optim"]["momentum"]
    tried = copy.deepcopy(raw)
    tried["data"]["classes"] = raw["data"]["classes"] or 1
    configuration.complete(tried)

"""Bounds on the numbers of a config."""

import math
import numbers

from ml_collections import ConfigDict

from vit_jax.errors import UserError

# Numbers are finite and not negative; these have other bounds.
_ANY_SIGN = ("mesh.data", "mesh.fsdp", "mesh.model", "model.head_bias")
_AT_LEAST_1 = (
    "batch_size",
    "data.classes",
    "data.image_size",
    "every.checkpoint",
    "every.log",
    "keep.last",
    "mesh.dcn_data",
    "mesh.dcn_fsdp",
    "optim.accumulate",
    "optim.timescale",
)
# Steps are counted in 32 bits, and sides of arrays should be: no run comes near.
_BELOW_2_31 = (
    "data.classes",
    "model.depth",
    "model.heads",
    "model.mlp_dim",
    "model.stem_width",
    "model.width",
    "stall_timeout",
    "total_steps",
)
_AT_MOST = {
    "data.prefetch": 1_000_000,
    "data.threads": 1_024,
    "data.workers": 1_024,
    "optim.layer_decay": 1,
}
# Of an image: larger ones are neither decoded nor made.
MAX_PIXELS = 100_000_000
_BELOW_1 = (
    "average.decay",
    "loss.label_smoothing",
    "model.dropout",
    "model.stochastic_depth",
    "optim.b1",
    "optim.b2",
    "optim.momentum",
)


def check(config: ConfigDict, flat: dict[str, object]) -> None:
    """Refuses values that no run could use.

    Args:
      config: complete config.
      flat: the same, dotted key to value.

    Raises:
      UserError: naming the key, the value and the bound.
    """
    for name, value in flat.items():
        for number in value if isinstance(value, tuple) else (value,):
            if not is_number(number, numbers.Real):
                continue
            least = 1 if name in _AT_LEAST_1 else 0
            if not math.isfinite(number):
                raise UserError(f"{name}={value} must be finite")
            if name not in _ANY_SIGN and number < least:
                raise UserError(f"{name}={value} must be at least {least}")
            if number > _AT_MOST.get(name, math.inf):
                raise UserError(f"{name}={value} must be at most {_AT_MOST[name]}")
            if name in _BELOW_1 and number >= 1:
                raise UserError(f"{name}={value} must be below 1")
            if number >= 2**31 and (name in _BELOW_2_31 or name.endswith("epochs")):
                raise UserError(f"{name}={value} must be below 2**31")
            if isinstance(number, int) and number >= 2**63:
                raise UserError(f"{name}={value} must be below 2**63")
    data = config.data
    if config.seed >= 2**32:
        raise UserError(f"seed={config.seed} must be below 2**32")
    if data.channels not in (1, 3):
        raise UserError(f"data.channels={data.channels} must be 1 (grey) or 3 (RGB)")
    for name in ("mean", "std"):
        if len(data[name]) not in (1, data.channels):
            raise UserError(
                f"data.{name}={data[name]} must have one number, or one for each of "
                f"data.channels={data.channels}"
            )
    if not all(data.std):
        raise UserError(
            f"data.std={data.std} must not hold 0: images are divided by it"
        )
    if bool(config.optim.rate) == bool(config.optim.rate_per_256):
        raise UserError(
            f"config states optim.rate={config.optim.rate} and optim.rate_per_256="
            f"{config.optim.rate_per_256}: set exactly one of them"
        )
    first, last = config.profile if len(config.profile) == 2 else (1, 0)
    if config.profile and (first > last or (first == 0) != (last == 0)):
        raise UserError(
            f"profile={config.profile} is not (first step, last step), as (10, 15)"
        )
    if config.local.every and not config.local.folder:
        raise UserError(
            f"local.every={config.local.every} needs local.folder: a folder on each "
            "host's own disk"
        )
    if len(config.data.image_size) != 2:
        raise UserError(
            f"data.image_size={config.data.image_size} is not (height, width)"
        )
    if math.prod(config.data.image_size) > MAX_PIXELS:
        raise UserError(
            f"data.image_size={config.data.image_size}: more than {MAX_PIXELS:,} "
            "pixels; images of so many are not read either"
        )


def is_number(value: object, kind: type) -> bool:
    """Tells whether a value is a number of a kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def fit(name: str, value: object, default: object) -> object:
    """Returns a value as the type that a key takes, where it is nearly that.

    Args:
      name: of the key, for messages.
      value: as given.
      default: of that type.

    Raises:
      UserError: it is of another type.
    """
    if isinstance(default, tuple) and isinstance(value, (list, tuple)):
        one = default[0] if default else ""
        return tuple(fit(f"{name}[{i}]", item, one) for i, item in enumerate(value))
    if isinstance(default, tuple) and isinstance(value, str):
        return fit(name, (value,), default)
    if type(default) is float and is_number(value, numbers.Real):
        return float(value)
    if type(default) is int and is_number(value, numbers.Integral):
        return int(value)
    if type(value) is not type(default):
        raise UserError(
            f"{name}={value!r} is {type(value).__name__}, "
            f"but it takes {type(default).__name__} (as {default!r})"
        )
    return value

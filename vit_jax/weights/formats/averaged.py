"""Averaged weights (EMA, SWA) in training checkpoints that also have the raw weights.

Training scripts use many names for both. Averaged weights are recognised by having the
same array names and shapes as the raw ones, under a prefix that denotes an average.
"""

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

# Wrappers that training scripts put around a network: DistributedDataParallel,
# torch.compile, and wrappers of Lightning.
WRAPPERS = ("module.", "_orig_mod.", "model.", "net.", "network.")

_WRAPPED = re.compile(rf"({'|'.join(map(re.escape, WRAPPERS))})*")
_WORDS = re.compile(r"(?<![a-z])(ema|swa|avg|averag[a-z]*)(?![a-z])")
# Raw weights that a module of averages keeps, and averages of gradients.
_OTHERS = re.compile(r"(^|[._])(online|raw|current|optim\w*|exp_avg\w*)")
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

Array = TypeVar("Array")


def is_average(name: str) -> bool:
    """Returns whether a name denotes averaged weights."""
    name = _HUMPS.sub("_", name).lower()
    return bool(_WORDS.search(name)) and not _OTHERS.search(name)


def find(
    raw: Mapping[str, Array], others: Mapping[str, Array], also: Collection[str] = ()
) -> tuple[str, dict[str, Array]]:
    """Finds the average of a network's arrays among other arrays.

    Args:
      raw: arrays of a network by name; only their shapes are used.
      others: other arrays by name, levels joined by ".".
      also: prefixes of averages whose names do not denote one.

    Returns:
      The prefix of the average, and its arrays by their names in `raw`, perhaps without
      buffers; "" and an empty dict if there is no average.
    """
    names = {_WRAPPED.sub("", name, count=1): name for name in raw}
    averages: dict[str, dict[str, Array]] = {}
    for other, array in others.items():
        parts = other.split(".")
        for i in range(1, len(parts)):
            name = names.get(".".join(parts[i:]))
            if name and raw[name].shape == array.shape:
                prefix = _without_wrappers(parts[:i])
                if prefix in also or is_average(prefix):
                    averages.setdefault(prefix, {})[name] = array
                break
    best = max(averages, key=lambda prefix: len(averages[prefix]), default="")
    # With fewer arrays it would be an average of a part, such as the head.
    if not best or 2 * len(averages[best]) < len(raw):
        return "", {}
    return best, averages[best]


def note(prefix: str, raw: str, *, use_ema: bool) -> str:
    """Returns the note on an average, which replaces `raw` if `use_ema`."""
    if use_ema:
        return (
            f"{prefix}: averaged weights, used instead of {raw}; --no_ema reads those"
        )
    return f"{prefix}: averaged weights, left out (--no_ema)"


def _without_wrappers(parts: list[str]) -> str:
    """Returns a prefix without the wrappers at its end."""
    while len(parts) > 1 and f"{parts[-1]}." in WRAPPERS:
        parts = parts[:-1]
    return ".".join(parts)

"""Averaged weights (EMA, SWA) beside the raw ones of a training checkpoint.

Scripts save both under many names. An average is recognised by its kind: arrays of the
same names and shapes as the raw ones, under a prefix that says so.
"""

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

# Wrappers of training scripts around a network: DistributedDataParallel, torch.compile,
# and those of Lightning.
WRAPPERS = ("module.", "_orig_mod.", "model.", "net.", "network.")

_WRAPPED = re.compile(rf"({'|'.join(map(re.escape, WRAPPERS))})*")
_WORDS = re.compile(r"(?<![a-z])(ema|swa|avg|averag[a-z]*)(?![a-z])")
# The raw network that a module of averages holds beside them, and averages of gradients.
_OTHERS = re.compile(r"(^|[._])(online|raw|current|optim\w*|exp_avg\w*)")
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

Array = TypeVar("Array")


def is_average(name: str) -> bool:
    """Returns whether a name says that it is of averaged weights."""
    name = _HUMPS.sub("_", name).lower()
    return bool(_WORDS.search(name)) and not _OTHERS.search(name)


def find(
    raw: Mapping[str, Array], others: Mapping[str, Array], also: Collection[str] = ()
) -> tuple[str, dict[str, Array]]:
    """Finds the average of arrays among others.

    Args:
      raw: arrays of a network by name; they need a shape only.
      others: further arrays by name, levels joined by ".".
      also: prefixes of averages whose names do not say so.

    Returns:
      The prefix of the average, and its arrays by the names in `raw`, of which buffers may
      be missing; "" and an empty dict without an average.
    """
    names = {_WRAPPED.sub("", name, count=1): name for name in raw}
    found: dict[str, dict[str, Array]] = {}
    for other, array in others.items():
        parts = other.split(".")
        for i in range(1, len(parts)):
            name = names.get(".".join(parts[i:]))
            if name and raw[name].shape == array.shape:
                prefix = _without_wrappers(parts[:i])
                if prefix in also or is_average(prefix):
                    found.setdefault(prefix, {})[name] = array
                break
    best = max(found, key=lambda prefix: len(found[prefix]), default="")
    # Fewer would be an average of a part of the network, such as its head.
    if not best or 2 * len(found[best]) < len(raw):
        return "", {}
    return best, found[best]


def note(prefix: str, raw: str, *, use_ema: bool) -> str:
    """Returns the note on an average, which is used in place of `raw` if `use_ema`."""
    if use_ema:
        return (
            f"{prefix}: averaged weights, used in place of {raw}, which --no_ema reads"
        )
    return f"{prefix}: averaged weights, left out (--no_ema)"


def _without_wrappers(parts: list[str]) -> str:
    """Returns a prefix without the wrappers at its end."""
    while len(parts) > 1 and f"{parts[-1]}." in WRAPPERS:
        parts = parts[:-1]
    return ".".join(parts)

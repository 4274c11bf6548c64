"""Targets: the numbers that the outputs of a network stand for, in their units.

A network that predicts numbers is trained on standardised targets. Its classifier has
an output for each target; with `loss="gaussian"` also the logarithm of the variance of
each; with "ordinal" the logits of the probabilities that a target is larger than each
level but the last. Letters: B images, T targets, L outputs, K levels.
"""

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.layers import CLASSIFIERS

LOSSES = ("mse", "mae", "huber", "gaussian", "ordinal")
PREDICTS_SPREAD = ("gaussian", "ordinal")  # Losses with intervals for each image.
NORMAL_95 = 1.959964  # Standard deviations from the mean to the end of a 95 % interval.
_TAIL = 0.025

Array = Any  # (B, ...) of NumPy or JAX.


class Decoded(NamedTuple):
    """Predictions in the units of the targets.

    Attributes:
      values: (B, T), the mean; for ordinal targets the median level.
      low, high: ends of 95 % intervals, (B, T); None if they are unknown.
      sd: standard deviations, (B, T); None if they are not predicted.
      probabilities: probability of each level, (B, T, K); None unless ordinal.
    """

    values: Array
    low: Array = None
    high: Array = None
    sd: Array = None
    probabilities: Array = None


@dataclasses.dataclass(frozen=True)
class Targets:
    """The meaning of a network's outputs.

    Attributes:
      names: names of the targets.
      units: their units; "" if unknown.
      loss: one of LOSSES.
      mean, std: what was subtracted from each target, and what it was divided by.
      levels: possible values of ordinal targets, ascending; else ().
      margins: half the width of the 95 % interval of each target, from errors on
        held-out images; () if unknown.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    loss: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    levels: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()

    @classmethod
    def of_json(cls, values: Mapping) -> "Targets":
        """Returns targets from their dict, in which tuples may be lists."""
        return cls(**{k: tuple(v) if k != "loss" else v for k, v in values.items()})

    @property
    def num_outputs(self) -> int:
        """Number L of outputs of the network."""
        return num_outputs(self.loss, len(self.names), len(self.levels))

    def describe(self) -> str:
        """Returns the targets with their units, such as "age in years"."""
        pairs = zip(self.names, self.units, strict=True)
        text = ", ".join(f"{name} in {unit}" if unit else name for name, unit in pairs)
        more = {
            "gaussian": ", then the logarithms of their variances",
            "ordinal": f", logits of being above each of {len(self.levels) - 1} levels",
        }
        return text + more.get(self.loss, "")

    def decode(self, outputs: Array, xp: ModuleType = np) -> Decoded:
        """Returns the predictions that outputs stand for.

        Args:
          outputs: logits of the classifier, (B, L).
          xp: `numpy`, or `jax.numpy` inside a compiled function.
        """
        if self.loss == "ordinal":
            return self._decode_levels(outputs, xp)
        T = len(self.names)
        mean, std = (xp.asarray(v, outputs.dtype)[None] for v in (self.mean, self.std))
        values = mean + std * outputs[:, :T]
        if self.loss == "gaussian":
            sd = std * xp.exp(outputs[:, T:] / 2)
            half = NORMAL_95 * sd
            return Decoded(values, values - half, values + half, sd)
        if self.margins:
            half = xp.asarray(self.margins, outputs.dtype)[None]
            return Decoded(values, values - half, values + half)
        return Decoded(values)

    def _decode_levels(self, outputs: Array, xp: ModuleType) -> Decoded:
        above = above_levels(outputs, len(self.names), xp)
        levels = xp.asarray(self.levels, outputs.dtype)
        ends = xp.ones_like(above[..., :1])
        probabilities = xp.concatenate([ends, above], -1) - xp.concatenate(
            [above, 0 * ends], -1
        )

        def quantile(share):
            return levels[(above > 1 - share).sum(-1)]

        shape = (1,) * 2 + (-1,)
        mean = (probabilities * levels.reshape(shape)).sum(-1)
        squares = (probabilities * xp.square(levels).reshape(shape)).sum(-1)
        sd = xp.sqrt(xp.maximum(squares - xp.square(mean), 0))
        ends = quantile(_TAIL), quantile(1 - _TAIL)
        return Decoded(quantile(0.5), *ends, sd, probabilities)

    def in_units(self, params: dict) -> tuple[dict, "Targets"]:
        """Returns parameters whose outputs are in units, and their targets.

        Exported files then need no means: their mean is 0 and their std 1.

        Raises:
          UserError: the classifier has no bias.
        """
        scale, offset = self.affine()
        plain = dataclasses.replace(
            self, mean=(0.0,) * len(self.names), std=(1.0,) * len(self.names)
        )
        return map_heads(params, scale, offset), plain

    def affine(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the factor and the summand, (L,), that take outputs to units."""
        mean, std = np.asarray(self.mean), np.asarray(self.std)
        if self.loss == "ordinal":
            return np.ones(self.num_outputs), np.zeros(self.num_outputs)
        if self.loss == "gaussian":
            one = np.ones_like(std)
            return np.append(std, one), np.append(mean, 2 * np.log(std))
        return std, mean


def num_outputs(loss: str, num_targets: int, num_levels: int) -> int:
    """Returns the number of outputs of a network, see the module."""
    each = {"gaussian": 2, "ordinal": num_levels - 1}.get(loss, 1)
    return num_targets * each


def above_levels(outputs: Array, num_targets: int, xp: ModuleType) -> Array:
    """Returns the probability that a target is larger than each level, (B, T, K - 1).

    Logits that are not in descending order are lowered to the smallest one before them.
    """
    count = outputs.shape[-1] // num_targets
    logits = outputs.reshape(-1, num_targets, count)
    before = np.tri(count, dtype=bool).reshape(1, 1, count, count)
    logits = xp.where(before, logits[:, :, None], np.inf).min(-1)
    return xp.exp(-xp.logaddexp(0, -logits))


def map_heads(params: dict, scale: Array, offset: Array) -> dict:
    """Returns parameters whose classifiers' outputs are scale * outputs + offset.

    Raises:
      UserError: a classifier has no bias, which the offset needs.
    """
    mapped = dict(params)
    for name in CLASSIFIERS:
        if name not in params:
            continue
        head = params[name]
        if "bias" not in head:
            raise UserError(
                f"the network's {name!r} has no bias, which scaled outputs need: add it"
            )
        kernel, bias = head["kernel"], head["bias"]
        mapped[name] = {
            "kernel": (kernel * scale[None]).astype(kernel.dtype),
            "bias": (bias * scale + offset).astype(bias.dtype),
        }
    return mapped

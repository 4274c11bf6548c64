"""Decisions that were fitted on validation images and are stored with a model.

They are the scale of the logits, a threshold per class, and the scores of conformal
prediction sets. A workdir has them in calibration.json, a .safetensors file of this
project in its header. `vit_jax/evaluators/calibration.py` fits them. Letters: N images,
K classes.
"""

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Mapping

import numpy as np
from etils import epath
from jaxtyping import Float
from scipy import special

from vit_jax.command_line.files import read_json, replace_text
from vit_jax.errors import UserError
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.models.targets import map_heads

FILE = "calibration.json"
LEVELS = (0.8, 0.9, 0.95, 0.99)  # Coverages of sets that programs are exported with.


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Decisions of a classifier.

    Attributes:
      temperature: divisor of the logits (arXiv:1706.04599).
      bias: number that is then added to them (Platt scaling); 0 with a softmax.
      sigmoid: whether a probability is the sigmoid of a logit, instead of the softmax.
      thresholds: smallest probability of each class that is predicted, for images with
        several labels; empty if the most probable class is predicted.
      scores: conformal scores in increasing order: 1 minus the probability of the
        class, or of the least probable class of an image with several. Empty if no sets
        were calibrated.
      fitted: record of the images that the decisions were fitted on: "split", "images",
        and "chose_checkpoint", whether they also chose the checkpoint.
      measured: record of the scores before and after, on "split" and "images".
      head: checksum of the classifier that the decisions belong to, see `checksum`.
    """

    temperature: float = 1.0
    bias: float = 0.0
    sigmoid: bool = False
    thresholds: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    fitted: Mapping[str, object] = dataclasses.field(default_factory=dict)
    measured: Mapping[str, object] = dataclasses.field(default_factory=dict)
    head: int = 0

    @property
    def scales(self) -> bool:
        """Whether the logits are changed."""
        return (self.temperature, self.bias) != (1.0, 0.0)

    def scale(self, logits):
        """Returns calibrated logits, an array of the same shape and library."""
        return logits / self.temperature + self.bias if self.scales else logits

    def in_params(self, params: dict) -> dict:
        """Returns parameters of the network whose logits are calibrated."""
        if not self.scales:
            return params
        scale, bias = np.full(1, 1 / self.temperature), np.full(1, self.bias)
        return map_heads(params, scale, bias)

    def probabilities(
        self, logits: Float[np.ndarray, "*N K"]
    ) -> Float[np.ndarray, "*N K"]:
        """Returns the calibrated probabilities of the classes, in 64 bits."""
        scaled = self.scale(np.asarray(logits, np.float64))
        return special.expit(scaled) if self.sigmoid else special.softmax(scaled, -1)

    def smallest_probability(self, coverage: float) -> float:
        """Returns the smallest probability of a class in the sets of a coverage.

        With images drawn as those of `fitted`, a set has the class (or all classes) of
        an image with at least this probability: the score is the k-th smallest of n,
        with k = ceil((n + 1) coverage) (arXiv:2107.07511, section 1).

        Raises:
          UserError: scores are missing, or too few for the coverage.
        """
        if not self.scores:
            raise UserError(
                f"coverage={coverage:g}: the model has no calibrated sets: run `python -m "
                "vit_jax.evaluate --model=WORKDIR --calibrate`, and leave --out and other "
                "formats than .safetensors out"
            )
        count = len(self.scores)
        rank = math.ceil((count + 1) * coverage - 1e-9)
        if rank > count:
            raise UserError(
                f"coverage={coverage:g}: {count:,} images were calibrated on, which are "
                f"enough for at most {count / (count + 1):.4g}: lower it"
            )
        return 1.0 - self.scores[max(rank, 1) - 1]

    def to_json(self) -> dict:
        """Returns a JSON value."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, value: Mapping) -> "Calibration":
        """Returns the decisions in a JSON value; ignores keys of later versions."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value[name] for name in value.keys() & known}
        for name in ("thresholds", "scores"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)

    def describe(self) -> str:
        """Returns a line for the log of a model that has these decisions."""
        parts = []
        if self.scales:
            shift = f" and bias {self.bias:.3g}" if self.bias else ""
            parts.append(f"temperature {self.temperature:.3g}{shift}")
        if self.thresholds:
            parts.append("a threshold per class")
        if self.scores:
            parts.append("sets for --coverage")
        images, split = self.fitted.get("images", 0), self.fitted.get("split", "")
        return f"calibrated on {images:,} images of {split}: {', '.join(parts)}"


def checksum(params: Mapping) -> int:
    """Returns a checksum of the classifiers of a network."""
    heads = [params[name] for name in CLASSIFIERS if name in params]
    leaves = [np.asarray(head[key]) for head in heads for key in sorted(head)]
    return zlib.crc32(b"".join(leaf.astype("<f4").tobytes() for leaf in leaves))


def read(workdir: str | os.PathLike, params: Mapping) -> tuple[Calibration | None, str]:
    """Reads the decisions in a workdir, if they belong to a network.

    Args:
      workdir: workdir of a run.
      params: parameters of the network.

    Returns:
      The decisions, or None, and a line for the log, "" without decisions.

    Raises:
      UserError: the file is damaged.
    """
    path = epath.Path(workdir) / FILE
    if not path.exists():
        return None, ""
    try:
        found = Calibration.of_json(read_json(path))
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): remove it") from error
    if found.head != checksum(params):
        return None, f"{FILE} is not used: it belongs to other parameters of this run"
    return found, found.describe()


def write(workdir: str | os.PathLike, decisions: Calibration) -> str:
    """Writes the decisions into a workdir; returns the path of the file."""
    path = epath.Path(workdir) / FILE
    replace_text(path, json.dumps(decisions.to_json()) + "\n")
    return str(path)

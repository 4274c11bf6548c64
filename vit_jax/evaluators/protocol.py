"""The interface of an evaluator, and the table of evaluators.

Each evaluator is one file: the dataclass of its config keys, the code, and a line
`EVALUATORS["name"] = Config` that registers it when the package imports the file. Letters:
N examples, D features, K classes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Integer

from vit_jax.config.fields import key
from vit_jax.data.sources.base import known_labels
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import FEATURES, Outputs
from vit_jax.evaluators.splits import EvalConfig, EvalSplit, EvalSplits

Stop = Callable[[], bool]
SKIPPED = "skipped"  # Metric: number of damaged images that an evaluation left out.

EVALUATORS: dict[str, type[EvalConfig]] = {}  # By the value of the config key `kind`.


class RequiredOutputs(NamedTuple):
    """What an evaluator requires of a forward pass over a split.

    Attributes:
      split: to pass over.
      names: of the outputs, see `forward_passes.Outputs`.
      rows: indices of the records that it reads; all if None.
      allowed: classes among which RESTRICTED outputs choose.
      num_pictures: images of which the task's pictures are shown.
      texts: returns texts to compare the images with, which takes a text tower; with
        FEATURES they bring the outputs TEXTS and EMBEDDINGS.
    """

    split: EvalSplit
    names: frozenset[str]
    rows: np.ndarray | None = None
    allowed: tuple[int, ...] = ()
    num_pictures: int = 0
    texts: Callable[[], Sequence[str]] | None = None


class Scored(NamedTuple):
    """Scores of one set of parameters.

    Attributes:
      metrics: name to number.
      confusion: number of examples by true class (rows) and predicted class, or None.
      classes: those of its rows; all if empty.
    """

    metrics: dict[str, float]
    confusion: Integer[np.ndarray, "K K"] | None = None
    classes: tuple[int, ...] = ()


class Evaluator(Protocol):
    """One of `config.evals` with its splits open; what `open` of its config returns.

    Attributes:
      splits: those that it reads.
    """

    splits: tuple[EvalSplit, ...]

    def required_outputs(self) -> dict[str, RequiredOutputs]:
        """Returns the passes that it requires, under names that `score` gets back."""

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        """Computes metrics from the outputs; None if `stop` returned True meanwhile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig(EvalConfig):
    """Learnt on features of one split, scored on another."""

    train: str = key("", '"" is `data.split`, or "train" of another data set.')
    test: str = key("", '"" is the split that the data set is tested on.')


class FeaturesEvaluator:
    """The splits of an evaluator that learns on features of one and scores on another.

    Args:
      name: of the evaluation, for messages.
      config: its config.
      splits: opens splits of data sets.
    """

    def __init__(self, name: str, config: FeaturesConfig, splits: EvalSplits):
        self._name, self._config = name, config
        train = config.train or splits.train_split(config)
        self._train = splits.open(name, config, train, model_classes=False)
        self._test = splits.open(name, config, config.test, model_classes=False)
        if names := self._train.source.class_names:
            self._test = splits.match(name, self._test, names, len(names))
        self.splits = (self._train, self._test)
        self._check(known_labels(self._test.source))

    def required_outputs(self) -> dict[str, RequiredOutputs]:
        names = frozenset((FEATURES,))
        return {
            "train": RequiredOutputs(self._train, names, self._rows()),
            "test": RequiredOutputs(self._test, names),
        }

    def _rows(self) -> np.ndarray | None:
        """Returns the rows of the training split that are needed; all if None."""
        return None

    def _features(self, outputs: dict[str, Outputs]) -> tuple:
        """Returns features and labels of both splits, and the number of classes."""
        train, test = (
            (outputs[split].values[FEATURES], outputs[split].labels)
            for split in ("train", "test")
        )
        self._check(test[1])
        return train, test, self._train.num_classes

    def _check(self, labels: np.ndarray | None) -> None:
        if labels is None:
            return
        num_classes, worst = self._train.num_classes, labels.max(initial=0)
        if worst >= num_classes:
            raise UserError(
                f"evals.{self._name}: {self._test.title} has label {worst}, but "
                f"{self._train.title} has {num_classes} classes: take another train split"
            )

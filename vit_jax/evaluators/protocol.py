"""The interface of an evaluator.

Each evaluator is one file: the dataclass of its config keys, whose method `open` returns
forward passes and the function that scores their outputs. A line in `EVALUATORS` names it.
Letters: K classes, R rows.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import flax
import numpy as np
from clu import metrics
from jaxtyping import Float, Integer

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators import EVALUATORS
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.splits import EvalConfig, EvalSplit

Stop = Callable[[], bool]
SKIPPED = "skipped"  # Metric: number of damaged images that an evaluation left out.


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass over a split, whose outputs an evaluator scores.

    Attributes:
      split: to pass over.
      wanted: outputs to compute.
      rows: indices of the records that are read; all if None.
      num_pictures: images of which the task's pictures are shown.
      texts: returns texts to compare the images with, which takes a text tower; with
        features they bring the embeddings of both.
    """

    split: EvalSplit
    wanted: Wanted
    rows: Integer[np.ndarray, " R"] | None = None
    num_pictures: int = 0
    texts: Callable[[], Sequence[str]] | None = None


class Confusion(NamedTuple):
    """A confusion matrix.

    Attributes:
      counts: examples of each true class (rows) by predicted class (columns).
      class_names: in label order; empty gives numbers.
    """

    counts: Integer[np.ndarray, "K K"]
    class_names: tuple[str, ...] = ()

    @property
    def accuracies(self) -> Float[np.ndarray, " K"]:
        """Returns the accuracy of each class; NaN without examples."""
        examples = self.counts.sum(1)
        with np.errstate(invalid="ignore"):
            return self.counts.diagonal() / np.where(examples, examples, np.nan)

    def name(self, number: int) -> str:
        """Returns the name of a class."""
        return self.class_names[number] if self.class_names else f"class {number}"


class Scored(NamedTuple):
    """Scores of one set of parameters.

    Attributes:
      metrics: name to number; those that are fractions the config names.
      confusion: confusion matrix, of evaluators that have one.
    """

    metrics: dict[str, float]
    confusion: Confusion | None = None


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """One of `config.evals` with its splits open; what `open` of its config returns.

    Attributes:
      passes: whose outputs it scores.
      score: computes the scores from the outputs of the passes, in their order, and
        `stop`, which long computations call now and then; None if that returned True.
    """

    passes: tuple[Pass, ...]
    score: Callable[[Sequence[Outputs], Stop], Scored | None]


@flax.struct.dataclass
class Mean(metrics.Average):
    """A mean over examples, on the host and in float64, as no device has it.

    The values of all examples are summed at once, so that neither the mesh nor the batch
    size changes a bit.
    """

    @classmethod
    def from_model_output(
        cls, values: np.ndarray, mask: np.ndarray | None = None, **_
    ) -> "Mean":
        values = values if mask is None else values[mask]
        return cls(total=values.sum(dtype=np.float64), count=len(values))

    def compute(self) -> float:
        return float(self.total / self.count)


def mean(values: np.ndarray, mask: np.ndarray | None = None) -> float:
    """Returns the mean of the values of all examples, or of those of a mask."""
    return Mean.from_model_output(values, mask).compute()


def is_fraction(metric: str) -> bool:
    """Returns whether an evaluator says that a metric is a fraction, shown in percent."""
    kinds = list(EVALUATORS.values())  # Which imports those that no config names.
    kinds.append(EvalConfig)
    for kind in kinds:  # Those of a user's modules too.
        kinds += kind.__subclasses__()
    patterns = {pattern for kind in kinds for pattern in kind.fractions}
    return any(fnmatch.fnmatchcase(metric, pattern) for pattern in patterns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig(EvalConfig):
    """Learnt on features of one split, scored on another."""

    fractions: ClassVar = ("top1",)

    train: str = key("", '"" is `data.split`, or "train" of another data set.')
    test: str = key("", '"" is the split that the data set is tested on.')

    def open(self, name, splits):
        train = self.train or splits.train_split(self)
        train = splits.open(name, self, train, model_classes=False)
        test = splits.open(name, self, self.test, model_classes=False)
        if names := train.source.class_names:
            test = splits.match(name, test, names, len(names))

        def check(labels):
            num_classes, worst = train.num_classes, labels.max(initial=0)
            if worst >= num_classes:
                raise UserError(
                    f"evals.{name}: {test.title} has label {worst}, but {train.title} has "
                    f"{num_classes} classes: take another train split"
                )

        if (labels := test.source.known_labels()) is not None:
            check(labels)

        def score(outputs, stop):
            check(outputs[1].labels)
            return self.score_features(*outputs, train, stop)

        wanted = Wanted(features=True)
        passes = Pass(train, wanted, rows=self.train_rows(train)), Pass(test, wanted)
        return Evaluator(passes, score)

    def train_rows(self, train: EvalSplit) -> Integer[np.ndarray, " R"] | None:
        """Returns the rows of the training split that are needed; all if None."""
        return None

    def score_features(
        self, train: Outputs, test: Outputs, split: EvalSplit, stop: Stop
    ) -> Scored | None:
        """Learns on features and labels of `split`, and scores those of the test split."""
        raise NotImplementedError

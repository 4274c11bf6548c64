"""The interface of an evaluator, and the table of evaluators.

Each evaluator is one file: the dataclass of its config keys, the code, and a line
`EVALUATORS["name"] = Config` that registers it when the package imports the file. Letters:
N examples, D features, K classes.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import flax
import numpy as np
from clu import metrics
from jaxtyping import Float, Integer

from vit_jax.config.fields import key
from vit_jax.data.sources.base import known_labels
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.splits import EvalConfig, EvalSplit, EvalSplits

Stop = Callable[[], bool]
SKIPPED = "skipped"  # Metric: number of damaged images that an evaluation left out.

EVALUATORS: dict[str, type[EvalConfig]] = {}  # By the value of the config key `kind`.


@dataclasses.dataclass(frozen=True, kw_only=True)
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


class Evaluator(Protocol):
    """One of `config.evals` with its splits open; what `open` of its config returns.

    Attributes:
      passes: whose outputs it scores.
    """

    passes: tuple[Pass, ...]

    def score(self, outputs: Sequence[Outputs], stop: Stop) -> Scored | None:
        """Computes metrics from the outputs of its passes, in their order.

        Returns:
          The scores; None if `stop` returned True meanwhile.
        """


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
    kinds = [EvalConfig]
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


class FeaturesEvaluator:
    """Learns on the features of one split and scores those of another.

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
        self._check(known_labels(self._test.source))
        wanted = Wanted(features=True)
        self.passes = (
            Pass(split=self._train, wanted=wanted, rows=self._rows()),
            Pass(split=self._test, wanted=wanted),
        )

    def _rows(self) -> np.ndarray | None:
        """Returns the rows of the training split that are needed; all if None."""
        return None

    def _features(self, outputs: Sequence[Outputs]) -> tuple:
        """Returns features and labels of both splits, and the number of classes."""
        train, test = ((found.features, found.labels) for found in outputs)
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

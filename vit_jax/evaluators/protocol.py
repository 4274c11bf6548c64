"""The interface of an evaluator, and two base classes.

An evaluator is a dataclass of config keys whose method `open` returns forward passes
and the function that scores their outputs. It is listed in `EVALUATORS`. Letters: K
classes, R rows.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Integer, Num

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.splits import EvalConfig, EvalSplit
from vit_jax.models.patches import PatchSequences

Stop = Callable[[], bool]
# From images (B, h, w, C) at their stored values, or sequences, to the logits of the
# cells.
Segment = Callable[
    [Num[np.ndarray, "B h w C"] | PatchSequences], Float[np.ndarray, "B y x L"]
]
SKIPPED = "skipped"  # Metric: number of damaged images that an evaluation skipped.


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass over a split, whose outputs an evaluator scores.

    Attributes:
      wanted: outputs to compute.
      rows: indices of the records that are read; all if None.
      num_pictures: number of images for which the task's pictures are shown.
      texts: function that returns texts to compare the images with; it needs a text
        tower and features, and the outputs then have the embeddings of both.
    """

    split: EvalSplit
    wanted: Wanted
    rows: Integer[np.ndarray, " R"] | None = None
    num_pictures: int = 0
    texts: Callable[[], Sequence[str]] | None = None


class Confusion(NamedTuple):
    """A confusion matrix.

    `counts` has the number of examples, or pixels, of each true class (rows) and
    predicted class (columns). `class_names` are in label order; if empty, numbers are
    printed.
    """

    counts: Integer[np.ndarray, "K K"]
    class_names: tuple[str, ...] = ()
    counted: str = "images"  # "images" or "pixels".

    @property
    def accuracies(self) -> Float[np.ndarray, " K"]:
        """Accuracy of each class; NaN for a class without examples."""
        examples = self.counts.sum(1)
        with np.errstate(invalid="ignore"):
            return self.counts.diagonal() / np.where(examples, examples, np.nan)

    def name(self, number: int) -> str:
        return self.class_names[number] if self.class_names else f"class {number}"


class Scored(NamedTuple):
    """Metrics of one set of parameters, and a confusion matrix if there is one."""

    metrics: dict[str, float]
    confusion: Confusion | None = None


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """An evaluation of `config.evals` with its splits open: the result of `open`.

    `score` takes the outputs of the passes, in order, and `stop`, a function that long
    computations call from time to time; if it returned True, the result is None. An
    evaluator of images of any size has `score_images` instead, which reads the split of
    its pass by itself: it takes the function that segments, the number of images per
    batch, and `stop`. `try_first` raises UserError if the first record of a split
    contradicts the config.
    """

    passes: tuple[Pass, ...]
    score: Callable[[Sequence[Outputs], Stop], Scored | None] | None = None
    score_images: Callable[[Segment, int, Stop], Scored | None] | None = None
    try_first: Callable[[EvalSplit], None] = EvalSplit.try_first


def mean(values: np.ndarray, mask: np.ndarray | None = None) -> float:
    """Returns the mean of the values of all examples, or of the examples in a mask.

    The sum is computed at once on the host in float64, so that the result is bitwise
    equal on any mesh and for any batch size.
    """
    values = values if mask is None else values[mask]
    return float(values.sum(dtype=np.float64) / len(values))


def check_labels(
    labels: np.ndarray | None, num_classes: int, title: str, problem: str
) -> None:
    """Raises UserError if a label of a split is not a class; skips `labels=None`."""
    if labels is not None and (worst := labels.max(initial=0)) >= num_classes:
        raise UserError(f"{title} has label {worst}, {problem}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig(EvalConfig):
    """Base of evaluators that learn from features of one split and score on another."""

    fractions: ClassVar = ("top1",)

    train: str = key(
        "", 'Split to learn from; "" is `data.split`, or "train" of another data set.'
    )
    test: str = key("", 'Split to score on; "" is the test split of the data set.')
    layers: tuple[int, ...] = key(
        (),
        "Layers whose pooled features are concatenated, such as (-4, -3, -2, -1), "
        "indexed as in `Model.layer_features`; () uses the classifier's input.",
        reason="the probes of DINO (arXiv:2104.14294), on the last four blocks",
        like=(0,),
        at_least=None,
    )

    def open(self, name, splits):
        train = self.train or splits.train_split(self)
        train = splits.open(name, self, train, model_classes=False)
        test = splits.open(name, self, self.test, model_classes=False)
        if names := train.source.class_names:
            test = splits.match(name, test, names, len(names))

        def check(labels):
            classes, title = train.num_classes, f"evals.{name}: {test.title}"
            problem = (
                f"but {train.title} has {classes} classes: take another train split"
            )
            check_labels(labels, classes, title, problem)

        if (labels := test.source.known_labels()) is not None:
            check(labels)

        def score(outputs, stop):
            check(outputs[1].labels)
            if self.layers:
                outputs = map(self._join, outputs)
            return self.score_features(*outputs, train, stop)

        wanted = Wanted(features=not self.layers, layers=self.layers)
        passes = Pass(train, wanted, rows=self.train_rows(train)), Pass(test, wanted)
        return Evaluator(passes, score)

    def _join(self, outputs: Outputs) -> Outputs:
        joined = [outputs.layers[layer] for layer in self.layers]
        return outputs.replace(features=np.concatenate(joined, axis=1))

    def train_rows(self, train: EvalSplit) -> Integer[np.ndarray, " R"] | None:
        """Returns the rows of the training split that are needed; None for all."""
        return None

    def score_features(
        self, train: Outputs, test: Outputs, split: EvalSplit, stop: Stop
    ) -> Scored | None:
        """Learns from features and labels of `split`, and scores on the test split."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskMetricsConfig(EvalConfig):
    """Metrics and pictures of the run's task on held-out images.

    An example is the error of a reconstruction. Only training has a task.
    """

    fractions: ClassVar = ("*_accuracy", "*top1", "*top5")

    kind: str = key("task", "Kind of evaluation.")
    split: str = key("", 'Split to evaluate; "" is the test split of the data set.')
    num_pictures: int = key(
        8,
        "Number of images whose pictures are logged, for tasks that draw pictures.",
        at_most=64,
    )

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=False, labelled=False)
        return Evaluator(
            (Pass(split, Wanted(task=True), num_pictures=self.num_pictures),),
            lambda outputs, stop: Scored(
                {name: mean(values) for name, values in outputs[0].task.items()}
            ),
        )

"""The interface of the kinds of annotation for fine-tuning: labels, masks, numbers."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from vit_jax.data.preprocess import Preprocess
from vit_jax.tools.finetuning import rule
from vit_jax.tools.finetuning.evaluated import SplitOutputs, TrainedNetwork
from vit_jax.tools.finetuning.layout import Layout
from vit_jax.training.config import TrainConfig
from vit_jax.weights.calibration import Calibration
from vit_jax.weights.pretrained import Pretrained

Choices = dict[str, tuple[str, str]]  # Choice and its reason, by config key.


class Seen(NamedTuple):
    """Properties of the training images.

    `data` has the keys of `config.data` that follow from the images, including
    `num_classes`; `choices` has lines about them.
    """

    images: rule.Images
    data: Mapping[str, object]
    choices: Choices


@dataclasses.dataclass(frozen=True)
class Given:
    """The images and weights that settings are chosen for."""

    kind: "Kind"
    splits: Layout
    seen: Seen
    validated: int  # Number of images in the validation split.
    pretrained: Pretrained
    preprocess: Preprocess
    keeps_aspect: bool = (
        False  # Whether images are sequences of patches, see models/patches.py.
    )

    @property
    def images(self) -> rule.Images:
        return self.seen.images


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of fine-tuning.

    Attributes:
      report: content of the run's report.json.
      split: evaluation that is scored, "test" or "val".
      metric: "top1"; "map" if images have several labels; "miou" if they have masks;
        "mae", the mean absolute error, if they have numbers.
      scores: scores of the best checkpoint by metric, for averaged parameters if the
        run has them.
      examples: number of images that were scored.
      looks: number of evaluations on these images from which the best was chosen.
      workdir: workdir of the run, which every command accepts as a model.
      kind: labels, masks or numbers.
      chosen_by: metric that chose the checkpoint, "balanced_accuracy" for uneven
        classes.
      page: path of the page of mistakes; "" with several processes.
      worst: lines about the classes with the most mistakes, in the first run.
      folds: number of runs, each scoring another part of the images; 0 for a single
        run.
      counts: number of scored images by class, or by tag; empty if unknown.
      decisions: calibration of the model; None without one.
    """

    report: dict
    split: str
    metric: str
    scores: Mapping[str, float]
    examples: int
    looks: int
    workdir: str
    kind: "Kind"
    chosen_by: str = ""
    page: str = ""
    worst: Sequence[str] = ()
    folds: int = 0
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    decisions: Calibration | None = None

    @property
    def score(self) -> float:
        return self.scores[self.metric]

    @property
    def is_uneven(self) -> bool:
        """Whether classes have so unequal numbers of images that accuracy misleads."""
        counts = [count for count in self.counts.values() if count]
        uneven = bool(counts) and max(counts) > rule.UNEVEN * min(counts)
        return self.metric == "top1" and (
            uneven or self.chosen_by == "balanced_accuracy"
        )

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of top1 or mae; None for other metrics."""
        if self.metric == "mae" and "mae_low" in self.scores:
            return self.scores["mae_low"], self.scores["mae_high"]
        if self.metric != "top1":
            return None
        right = round(self.score * self.examples)
        return rule.interval(right, self.examples, self.looks)


class Kind(Protocol):
    """A kind of annotation: how settings follow from it, and how a run is described.

    Attributes:
      annotation: "labels", "masks" or "numbers", for messages.
      task: base class of the configs of the tasks that learn from it.
      evaluation: kind of the evaluation in `config.evals` that scores it.
      metric: metric of the scores, see `Result`.
      optimizer: name of the optimiser that the learning rate is chosen for.
      most_epochs: maximum number of epochs.
      has_probabilities: whether the outputs are probabilities, which are calibrated.
      has_thresholds: whether each class has a threshold.
    """

    annotation: str
    task: type
    evaluation: str
    metric: str
    optimizer: str
    most_epochs: float
    has_probabilities: bool
    has_thresholds: bool

    def look(self, splits: Layout, place: str) -> Seen:
        """Determines the properties of the training images.

        Raises:
          UserError: there are fewer than two classes, or images cannot be read.
        """

    def cost(self, seen: Seen, speed: float) -> float:
        """Returns the time to evaluate an image, relative to a forward pass.

        `speed` is the training speed, in images per second.
        """

    def contents(self, data: Mapping) -> str:
        """Returns what the images have, such as "of 5 classes"; `data` is `config.data`."""

    def sections(self, given: Given, side: int, batch: int) -> dict:
        """Returns the sections "task" and "optim" of the config, and "best_metric"."""

    def transforms(self, given: Given, size: tuple[int, int]) -> dict[str, str]:
        """Returns `data.train_transform` and `data.eval_transform` at a size in pixels."""

    def choices(self, images: rule.Images, raw: Mapping) -> Choices:
        """Returns the choices in a config that only this kind makes."""

    def counts(self, config: TrainConfig, split: str, names: list[str]) -> dict:
        """Returns `Result.counts` of an evaluation."""

    def headline(self, result: Result) -> str:
        """Returns the score as a sentence."""

    def notes(self, result: Result) -> list[str]:
        """Returns further lines about the scores."""

    def commands(self, model: str) -> list[str]:
        """Returns lines with commands to continue with."""

    def score_all(self, runs: Iterable[SplitOutputs]) -> dict[str, float]:
        """Returns the scores of all images of several runs together.

        The result is empty for kinds whose scores are averaged over the runs.
        """

    def write_page(
        self, config: TrainConfig, result: Result, score: str, network: TrainedNetwork
    ) -> tuple[str, list[str]]:
        """Writes the page of a run; returns its path and `Result.worst`.

        page.py has the parts that all pages share. `score` is the score as a sentence,
        `network` the network of the run.
        """

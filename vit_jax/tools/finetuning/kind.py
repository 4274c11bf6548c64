"""What fine-tuning asks the kind of annotation: labels of images, or masks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from vit_jax.data.preprocess import Preprocess
from vit_jax.tools.finetuning import rule
from vit_jax.tools.finetuning.layout import Layout
from vit_jax.training.config import TrainConfig
from vit_jax.weights.pretrained import Pretrained

Choices = dict[str, tuple[str, str]]  # Config key -> (choice, reason).


class Seen(NamedTuple):
    """What a look at the training images has shown.

    `data` has the keys of `config.data` that follow, `num_classes` among them; `choices`
    are lines on them.
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
    validated: int  # Images of the validation split.
    pretrained: Pretrained
    preprocess: Preprocess
    keeps_aspect: bool = (
        False  # Images are sequences of patches, see models/patches.py.
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
      metric: "top1"; "map" if images have several labels; "miou" if they have masks.
      scores: metric -> score of the best checkpoint, of averaged parameters if the run
        has them.
      examples: number of images that were scored.
      looks: number of evaluations on these images that chose the checkpoint.
      workdir: workdir of the run, which every command accepts as a model.
      kind: labels or masks.
      chosen_by: metric that chose the checkpoint, "balanced_accuracy" for uneven classes.
      page: path of the page on mistakes; "" with several processes.
      worst: lines on the classes that are recognised worst, of the first run.
      folds: number of runs that each scored another part of the images; 0 for one run.
      counts: class -> number of images that were scored; empty if unknown.
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

    @property
    def score(self) -> float:
        return self.scores[self.metric]

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of top1; None for other metrics."""
        if self.metric != "top1":
            return None
        right = round(self.score * self.examples)
        return rule.interval(right, self.examples, self.looks)


class Kind(Protocol):
    """A kind of annotation: how settings follow from it, and how a run is told about.

    Attributes:
      annotation: "labels" or "masks", for messages.
      task: class of the configs of tasks that learn from it.
      evaluation: kind of `config.evals` that scores it.
      metric: its metric, see `Result`.
      optimizer: name of the optimiser that the rate is chosen for.
      most_epochs: largest number of epochs.
    """

    annotation: str
    task: type
    evaluation: str
    metric: str
    optimizer: str
    most_epochs: float

    def look(self, splits: Layout, place: str) -> Seen:
        """Looks at the training images.

        Raises:
          UserError: they have fewer than two classes, or unreadable ones.
        """

    def cost(self, seen: Seen, speed: float) -> float:
        """Returns the time to evaluate an image, relative to a forward pass.

        `speed` is that of training, in images per second.
        """

    def sections(self, given: Given, side: int, batch: int) -> dict:
        """Returns the sections "task" and "optim" of the config, and "best_metric"."""

    def transforms(self, given: Given, size: tuple[int, int]) -> dict[str, str]:
        """Returns `data.train_transform` and `data.eval_transform` at a size in pixels."""

    def choices(self, images: rule.Images, raw: Mapping) -> Choices:
        """Returns the choices in a config that only this kind has."""

    def counts(self, config: TrainConfig, split: str, names: list[str]) -> dict:
        """Returns `Result.counts` of an evaluation."""

    def headline(self, result: Result) -> str:
        """Returns the score in words."""

    def notes(self, result: Result) -> list[str]:
        """Returns more lines on the scores."""

    def commands(self, model: str) -> list[str]:
        """Returns lines with commands to continue with."""

    def write_page(
        self, config: TrainConfig, workdir: str, split: str, headline: str
    ) -> tuple[str, list[str]]:
        """Writes the page of mistakes; returns its path and `Result.worst`."""

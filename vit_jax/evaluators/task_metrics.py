"""The metrics of the run's own task on images that it is not trained on.

Such as the error of a reconstruction. Only in training, where there is the task. Letters:
N examples.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from vit_jax.config.fields import key
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.protocol import EVALUATORS, Pass, Scored, Stop, mean
from vit_jax.evaluators.splits import EvalConfig, EvalSplits


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskMetricsConfig(EvalConfig):
    """The task's own metrics, and pictures of what it answers."""

    fractions: ClassVar = ("*_accuracy", "*top1", "*top5")

    kind: str = key("task", "What is evaluated.")
    split: str = key("", 'Its images; "" is the split that the data set is tested on.')
    num_pictures: int = key(
        8, "Images whose pictures are in the log, if the task has any.", at_most=64
    )

    def open(self, name, splits, num_classes):
        return TaskMetrics(name, self, splits)


class TaskMetrics:
    """Means over the images."""

    def __init__(self, name: str, config: TaskMetricsConfig, splits: EvalSplits):
        split = splits.open(
            name, config, config.split, model_classes=False, labelled=False
        )
        wanted, num_pictures = Wanted(task=True), config.num_pictures
        self.passes = (Pass(split=split, wanted=wanted, num_pictures=num_pictures),)

    def score(self, outputs: Sequence[Outputs], stop: Stop) -> Scored:
        return Scored({name: mean(x) for name, x in outputs[0].task.items()})


EVALUATORS["task"] = TaskMetricsConfig

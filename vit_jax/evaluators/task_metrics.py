"""The metrics of the run's own task on images that it is not trained on.

Such as the error of a reconstruction. Only in training, where there is the task. Letters:
N examples.
"""

import dataclasses
from typing import ClassVar

from vit_jax.config.fields import key
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored, mean
from vit_jax.evaluators.splits import EvalConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskMetricsConfig(EvalConfig):
    """The task's own metrics, and pictures of what it answers."""

    fractions: ClassVar = ("*_accuracy", "*top1", "*top5")

    kind: str = key("task", "What is evaluated.")
    split: str = key("", 'Its images; "" is the split that the data set is tested on.')
    num_pictures: int = key(
        8, "Images whose pictures are in the log, if the task has any.", at_most=64
    )

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=False, labelled=False)
        return Evaluator(
            (Pass(split, Wanted(task=True), num_pictures=self.num_pictures),),
            lambda outputs, stop: Scored(
                {name: mean(values) for name, values in outputs[0].task.items()}
            ),
        )

"""The metrics of the run's own task on images that it is not trained on.

Such as the error of a reconstruction. Only in training, where there is the task. Letters:
N examples.
"""

import dataclasses

import numpy as np

from vit_jax.config.fields import key
from vit_jax.evaluators.forward_passes import TASK, Outputs
from vit_jax.evaluators.protocol import EVALUATORS, RequiredOutputs, Scored, Stop
from vit_jax.evaluators.splits import EvalConfig, EvalSplits


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskMetricsConfig(EvalConfig):
    """The task's own metrics, and pictures of what it answers."""

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
        self._num_pictures = config.num_pictures
        split = splits.open(
            name, config, config.split, model_classes=False, labelled=False
        )
        self.splits = (split,)

    def required_outputs(self) -> dict[str, RequiredOutputs]:
        names = frozenset((TASK,))
        (split,) = self.splits
        return {"task": RequiredOutputs(split, names, num_pictures=self._num_pictures)}

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored:
        found = outputs["task"].values
        prefix = f"{TASK}/"
        return Scored(
            {
                name.removeprefix(prefix): float(values.mean(dtype=np.float64))
                for name, values in found.items()
                if name.startswith(prefix)
            }
        )


EVALUATORS["task"] = TaskMetricsConfig

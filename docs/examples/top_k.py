"""How often the right class is among the best k."""

import dataclasses
from typing import ClassVar

from vit_jax.config.fields import key
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.evaluators.protocol import Pass, Scored, mean
from vit_jax.evaluators.splits import EvalConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKConfig(EvalConfig):
    """Accuracy of the best k classes."""

    fractions: ClassVar = ("top*",)

    split: str = key("val", "To classify.")
    k: int = key(3, "Number of best classes.", at_least=1, at_most=5)

    def open(self, name, splits, num_classes):
        return TopK(self, splits.open(name, self, self.split, model_classes=True))


class TopK:
    def __init__(self, config, split):
        self._config = config
        self.passes = (Pass(split=split, wanted=Wanted(predictions=True)),)

    def score(self, outputs, stop):
        (found,) = outputs
        best = found.predictions.tops[:, : self._config.k]
        right = (best == found.labels[:, None]).any(1)
        return Scored({f"top{self._config.k}": mean(right)})

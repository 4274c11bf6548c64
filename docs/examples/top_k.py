"""How often the right class is among the best k."""

import dataclasses
from typing import ClassVar

from vit_jax.config.fields import key
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored, mean
from vit_jax.evaluators.splits import EvalConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKConfig(EvalConfig):
    """Accuracy of the best k classes."""

    fractions: ClassVar = ("top*",)

    split: str = key("val", "To classify.")
    k: int = key(3, "Number of best classes.", at_least=1, at_most=5)

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=True)

        def score(outputs, stop):
            (found,) = outputs
            best = found.predictions.tops[:, : self.k]
            right = (best == found.labels[:, None]).any(1)
            return Scored({f"top{self.k}": mean(right)})

        return Evaluator((Pass(split, Wanted(predictions=True)),), score)

"""How often the right class is among the best k."""

import dataclasses

from vit_jax.config.fields import key
from vit_jax.evaluators.forward_passes import TOPS
from vit_jax.evaluators.protocol import RequiredOutputs, Scored
from vit_jax.evaluators.splits import EvalConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKConfig(EvalConfig):
    """Accuracy of the best k classes."""

    split: str = key("val", "To classify.")
    k: int = key(3, "Number of best classes.", at_least=1, at_most=5)

    def open(self, name, splits, num_classes):
        return TopK(self, splits.open(name, self, self.split, model_classes=True))


class TopK:
    def __init__(self, config, split):
        self._config, self._split, self.splits = config, split, (split,)

    def required_outputs(self):
        return {"test": RequiredOutputs(self._split, frozenset((TOPS,)))}

    def score(self, outputs, stop):
        found = outputs["test"]
        best = found.values[TOPS][:, : self._config.k]
        right = (best == found.labels[:, None]).any(1)
        return Scored({f"top{self._config.k}": float(right.mean())})

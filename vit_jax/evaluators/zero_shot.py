"""Zero-shot classification: images compared with the names of classes in prompts.

Needs a text tower: of weights, or of a run of the task "contrastive". Letters: N images,
K classes, E width of the shared space.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from vit_jax.config.fields import key
from vit_jax.data import class_names
from vit_jax.data.sources.base import known_labels
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import TOP, Outputs, Wanted
from vit_jax.evaluators.protocol import EVALUATORS, Pass, Scored, Stop, mean
from vit_jax.evaluators.splits import EvalConfig, EvalSplits
from vit_jax.models.text_tower import filled


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(EvalConfig):
    """Classes told apart by their names."""

    fractions: ClassVar = ("top1", "top5")

    kind: str = key("zero_shot", "What is evaluated.")
    split: str = key("", 'Its images; "" is the split that the data set is tested on.')
    classes: tuple[str, ...] = key(
        (),
        "Names of the classes in label order, in place of the data set's; the data set's "
        "own may stand in any order.",
    )
    prompts: tuple[str, ...] = key(
        ("a photo of a {}.",),
        "Texts with {} for a name; a class is the mean of their embeddings (CLIP, "
        "arXiv:2103.00020, section 3.1.4).",
    )

    def open(self, name, splits, num_classes):
        return ZeroShot(name, self, splits)

    def summarize(self, metrics):
        return metrics["top1"]


class ZeroShot:
    """Accuracy of the class whose prompts an image is most like."""

    def __init__(self, name: str, config: ZeroShotConfig, splits: EvalSplits):
        split = splits.open(name, config, config.split, model_classes=False)
        self._split, self._prompts = split, config.prompts
        names, where = split.source.class_names, f"evals.{name}.classes"
        self._classes = names
        if config.classes:
            self._classes = class_names.arrange(config.classes, names, where=where)
        if not self._classes:
            raise UserError(
                f"evals.{name}: {split.title} does not name its classes: state "
                f"evals.{name}.classes"
            )
        if not config.prompts:
            raise UserError(f"evals.{name}.prompts is empty: give at least ('{{}}',)")
        texts = filled(config.prompts, self._classes)
        self._check(known_labels(split.source))
        wanted = Wanted(features=True)
        self.passes = (Pass(split=split, wanted=wanted, texts=lambda: texts),)

    def score(self, outputs: Sequence[Outputs], stop: Stop) -> Scored:
        (found,), K = outputs, len(self._classes)
        means = found.text_embeddings.reshape(K, len(self._prompts), -1).mean(1)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        self._check(found.labels)
        similar = found.image_embeddings @ means.T
        best = np.argsort(-similar, axis=1, kind="stable")[:, :TOP]
        right = best == found.labels[:, None]
        metrics = {"top1": mean(right[:, 0])}
        if K > TOP:
            metrics["top5"] = mean(right.any(1))
        return Scored(metrics)

    def _check(self, labels: np.ndarray | None) -> None:
        if labels is None:
            return
        K, worst = len(self._classes), labels.max(initial=0)
        if worst >= K:
            raise UserError(
                f"{self._split.title} has label {worst}, but {K} classes are named: "
                "name all of them"
            )


EVALUATORS["zero_shot"] = ZeroShotConfig

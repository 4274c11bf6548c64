"""Zero-shot classification: images compared with the names of classes in prompts.

Needs a text tower: of weights, or of a run of the task "contrastive". Letters: N images,
K classes, E width of the shared space.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from vit_jax.config.fields import key
from vit_jax.data import class_names
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import TOP, Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored, mean
from vit_jax.evaluators.splits import EvalConfig
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

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=False)
        classes = split.source.class_names
        if self.classes:
            where = f"evals.{name}.classes"
            classes = class_names.arrange(self.classes, classes, where=where)
        if not classes:
            raise UserError(
                f"evals.{name}: {split.title} does not name its classes: state "
                f"evals.{name}.classes"
            )
        if not self.prompts:
            raise UserError(f"evals.{name}.prompts is empty: give at least ('{{}}',)")
        texts, K = filled(self.prompts, classes), len(classes)

        def check(labels):
            if (worst := labels.max(initial=0)) >= K:
                raise UserError(
                    f"{split.title} has label {worst}, but {K} classes are named: name all "
                    "of them"
                )

        if (labels := split.source.known_labels()) is not None:
            check(labels)

        def score(outputs, stop):
            (result,) = outputs
            check(result.labels)
            means = result.text_embeddings.reshape(K, len(self.prompts), -1).mean(1)
            means /= np.linalg.norm(means, axis=1, keepdims=True)
            similar = result.image_embeddings @ means.T
            best = np.argsort(-similar, axis=1, kind="stable")[:, :TOP]
            right = best == result.labels[:, None]
            metrics = {"top1": mean(right[:, 0])}
            if K > TOP:
                metrics["top5"] = mean(right.any(1))
            return Scored(metrics)

        wanted = Wanted(features=True)
        return Evaluator((Pass(split, wanted, texts=lambda: texts),), score)

    def summarize(self, metrics):
        return metrics["top1"]

"""Fine-tuning on images with labels: one class per image, or any number of them."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar

import jax
import numpy as np

from vit_jax import models
from vit_jax.data.sources.base import read_labels
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.evaluators import classification, forward_passes
from vit_jax.evaluators.forward_passes import Outputs
from vit_jax.tasks.classification import ClassificationConfig
from vit_jax.tools import calibrating
from vit_jax.tools.finetuning import report, rule
from vit_jax.tools.finetuning.evaluated import SplitOutputs
from vit_jax.tools.finetuning.kind import Choices, Given, Result, Seen
from vit_jax.tools.finetuning.layout import Layout
from vit_jax.tools.sweeps import fine_tuning
from vit_jax.training.config import TrainConfig

_F1 = "micro_f1@0.5", "macro_f1@0.5"
_WORST = 3  # Number of classes in the line about the worst.


@dataclasses.dataclass(frozen=True)
class Labels:
    """Fine-tuning on labels, one kind of annotation; see `Kind`."""

    multi_label: bool

    annotation: ClassVar = "labels"
    task: ClassVar = ClassificationConfig
    optimizer: ClassVar = rule.OPTIMIZER
    most_epochs: ClassVar = rule.MOST_EPOCHS
    has_probabilities: ClassVar = True

    @property
    def has_thresholds(self) -> bool:
        return self.multi_label

    @property
    def evaluation(self) -> str:
        return "multi_label" if self.multi_label else "classification"

    @property
    def metric(self) -> str:
        return "map" if self.multi_label else "top1"

    def look(self, splits: Layout, place: str) -> Seen:
        source = splits.open(splits.data["split"])
        classes = fine_tuning.num_classes_of(source, place)
        if classes < 2:
            raise UserError(
                f"{place} has images of one class ({', '.join(source.class_names)}): "
                "give two classes or more"
            )
        labels = None if self.multi_label else read_labels(source).tolist()
        images = rule.look_at(source, labels, splits.config.max_megapixels)
        data = {"num_classes": classes}
        if images.uneven > rule.UNEVEN and not self.multi_label:
            data["class_balance"] = "sqrt"
        return Seen(images, data, {})

    def cost(self, seen: Seen, speed: float) -> float:
        return 1.0

    def contents(self, data: Mapping) -> str:
        return f"of {data['num_classes']} classes"

    def sections(self, given: Given, side: int, batch: int) -> dict:
        several = {"multi_label": self.multi_label}
        best = rule.metric_of(given.images, several, given.validated)
        return {
            "task": {"loss": "sigmoid" if self.multi_label else "softmax"},
            "optim": rule.optimizer(batch),
            "best_metric": best,
        }

    def transforms(self, given: Given, size: tuple[int, int]) -> dict[str, str]:
        if not given.keeps_aspect:
            return rule.transforms_of(given.images, given.preprocess, size)
        patch = models.create(**given.pretrained.options).config.patch_size
        return rule.of_any_size(given.images, given.preprocess, size, patch)

    def choices(self, images: rule.Images, raw: Mapping) -> Choices:
        balance = raw["data"].get("class_balance") or "as they are"
        why = "the largest class has {:.1f} times as many images as the smallest"
        choice = f"classes drawn {balance}", why.format(images.uneven)
        return {"data.class_balance": choice}

    def counts(self, config: TrainConfig, split: str, names: list[str]) -> dict:
        labels = open_source(config.data, config.evals[split].split).known_labels()
        if labels is None:
            return {}
        numbers = report.count(labels, config.data.num_classes)
        return dict(zip(names or map(str, range(len(numbers))), numbers, strict=True))

    def headline(self, result: Result) -> str:
        if self.multi_label:
            return f"mean average precision {result.score:.2%}, {_f1(result)}"
        low, high = result.interval
        wider = f", for the best of {result.looks} evaluations" * (result.looks > 1)
        line = (
            f"accuracy {result.score:.2%} (95 % interval {low:.2%} to {high:.2%}{wider}"
            f"{_baseline(result)})"
        )
        if result.is_uneven:
            scores = result.scores
            line = (
                f"balanced accuracy {scores['balanced_accuracy']:.2%}, recall of the "
                f"worst class {scores['worst_class_recall']:.2%}, {line}"
            )
        return line

    def notes(self, result: Result) -> list[str]:
        """Returns lines about the calibration, and classes with few scored images."""
        decisions = result.decisions
        return [
            *(calibrating.lines(decisions) if decisions else ()),
            *self._few(result),
        ]

    def _few(self, result: Result) -> list[str]:
        """Returns a line about classes with too few scored images, if there are any."""
        if not result.counts:
            few = result.examples < rule.FEW * len(result.report["class_names"])
            return [f"note: fewer than {rule.FEW} images per class were scored"] * few
        by_count = sorted(result.counts.items(), key=lambda item: item[1])
        few = [f"{name} {count}" for name, count in by_count if count < rule.FEW]
        if not few:
            return []
        more = f" and {len(few) - 5} more" if len(few) > 5 else ""
        remedy = "" if result.folds else "; --folds=5 scores all images, in 5 runs"
        line = (
            f"note: {len(few)} of {len(result.counts)} classes had fewer than "
            f"{rule.FEW} scored images ({', '.join(few[:5])}{more}), so their "
            f"scores are only approximate{remedy}"
        )
        return [line]

    def commands(self, model: str) -> list[str]:
        return [
            f"classify:  python -m vit_jax.predict --model={model} IMAGES",
            f"look:      python -m vit_jax.explore --model={model} --images=FOLDER",
            f"export:    python -m vit_jax.convert --model={model} --to=timm --out=FOLDER",
        ]

    def score_all(self, runs: Iterable[SplitOutputs]) -> dict:
        if self.multi_label:  # Logits of several networks are not one ranking.
            return {}
        runs = [*runs]
        logits, labels = (
            np.concatenate([getattr(one.outputs, name) for one in runs])
            for name in ("logits", "labels")
        )
        tops = forward_passes.predict(logits, logits.shape[1], labels)
        outputs = Outputs(
            np.arange(len(labels)), labels, predictions=jax.device_get(tops)
        )
        return classification.score(outputs, logits.shape[1]).metrics

    def write_page(self, config, result, score, network) -> tuple[str, list[str]]:
        page, answers, twins = report.write(config, result, score, network)
        worst = [
            f"{each.name} {each.recall:.1%} of {each.images:,}"
            for each in answers.least_recalled(_WORST)
        ]
        lines = [f"worst:     recall of {', '.join(worst)}"] * bool(worst)
        if twins:
            lines.append(
                f"note: {twins:,} validation images show the same picture as a training "
                "image: --group=COLUMN, or --group='(.*)_\\d+' for file names, keeps "
                "photographs of one subject on one side"
            )
        return page, lines


def _baseline(result: Result) -> str:
    """Returns the accuracy of always predicting the most frequent class."""
    if not result.counts:
        share = result.scores.get("majority_baseline")
        name = "the most frequent class"
    else:
        name = max(result.counts, key=result.counts.__getitem__)
        share = result.counts[name] / sum(result.counts.values())
    return "" if share is None else f"; always {name}: {share:.2%}"


def _f1(result: Result) -> str:
    """Returns the F1 scores of images with several labels, for the headline."""
    decisions = result.decisions
    if decisions and decisions.thresholds and not result.folds:
        micro, macro = (
            decisions.measured[f"{kind}_f1"][1] for kind in ("micro", "macro")
        )
        return f"F1 {micro:.2%} (micro) and {macro:.2%} (macro) with its thresholds"
    micro, macro = (result.scores[name] for name in _F1)
    return f"F1 {micro:.2%} (micro) and {macro:.2%} (macro) at 0.5"

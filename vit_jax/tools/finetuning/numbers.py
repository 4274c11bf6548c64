"""Fine-tuning on images with numbers: one or several per image, such as an age."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from vit_jax import models
from vit_jax.data.fields.target import read_targets
from vit_jax.errors import UserError
from vit_jax.tasks.regression import RegressionConfig
from vit_jax.tools.finetuning import number_report, rule
from vit_jax.tools.finetuning.evaluated import SplitOutputs
from vit_jax.tools.finetuning.kind import Choices, Given, Result, Seen
from vit_jax.tools.finetuning.layout import Layout

# Numbers may depend on sizes in an image, which smaller crops would change.
_CROP = "random_resized_crop(area=(0.8, 1.0), ratio=(0.9, 1.1))"


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Fine-tuning on numbers, one kind of annotation; see `Kind`.

    `names` are the names of the targets.
    """

    names: tuple[str, ...]

    annotation: ClassVar = "numbers"
    task: ClassVar = RegressionConfig
    evaluation: ClassVar = "regression"
    metric: ClassVar = "mae"
    optimizer: ClassVar = rule.OPTIMIZER
    most_epochs: ClassVar = rule.MOST_EPOCHS
    has_probabilities: ClassVar = False
    has_thresholds: ClassVar = False

    def look(self, splits: Layout, place: str) -> Seen:
        data, source = splits.config, splits.open(splits.data["split"])
        values = read_targets(source, self.names)
        choices = {}
        for name, column in zip(self.names, values.T, strict=True):
            known = column[~np.isnan(column)]
            if len({*known.tolist()}) < 2:
                raise UserError(
                    f"{place}: {name!r} has fewer than two different numbers in the "
                    "training images: choose another with --target"
                )
            missing = len(column) - len(known)
            why = f"{missing:,} missing" if missing else ""
            what = (
                f"{name} from {known.min():g} to {known.max():g}, mean {known.mean():g}"
            )
            choices[
                f"data.target_key {name}" if len(self.names) > 1 else "--target"
            ] = (
                what,
                why,
            )
        for split in filter(None, (splits.validation, splits.test)):
            values = read_targets(splits.open(split), self.names)
            for t in np.flatnonzero(np.isnan(values).all(0)):
                name = self.names[t]
                raise UserError(
                    f"{place}: no image of the split {split} has a number in {name!r}: "
                    "leave it out of --target, or move images into the split"
                )
        return Seen(rule.look_at(source, None, data.max_megapixels), {}, choices)

    def cost(self, seen: Seen, speed: float) -> float:
        return 1.0

    def contents(self, data: Mapping) -> str:
        return f"with {', '.join(self.names)}"

    def sections(self, given: Given, side: int, batch: int) -> dict:
        return {
            "task": {"name": "regression"},
            "optim": rule.optimizer(batch),
            "best_metric": "val/r2" if given.validated >= rule.CHOOSING else "",
        }

    def transforms(self, given: Given, size: tuple[int, int]) -> dict[str, str]:
        if not given.keeps_aspect:
            known = rule.transforms_of(given.images, given.preprocess, size)
            flip = " | flip" * (not given.images.grey)
            return known | {"train_transform": _CROP + flip}
        patch = models.create(**given.pretrained.options).config.patch_size
        return rule.of_any_size(given.images, given.preprocess, size, patch)

    def choices(self, images: rule.Images, raw: Mapping) -> Choices:
        loss = raw["task"].get("loss", RegressionConfig.loss)
        return {"task.loss": (f"loss {loss}", "")}

    def counts(self, config, split: str, names: list[str]) -> dict:
        return {}

    def headline(self, result: Result) -> str:
        units = dict(zip(self.names, number_report.units_of(result), strict=True))
        several = len(self.names) > 1
        parts = [
            f"{name} " * several
            + number_report.error_of(result, f"/{name}" * several, units[name])
            for name in self.names
        ]
        score = f"R2 {result.scores['r2']:.3f}"
        if "qwk" in result.scores:
            score += f", quadratic kappa {result.scores['qwk']:.3f}"
        if several:
            score += f" (mean of {len(self.names)} targets)"
        return f"mean absolute error {'; '.join(parts)}; {score}"

    def notes(self, result: Result) -> list[str]:
        """Returns a line if the predictions are no better than a constant."""
        scores, names = result.scores, self.names
        of_each = {name: f"r2/{name}" if len(names) > 1 else "r2" for name in names}
        bad = [name for name, metric in of_each.items() if scores[metric] <= 0]
        if not bad:
            return []
        line = (
            f"note: for {', '.join(bad)} the mean of the scored images would be as good a "
            "prediction (R2 is not above 0)"
        )
        return [line]

    def commands(self, model: str) -> list[str]:
        return [
            f"predict:   python -m vit_jax.predict --model={model} IMAGES",
            f"export:    python -m vit_jax.convert --model={model} --to=onnx --out=FOLDER",
        ]

    def score_all(self, runs: Iterable[SplitOutputs]) -> dict:
        return number_report.score_all([*runs])

    def write_page(self, config, result, score, network) -> tuple[str, list[str]]:
        return number_report.write(config, result, score, network)

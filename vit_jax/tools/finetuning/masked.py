"""Fine-tuning on images with masks: the class of every pixel.

The whole network is trained, with smaller learning rates in lower layers, as MAE
(arXiv:2111.06377, appendix A.4) and BEiT (arXiv:2106.08254, appendix H) do on ADE20K,
with a head on the last four layers, as in DINOv2's probes (arXiv:2304.07193, section
7.4).
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models
from vit_jax.command_line import progress
from vit_jax.data import masks
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources.base import Source, name_of, read_record
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.tasks.segmentation import SegmentationConfig
from vit_jax.tools.finetuning import mask_report, rule
from vit_jax.tools.finetuning.evaluated import SplitOutputs
from vit_jax.tools.finetuning.kind import Choices, Given, Result, Seen
from vit_jax.tools.finetuning.layout import Layout
from vit_jax.training.config import TrainConfig

_MOST_READ = 5_000  # Maximum number of masks whose classes are counted.
_LAYERS = 4  # Number of layers whose features the head reads.
# Grids with fewer cells per side get a head that refines them. On a CPU, a pyramid takes
# many times as long: with 12 cells it was worse than a linear head in the same time.
_COARSE = 8
_RATE, _WEIGHT_DECAY, _LAYER_DECAY = 1e-3, 0.05, 0.75
# Cost of an evaluation: windows per photograph, and host seconds per pixel and class.
_WINDOWS, _PIXEL_SECONDS, _ASPECT = 2, 2e-8, 4 / 3
_WORST = 5  # Number of classes in the line about the worst.


@dataclasses.dataclass(frozen=True)
class Masks:
    """Fine-tuning on masks, one kind of annotation; see `Kind`."""

    annotation: ClassVar = "masks"
    task: ClassVar = SegmentationConfig
    evaluation: ClassVar = "segmentation"
    metric: ClassVar = "miou"
    optimizer: ClassVar = "adam"
    most_epochs: ClassVar = 60.0
    has_probabilities: ClassVar = False
    has_thresholds: ClassVar = False

    def look(self, splits: Layout, place: str) -> Seen:
        data, source = splits.config, splits.open(splits.data["split"])
        pixels, names = _pixels_of_values(source, data), source.class_names
        keys, choices = _classes_of(pixels, names, splits, place)
        images = rule.look_at(source, None, data.max_megapixels)
        return Seen(images, keys, choices)

    def cost(self, seen: Seen, speed: float) -> float:
        values = _ASPECT * seen.images.side**2 * seen.data["num_classes"]
        return _WINDOWS + values * _PIXEL_SECONDS * speed / rule.EVALUATED

    def contents(self, data: Mapping) -> str:
        return f"of {data['num_classes']} classes"

    def sections(self, given: Given, side: int, batch: int) -> dict:
        model = models.create(
            **given.pretrained.options | {"image_size": (side, side), "num_classes": 0}
        )
        grids = _grids(model)
        several, coarse = len({*grids}) > 1, min(grids[-1]) < _COARSE
        count = min(_LAYERS, len(grids))
        optim = rule.optimizer(batch) | {
            "name": self.optimizer,
            "learning_rate": _RATE * math.sqrt(batch / rule.RATE_BATCH),
            "weight_decay": _WEIGHT_DECAY,
        }
        optim.pop("momentum")
        if model.config.num_blocks:
            optim["layer_decay"] = _LAYER_DECAY
        task = {
            "name": self.evaluation,
            "head": "pyramid" if several or coarse else "linear",
            "layers": tuple(range(-count, 0)),
        }
        return {"task": task, "optim": optim, "best_metric": f"val/{self.metric}"}

    def transforms(self, given: Given, size: tuple[int, int]) -> dict[str, str]:
        grey = given.images.grey
        train = f"scale_crop(scale={(0.7, 1.4) if grey else (0.5, 2.0)})"
        if not grey:
            train += " | flip"
            if given.pretrained.options["channels"] == 3:
                train += " | color_jitter"
        whole = dataclasses.replace(given.preprocess, crop_fraction=1.0)
        known = rule.transforms_of(given.images, whole, size)
        return known | {"train_transform": train}

    def choices(self, images: rule.Images, raw: Mapping) -> Choices:
        task, decay = raw["task"], raw["optim"].get("layer_decay", 0)
        layers = ", ".join(map(str, task["layers"]))
        frozen = task.get("frozen", False)
        return {
            "task.frozen": (
                "only the head is trained"
                if frozen
                else "the whole network is trained",
                "",
            ),
            "task.head, task.layers": (f"head {task['head']} on layers {layers}", ""),
            "optim.layer_decay": (
                f"each layer's learning rate is {decay:g} times that of the next"
                if decay
                else "one learning rate for all layers",
                "",
            ),
        }

    def counts(self, config: TrainConfig, split: str, names: list[str]) -> dict:
        return {}

    def headline(self, result: Result) -> str:
        right = result.scores["pixel_accuracy"]
        most = result.scores["majority_baseline"]
        line = f"mean IoU {result.score:.2%}, pixel accuracy {right:.2%}"
        return (
            f"{line} (without an interval; always the most frequent class: {most:.2%})"
        )

    def notes(self, result: Result) -> list[str]:
        """Returns a line about the worst classes."""
        known = {
            name.removeprefix("iou/"): value
            for name, value in result.scores.items()
            if name.startswith("iou/")
        }
        worst = sorted(known.items(), key=lambda item: item[1])[:_WORST]
        shown = ", ".join(
            f"{'class ' * name.isdecimal()}{name} {value:.1%}" for name, value in worst
        )
        return [f"worst:     {shown}"] * bool(shown)

    def commands(self, model: str) -> list[str]:
        return [
            f"masks:     python -m vit_jax.predict --model={model} --out=MASKS IMAGES",
            f"look:      python -m vit_jax.explore --model={model} --images=FOLDER",
        ]

    def score_all(self, runs: Iterable[SplitOutputs]) -> dict:
        return {}  # Masks are compared while they are computed.

    def write_page(self, config, result, score, network) -> tuple[str, list[str]]:
        return mask_report.write(config, result, score), []


def _classes_of(
    pixels: Mapping[int, int], names: Sequence[str], splits: Layout, place: str
) -> tuple[dict, Choices]:
    """Returns the config keys of the masks' classes, and lines about them.

    Raises:
      UserError: there are fewer than two classes, or more than names.
    """
    data, ignore = splits.config, splits.config.ignore_label
    seen = sorted(pixels.keys() - {ignore})
    values = data.mask_values
    if seen and seen[0] < 0 and not values:
        raise UserError(
            f"{place} has masks with {seen[0]}: set --config.data.ignore_label={seen[0]} "
            "if it stands for no class"
        )
    is_set = values or "ignore_label" in splits.data
    if not is_set and len(seen) == 1 and ignore in pixels and len(names) in (0, 2):
        values = (seen[0], ignore)  # Like black and white.
    if values:
        keys = {"mask_values": values, "num_classes": len(values)}
        why = f"the masks have {' and '.join(map(str, values))}"
        return keys, {"data.mask_values": (f"{len(values)} classes of pixels", why)}
    top, keys, choices = max(seen, default=0), {}, {}
    reduced = data.reduce_zero_label
    if "reduce_zero_label" not in splits.data:
        reduced = bool(seen) and (top == len(names) if names else 0 not in seen)
        keys["reduce_zero_label"] = reduced
    if reduced:
        why = f"classes are 1 to {top}"
        choices["data.reduce_zero_label"] = "0 in a mask stands for no class", why
    classes = len(names) or top + 1 - reduced
    if top - reduced >= classes:
        raise UserError(
            f"{place} names {classes} classes, but its masks have {top}: name {top + 1}, "
            f"or set --config.data.ignore_label={top} if it stands for none"
        )
    if classes < 2:
        raise UserError(
            f"{place} has masks with only one class, {top}: write them with numbers from 0 "
            "on, one for each class"
        )
    why = "from their names" if names else f"the largest number in a mask is {top}"
    if ignored := pixels.get(ignore, 0):
        part = ignored / sum(pixels.values())
        why += f"; {part:.1%} of the pixels are {ignore}, without a class"
    choices["data.num_classes"] = f"{classes} classes of pixels", why
    return keys | {"num_classes": classes}, choices


def _pixels_of_values(source: Source, data: DataConfig) -> dict[int, int]:
    """Returns the number of pixels of each value, from at most 5,000 masks.

    Raises:
      UserError: a mask does not have class numbers.
    """
    numbers = np.linspace(0, len(source) - 1, min(_MOST_READ, len(source))).astype(int)
    pixels = collections.Counter()
    for i in progress.each(numbers.tolist(), "masks", "masks", leave=False):
        try:
            mask = masks.decode_mask(
                read_record(source, i)["mask"], data.max_megapixels
            )
        except DamagedImage:  # Training reports damaged images.
            continue
        except UserError as error:
            raise UserError(f"{name_of(source, i)}: {error}") from error
        values, counts = np.unique(mask, return_counts=True)
        pixels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    return dict(pixels)


def _grids(model: Model) -> list[tuple[int, int]]:
    """Returns rows and columns of the features of each layer."""
    images = jax.ShapeDtypeStruct((1, *model.image_shape), jnp.float32)
    layers = range(model.num_layers)
    compute = lambda params, images: model.layer_features(params, images, layers)
    return [one.shape[1:3] for one in jax.eval_shape(compute, model.shapes, images)]

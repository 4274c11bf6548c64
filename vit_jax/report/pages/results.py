"""What runs scored, and on which data set."""

import dataclasses
import re
from collections.abc import Sequence

from vit_jax.report.pages.blocks import Number
from vit_jax.report.pages.pretrained import (
    DATASETS,
    Model,
    dataset_name,
    model_of,
)
from vit_jax.report.pages.runs import Run

# Tasks of VTAB-1k in the order of table 9, as it calls them.
TASKS = {
    "caltech101": "Caltech101",
    "cifar100": "CIFAR-100",
    "dtd": "DTD",
    "flowers102": "Flowers102",
    "pets": "Pets",
    "sun397": "Sun397",
    "svhn": "SVHN",
    "camelyon": "Camelyon",
    "eurosat": "EuroSAT",
    "resisc45": "Resisc45",
    "retinopathy": "Retinopathy",
    "clevr_count": "Clevr-Count",
    "clevr_distance": "Clevr-Dist",
    "dmlab": "DMLab",
    "dsprites_position": "dSpr-Loc",
    "dsprites_orientation": "dSpr-Ori",
    "kitti_distance": "KITTI-Dist",
    "norb_azimuth": "sNORB-Azim",
    "norb_elevation": "sNORB-Elev",
}
# Parameters to quote where an evaluation has several.
_SETS = ("ema", "weights", "raw")


@dataclasses.dataclass(frozen=True)
class Result:
    """One accuracy.

    Attributes:
      model: that was judged.
      dataset: as the paper calls it, or its own name.
      value: top-1 in percent.
      spread: standard deviation over runs, in percent, or None.
      how: what kind of run this was.
      run: name of the run.
      tabled: whether it may stand beside the paper's, whose models are fine-tuned as a
        whole.
    """

    model: Model
    dataset: str
    value: Number
    spread: Number | None
    how: str
    run: str
    tabled: bool = True


def collect(runs: Sequence[Run]) -> list[Result]:
    """Returns the accuracies of all runs, those of the most careful protocol first."""
    found = []
    for run in runs:
        found += [*_transferred(run), *_evaluated(run)]
    return found + [result for run in runs for result in _trained(run)]


def best(results: Sequence[Result], model: Model, dataset: str) -> Result | None:
    """Returns the first accuracy for the paper's tables of a model on a data set."""
    found = (r for r in results if r.model == model and r.dataset == dataset)
    return next((result for result in found if result.tabled), None)


def models(found: Sequence[Result]) -> list[Model]:
    """Returns the models that were judged, each once."""
    unique = []
    for result in found:
        if result.model not in unique:
            unique.append(result.model)
    return unique


def quoted(kinds: dict) -> tuple[str, dict]:
    """Returns the scores of the averaged parameters, or of others if there are none."""
    name = next((kind for kind in _SETS if kind in kinds), next(iter(kinds), ""))
    return name, kinds.get(name, {})


def is_full(told: dict) -> bool:
    """Tells whether a transfer, or VTAB-1k, moved all parameters from the beginning."""
    return told.get("mode", "full") == "full"


def settings(told: dict) -> str:
    """Says how a transfer, or VTAB-1k, was done: "full, 384x384"."""
    words = [told.get("mode", "full").replace("_", " ")]
    if told.get("layer_decay"):
        words.append(f"layer decay {told['layer_decay']:g}")
    if size := told.get("resolution"):
        words.append("x".join(map(str, size)))
    return ", ".join(words)


def shots(scores: dict) -> dict[str, tuple[Number, Number | None]]:
    """Returns "5-shot" and so on: few-shot accuracy and its deviation, in percent."""
    found = {}
    for name, value in scores.items():
        if match := re.fullmatch(r"(\d+)shot", name):
            spread = scores.get(f"{name}_std")
            spread = None if spread is None else 100 * spread
            found[f"{match[1]}-shot"] = 100 * value, spread
    return found


def _transferred(run: Run) -> list[Result]:
    told = run.transfer
    if told is None or told["mean"] is None:
        return []
    spread = told.get("std")
    return [
        Result(
            model_of(told["model"], told["variant"]),
            dataset_name(told["dataset"]),
            100 * told["mean"],
            None if spread is None else 100 * spread,
            f"transfer, {settings(told)}, {len(told['runs'])} runs",
            run.name,
            is_full(told),
        )
    ]


def _evaluated(run: Run) -> list[Result]:
    told, found = run.evaluate, []
    if told is None:
        return []
    model = model_of(told["model"], told["variant"])
    for name, kinds in told["results"].items():
        kind, scores = quoted(kinds)
        about = told.get("evals", {}).get(name, {})
        data = dataset_name(about.get("dataset", name))
        if about.get("kind") == "real":
            data = DATASETS["real"]
        how = f"evaluate, {name}"
        if there := about.get("splits"):
            how += f" on {there[-1]}"
        own = about.get("kind", "classification") in ("classification", "real")
        tabled = own and (name in DATASETS or about.get("kind") == "real")
        for what, (value, spread) in _accuracies(scores).items():
            words = ", ".join(filter(None, (how, what, kind)))
            row = data, value, spread, words, run.name, tabled
            found.append(Result(model, *row))
    return found


def _accuracies(scores: dict) -> dict[str, tuple[Number, Number | None]]:
    """Returns what was scored ("" is top-1) to accuracy and deviation, in percent."""
    found = {"": (100 * scores["top1"], None)} if "top1" in scores else {}
    return found | shots(scores)


def _trained(run: Run) -> list[Result]:
    """Returns a training run's own scores; they are those of what it began with."""
    told, found = run.training, []
    if told is None:
        return []
    begun = told.get("init", "")
    model = model_of(begun or str(run.path), told.get("variant", ""))
    for name, kinds in told["final"].items():
        kind, scores = quoted(kinds)
        data = dataset_name(told.get("dataset", ""))
        if begun and name in DATASETS:
            data = DATASETS[name]
        elif not begun or name != "test":  # No transfer, or no test split.
            data = f"{data} ({name})"
        for what, (value, spread) in _accuracies(scores).items():
            how = ", ".join(filter(None, ("training, 1 run", what, kind)))
            row = data, value, spread, how, run.name, not what
            found.append(Result(model, *row))
    return found

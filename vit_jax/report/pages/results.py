"""What runs scored, on which data set, from which pretraining."""

import dataclasses
import re
from collections.abc import Sequence

from vit_jax.report.pages.blocks import Number
from vit_jax.report.pages.runs import Run, training_of

JFT, I21K, I1K = "JFT-300M", "ImageNet-21k", "ImageNet"
# Images of each (paper, section 4.1).
IMAGES = {I1K: 1_300_000, I21K: 14_000_000, JFT: 303_000_000}

# Data sets by their names here (those of TFDS, or of an evaluation) as the paper's
# tables call them.
DATASETS = {
    "imagenet2012": "ImageNet",
    "imagenet": "ImageNet",
    "real": "ReaL",
    "imagenet_real": "ReaL",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "oxford_iiit_pet": "Pets",
    "oxford_flowers102": "Flowers",
}
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
# What a data set that a run was pretrained on is called.
_PRETRAINING = {"imagenet2012": I1K, "imagenet21k": I21K, "jft300m": JFT}
# Sources that say in their names what they were pretrained on (weights/places).
_NAMED = (
    (r"augreg-i1k:|deit:|sam:|big_vision:", I1K),
    (r"paper:|augreg:|bit:|.*(imagenet21k|i21k|in21k)", I21K),
    (r".*imagenet2012", I1K),
)
# Names with a variant behind the colon, as "augreg:B/16-i1k-384".
_VARIANT = r"[a-z0-9_-]+:(?!//)([^-]+)"
# Parameters to quote where an evaluation has several.
_SETS = ("ema", "weights", "raw")


@dataclasses.dataclass(frozen=True)
class Model:
    """A pretrained model that was judged.

    Attributes:
      name: where it came from, as it was stated.
      variant: as "B/16"; "" if unknown.
      pretraining: JFT, I21K, I1K, another data set, or "" if unknown.
      images: size of the training split, or None if unknown.
      compute: of the pretraining, as `report.json` has it, or {}.
    """

    name: str
    variant: str
    pretraining: str = ""
    images: int | None = None
    compute: dict = dataclasses.field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """Names it in the head of a column."""
        return f"{self.variant or 'model'} ({short(self.name)})"

    @property
    def epochs(self) -> Number | None:
        """Passes over the pretraining split."""
        seen = self.compute.get("images_seen")
        return seen / self.images if seen and self.images else None


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
    """

    model: Model
    dataset: str
    value: Number
    spread: Number | None
    how: str
    run: str


def model_of(source: str, variant: str) -> Model:
    """Finds out what a source of weights was pretrained on, and with what compute.

    Args:
      source: a workdir, or the name of published weights, as `--model` takes them.
      variant: of the model; "" is looked up.

    Returns:
      The model; what is not stated anywhere stays unknown.
    """
    name, seen = source, []
    # A fine-tuned model leads to the one that it began with.
    while (told := training_of(name)) and told.get("init") and name not in seen:
        seen.append(name)
        name = told["init"]
    if told is None:
        data = next((d for pattern, d in _NAMED if re.match(pattern, name)), "")
        named = re.match(_VARIANT, source)
        variant = variant or (named[1] if data and named else "")
        return Model(source, variant, data, IMAGES.get(data))
    data = told.get("dataset", "")
    return Model(
        source,
        variant or told.get("variant", ""),
        _PRETRAINING.get(data.partition(":")[0], dataset_name(data)),
        told.get("examples"),
        told.get("compute", {}),
    )


def collect(runs: Sequence[Run]) -> list[Result]:
    """Returns the accuracies of all runs, those of the most careful protocol first."""
    found = []
    for run in runs:
        found += [*_transferred(run), *_evaluated(run)]
    return found + [result for run in runs for result in _trained(run)]


def best(results: Sequence[Result], model: Model, dataset: str) -> Result | None:
    """Returns the first accuracy of a model on a data set, or None."""
    return next((r for r in results if r.model == model and r.dataset == dataset), None)


def short(source: str) -> str:
    """Returns a source of weights, a folder by the end of its path."""
    return source if ":" in source else "/".join(source.split("/")[-2:])


def dataset_name(name: str) -> str:
    """Returns what the paper calls a data set, or its own name."""
    return DATASETS.get(name.partition(":")[0], name)


def quoted(kinds: dict) -> tuple[str, dict]:
    """Returns the scores of the averaged parameters, or of others if there are none."""
    name = next((kind for kind in _SETS if kind in kinds), next(iter(kinds), ""))
    return name, kinds.get(name, {})


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
            f"transfer, {len(told['runs'])} runs",
            run.name,
        )
    ]


def _evaluated(run: Run) -> list[Result]:
    told, found = run.evaluate, []
    if told is None:
        return []
    model = model_of(told["model"], told["variant"])
    for name, kinds in told["results"].items():
        kind, scores = quoted(kinds)
        if "top1" in scores:
            how = f"evaluate, {kind}"
            row = dataset_name(name), 100 * scores["top1"], None, how, run.name
            found.append(Result(model, *row))
    return found


def _trained(run: Run) -> list[Result]:
    """Returns a training run's own scores; they are those of what it began with."""
    told, found = run.training, []
    if told is None:
        return []
    begun = told.get("init", "")
    model = model_of(begun or str(run.path), told.get("variant", ""))
    for name, kinds in told["final"].items():
        kind, scores = quoted(kinds)
        if "top1" not in scores:
            continue
        data = dataset_name(told.get("dataset", ""))
        if begun and name in DATASETS:
            data = DATASETS[name]
        elif not begun or name != "test":  # No transfer, or no test split.
            data = f"{data} ({name})"
        how = f"training, 1 run, {kind}"
        found.append(Result(model, data, 100 * scores["top1"], None, how, run.name))
    return found

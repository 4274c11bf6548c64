"""Reads the folders of runs: what was trained, evaluated, and with which accuracy."""

import csv
import dataclasses
import json
import os
import re
from collections.abc import Sequence

from etils import epath

from vit_jax.analysis.charts import Number
from vit_jax.errors import UserError
from vit_jax.evaluators.fewshot import fewer_images
from vit_jax.training import run_report

_CONFUSION = ["class", "examples", "accuracy"]  # First columns of the CSV file.
_METRICS, _REPORT = "metrics.jsonl", "report.json"
# File -> required keys. All but the first state their kind.
_NEEDED = {
    _REPORT: ("config", "steps", "final"),
    "evaluate.json": ("kind", "model", "variant", "results"),
    "transfer.json": ("kind", "model", "variant", "dataset", "runs", "mean"),
    "vtab.json": ("kind", "model", "tasks"),
    "study.json": ("kind", "config", "points"),
}
_KINDS = {
    "evaluate.json": "evaluate",
    "transfer.json": "transfer",
    "vtab.json": "vtab",
    "study.json": "study",
}

JFT, I21K, I1K = "JFT-300M", "ImageNet-21k", "ImageNet"
# Training images (paper, section 4.1).
IMAGES = {I1K: 1_300_000, I21K: 14_000_000, JFT: 303_000_000}

# Name of a data set (of TFDS, or of an evaluation) -> name in the paper's tables.
DATASETS = {
    "imagenet2012": "ImageNet",
    "imagenet2012_real": "ImageNet",
    "imagenet": "ImageNet",
    "real": "ReaL",
    "imagenet_real": "ReaL",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "oxford_iiit_pet": "Pets",
    "oxford_flowers102": "Flowers",
}
# Name of a pretraining set -> name in the paper's tables.
_PRETRAINING = {"imagenet2012": I1K, "imagenet21k": I21K, "jft300m": JFT}
# Names of published weights that tell the pretraining set (weights/hub).
_NAMED = (
    (r"augreg-i1k:|deit:|sam:|big_vision:", I1K),
    (r"paper:|augreg:|bit:|.*(imagenet21k|i21k|in21k)", I21K),
    (r".*imagenet2012", I1K),
)
# Names with a variant after the colon, such as "augreg:B/16-i1k-384".
_VARIANT = r"[a-z0-9_-]+:(?!//)([^-]+)"

# Task of VTAB-1k -> its name in table 9, in the order of the table.
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


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of a run's folder; missing parts are None or empty.

    Attributes:
      name: the folder, with as many parents as make it distinct.
      path: as given.
      training: `report.json`.
      metrics: lines of `metrics.jsonl`.
      evaluate, transfer, vtab, study: the JSON file of that name.
      confusions: file name without suffix -> rows of a confusion matrix, as written by
        `result_tables.confusion_to_csv`: the head, and a row per true class.
      inner: title -> training runs in subfolders, with name, report and metrics only.
    """

    name: str
    path: epath.Path
    training: dict | None
    metrics: tuple[dict, ...]
    evaluate: dict | None
    transfer: dict | None
    vtab: dict | None
    study: dict | None
    confusions: dict[str, list[list[str]]]
    inner: dict[str, tuple["Run", ...]] = dataclasses.field(default_factory=dict)


def read_runs(paths: Sequence[str | os.PathLike]) -> list[Run]:
    """Reads the folders of runs.

    Args:
      paths: workdirs, and output folders of evaluate, transfer and study.

    Raises:
      UserError: a folder has none of the known files, or a file is damaged.
    """
    places = list(dict.fromkeys(epath.Path(path) for path in paths))
    return [
        _read(path, name) for path, name in zip(places, _names(places), strict=True)
    ]


def training_of(source: str) -> dict | None:
    """Returns `report.json` of a checkpoint if it is a workdir, else None."""
    if "://" in source or not epath.Path(source).is_dir():
        return None
    return _load(epath.Path(source) / _REPORT)


def _read(path: epath.Path, name: str) -> Run:
    found = {file: _load(path / file) for file in _NEEDED}
    metrics = _lines(path / _METRICS)
    if not metrics and not any(found.values()):
        if (path / "command.json").exists():
            raise UserError(
                f"{path} holds nothing that is finished yet: let its command go on"
            )
        raise UserError(
            f"{path} {'holds none' if path.is_dir() else 'is no folder with any'} of "
            f"{', '.join((*_NEEDED, _METRICS))}: give the workdir of a training run, or "
            "what evaluate, transfer or study wrote"
        )
    others = (found[file] for file in _KINDS)
    tables = _confusions(path) if found["evaluate.json"] else {}
    inner = _inner(path, found["transfer.json"], found["study.json"])
    return Run(name, path, found[_REPORT], metrics, *others, tables, inner)


def _inner(path: epath.Path, transfer: dict | None, study: dict | None) -> dict:
    """Reads the training runs in the folder of a transfer or a study."""
    places: dict[str, list[tuple[str, str]]] = {}
    for point in (study or {}).get("points", []):
        for stage, outcome in point["stages"].items():
            for one in outcome["runs"][:1]:  # The first seed.
                places.setdefault(stage, []).append((point["name"], one["folder"]))
    if transfer:
        trials = [
            f"rate{trial['learning_rate']:g}" for trial in transfer.get("trials", [])
        ]
        seeds = [f"seed{run['seed']}" for run in transfer["runs"]]
        places["transfer"] = [(name, f"trials/{name}") for name in trials]
        places["transfer"] += [(name, f"runs/{name}") for name in seeds]
    found = {}
    for title, named in places.items():
        read = tuple(_read_inner(path / folder, name) for name, folder in named)
        if there := tuple(run for run in read if run.metrics):
            found[title] = there
    return found


def _read_inner(path: epath.Path, name: str) -> Run:
    metrics = _lines(path / _METRICS)
    return Run(name, path, _load(path / _REPORT), metrics, *[None] * 4, {})


def _load(path: epath.Path) -> dict | None:
    try:
        values = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}): mend that, or leave "
            "its folder out"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}): it is damaged; run what wrote it again"
        ) from error
    values = values if isinstance(values, dict) else {}
    lacking = [key for key in _NEEDED[path.name] if key not in values]
    kind = _KINDS.get(path.name)
    if lacking or (kind and values["kind"] != kind):
        what = f"lacks {', '.join(lacking)}"
        if not lacking:
            what = f"is of the kind {values['kind']!r}, not {kind!r}"
        raise UserError(f"{path} {what}: give a folder that this version wrote")
    return values


def _lines(path: epath.Path) -> tuple[dict, ...]:
    """Reads metrics; the last line may be incomplete while a run is under way."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    lines = []
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and "step" in values:
            lines.append(values)
    return tuple(lines)


def _confusions(path: epath.Path) -> dict[str, list[list[str]]]:
    """Reads the confusion matrices in the folder of an evaluation."""
    found = {}
    for file in sorted(path.glob("*.csv")):
        rows = list(csv.reader(file.read_text().splitlines()))
        if rows and rows[0][: len(_CONFUSION)] == _CONFUSION:
            found[file.stem] = rows
    return found


def _names(places: Sequence[epath.Path]) -> list[str]:
    """Returns for each path the shortest suffix that is unique among them."""
    whole = [p.parts if "://" in str(p) else p.resolve().parts for p in places]

    def end(parts, length):
        return "/".join(parts[-length:])

    def shortest(parts):
        lengths = range(1, len(parts) + 1)
        ends = ((n, end(parts, n)) for n in lengths)
        alone = (e for n, e in ends if sum(end(p, n) == e for p in whole) == 1)
        return next(alone, end(parts, len(parts)))

    return [shortest(parts) for parts in whole]


@dataclasses.dataclass(frozen=True)
class Model:
    """A pretrained model of which scores are reported.

    Attributes:
      name: checkpoint that it was loaded from, as stated.
      variant: such as "B/16"; "" if unknown.
      pretraining: JFT, I21K, I1K, another data set, or "" if unknown.
      images: size of the pretraining split, None if unknown.
      compute: of the pretraining, from `report.json`; {} if unknown.
    """

    name: str
    variant: str
    pretraining: str = ""
    images: int | None = None
    compute: dict = dataclasses.field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """Column heading."""
        return f"{self.variant or 'model'} ({short_name(self.name)})"

    @property
    def epochs(self) -> Number | None:
        """Pretraining epochs, None if unknown."""
        seen = self.compute.get("images_seen")
        return seen / self.images if seen and self.images else None


def model_of(source: str, variant: str) -> Model:
    """Returns the pretraining of a checkpoint, as far as it is known.

    Args:
      source: a workdir, or the name of published weights, as in `--model`.
      variant: of the model; looked up if "".
    """
    name, seen = source, []
    # A fine-tuned model leads to the checkpoint that it started from.
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


def short_name(source: str) -> str:
    """Returns a short name of a checkpoint: of a folder, the end of its path."""
    return source if ":" in source else "/".join(source.split("/")[-2:])


def dataset_name(name: str) -> str:
    """Returns the name of a data set in the paper, or its own name."""
    return DATASETS.get(name.partition(":")[0], name)


@dataclasses.dataclass(frozen=True)
class Result:
    """One accuracy.

    Attributes:
      model: model that was scored.
      dataset: name in the paper, or its own name.
      value: top-1 in percent.
      spread: standard deviation over runs, in percent, or None.
      how: kind of run.
      run: name of the run.
      tabled: whether it is comparable with the paper, which fine-tunes all parameters.
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
    return found + [one for run in runs for one in _trained(run)]


def best(results: Sequence[Result], model: Model, dataset: str) -> Result | None:
    """Returns the first comparable accuracy of a model on a data set, or None."""
    found = (r for r in results if r.model == model and r.dataset == dataset)
    return next((one for one in found if one.tabled), None)


def models(found: Sequence[Result]) -> list[Model]:
    """Returns the distinct models, in order."""
    unique = []
    for one in found:
        if one.model not in unique:
            unique.append(one.model)
    return unique


def is_full(told: dict) -> bool:
    """Returns whether a transfer or VTAB-1k run fine-tuned all parameters."""
    return told.get("mode", "full") == "full"


def describe_settings(told: dict) -> str:
    """Describes the settings of a transfer or VTAB-1k run: "full, 384x384"."""
    words = [told.get("mode", "full").replace("_", " ")]
    if told.get("layer_decay"):
        words.append(f"layer decay {told['layer_decay']:g}")
    if size := told.get("resolution"):
        words.append("x".join(map(str, size)))
    return ", ".join(words)


def shots(scores: dict) -> dict[str, tuple[Number, Number | None]]:
    """Returns "5-shot" and so on -> accuracy and standard deviation, in percent.

    Of classes with fewer images the key says how many: "5-shot (2 classes have fewer
    images)".
    """
    found = {}
    for name, value in scores.items():
        if match := re.fullmatch(r"(\d+)shot", name):
            spread = scores.get(f"{name}_std")
            spread = None if spread is None else 100 * spread
            what = f"{match[1]}-shot{fewer_images(name, scores)}"
            found[what] = 100 * value, spread
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
            f"transfer, {describe_settings(told)}, {len(told['runs'])} runs",
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
        kind, scores = run_report.quoted_scores(kinds)
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
    """Returns "" (top-1), "5-shot" and so on -> accuracy and deviation, in percent."""
    found = {"": (100 * scores["top1"], None)} if "top1" in scores else {}
    return found | shots(scores)


def _trained(run: Run) -> list[Result]:
    """Returns the scores of a training run, for the checkpoint it started from."""
    told, found = run.training, []
    if told is None:
        return []
    begun = told.get("init", "")
    model = model_of(begun or str(run.path), told.get("variant", ""))
    for name, kinds in told["final"].items():
        kind, scores = run_report.quoted_scores(kinds)
        data = dataset_name(told.get("dataset", ""))
        if begun and name in DATASETS:
            data = DATASETS[name]
        elif not begun or name != "test":  # Not a transfer, or not a test split.
            data = f"{data} ({name})"
        for what, (value, spread) in _accuracies(scores).items():
            how = ", ".join(filter(None, ("training, 1 run", what, kind)))
            row = data, value, spread, how, run.name, not what
            found.append(Result(model, *row))
    return found

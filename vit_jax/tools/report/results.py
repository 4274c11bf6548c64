"""Reads the folders of runs: trained and evaluated models, and their accuracies."""

import collections
import contextlib
import csv
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator, Sequence

from etils import epath

from vit_jax.analysis.charts import Number
from vit_jax.data.sources import vtab
from vit_jax.errors import UserError
from vit_jax.evaluators.metric_names import fewer_images
from vit_jax.training import run_report

_CONFUSION = ["class", "examples", "accuracy"]  # First columns of the CSV file.
_METRICS, _REPORT = "metrics.jsonl", "report.json"
# Required keys by file; the value of "kind" is the file's name without suffix.
_NEEDED = {
    _REPORT: ("config", "steps", "final"),
    "evaluate.json": ("kind", "model", "variant", "results"),
    "transfer.json": ("kind", "model", "variant", "dataset", "runs", "mean"),
    "vtab.json": ("kind", "model", "tasks"),
    "study.json": ("kind", "config", "points"),
}

JFT, I21K, I1K = "JFT-300M", "ImageNet-21k", "ImageNet"
# Number of training images (section 4.1 of the paper).
IMAGES = {I1K: 1_300_000, I21K: 14_000_000, JFT: 303_000_000}

# Names in the paper's tables, by name of a data set (of TFDS, or of an evaluation).
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
# Names in the paper's tables, by name of a pretraining set.
_PRETRAINING = {"imagenet2012": I1K, "imagenet21k": I21K, "jft300m": JFT}
# Patterns in the names of published weights (weights/hub), with the pretraining set.
_NAMED = (
    (r"augreg-i1k:|deit:|sam:|big_vision:", I1K),
    (r"paper:|augreg:|bit:|.*(imagenet21k|i21k|in21k)", I21K),
    (r".*imagenet2012", I1K),
)
# Pattern of names with a variant after the colon, such as "augreg:B/16-i1k-384".
_VARIANT = r"[a-z0-9_-]+:(?!//)([^-]+)"


@functools.cache
def vtab_tasks() -> dict[str, str]:
    """Returns names in table 9 by task of VTAB-1k, in the order of the table."""
    names = run_report.published_tables()["table9"]["cols"][:-1]
    return dict(zip(vtab.TASKS, names, strict=True))


@dataclasses.dataclass(frozen=True)
class Run:
    """Content of a run's folder; missing parts are None or empty.

    Attributes:
      name: name of the folder, with as many parents as make it distinct.
      metrics: lines of metrics.jsonl.
      training: content of report.json.
      confusions: rows of each confusion matrix, by file name without suffix, as written
        by `result_tables.confusion_to_csv`: the head, and a row per true class.
      inner: training runs in subfolders by title, with only name, report and metrics.
    """

    name: str
    path: epath.Path
    metrics: tuple[dict, ...]
    training: dict | None = None
    evaluate: dict | None = None
    transfer: dict | None = None
    vtab: dict | None = None
    study: dict | None = None
    confusions: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)
    inner: dict[str, tuple["Run", ...]] = dataclasses.field(default_factory=dict)


def read_runs(paths: Sequence[str | os.PathLike]) -> list[Run]:
    """Reads workdirs, and output folders of evaluate, transfer and study.

    Raises:
      UserError: a folder has none of the known files, or a file is damaged.
    """
    folders = list(dict.fromkeys(map(epath.Path, paths)))
    return [*map(_read, folders, _names(folders))]


def _read(path: epath.Path, name: str) -> Run:
    files = {file: _load(path / file) for file in _NEEDED}
    metrics = _lines(path / _METRICS)
    if not metrics and not any(files.values()):
        if (path / "command.json").exists():
            raise UserError(
                f"{path} holds nothing that is finished yet: wait for its command"
            )
        raise UserError(
            f"{path} {'holds none' if path.is_dir() else 'is not a folder with any'} of "
            f"{', '.join((*_NEEDED, _METRICS))}: give the workdir of a training run, or a "
            "folder written by evaluate, transfer or study"
        )
    confusions = _confusions(path) if files["evaluate.json"] else {}
    inner = _inner(path, files["transfer.json"], files["study.json"])
    return Run(name, path, metrics, *files.values(), confusions, inner)


def _inner(path: epath.Path, transfer: dict | None, study: dict | None) -> dict:
    """Reads the training runs in the folder of a transfer or a study."""
    folders = collections.defaultdict(list)  # Names and subfolders by title.
    for point in (study or {}).get("points", []):
        for stage, outcome in point["stages"].items():
            for one in outcome["runs"][:1]:  # The first seed.
                folders[stage].append((point["name"], one["folder"]))
    if transfer:
        rates = [trial["learning_rate"] for trial in transfer.get("trials", [])]
        folders["transfer"] = [(f"rate{r:g}", f"trials/rate{r:g}") for r in rates]
        seeds = [f"seed{run['seed']}" for run in transfer["runs"]]
        folders["transfer"] += [(name, f"runs/{name}") for name in seeds]
    inner = {
        title: tuple(
            Run(name, path / folder, metrics, _load(path / folder / _REPORT))
            for name, folder in named
            if (metrics := _lines(path / folder / _METRICS))
        )
        for title, named in folders.items()
    }
    return {title: trained for title, trained in inner.items() if trained}


def _load(path: epath.Path) -> dict | None:
    try:
        values = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}): fix that, or leave "
            "out its folder"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}): it is damaged; repeat the command that wrote it"
        ) from error
    values = values if isinstance(values, dict) else {}
    if lacking := [key for key in _NEEDED[path.name] if key not in values]:
        what = f"lacks {', '.join(lacking)}"
    elif "kind" in _NEEDED[path.name] and values["kind"] != path.stem:
        what = f"has the kind {values['kind']!r}, not {path.stem!r}"
    else:
        return values
    raise UserError(f"{path} {what}: give a folder that this version wrote")


def _lines(path: epath.Path) -> tuple[dict, ...]:
    """Reads metrics; while a run trains, the last line may be incomplete."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return tuple(x for x in lines if isinstance(x, dict) and "step" in x)


def _confusions(path: epath.Path) -> dict[str, list[list[str]]]:
    """Reads the confusion matrices in the folder of an evaluation."""
    tables = {
        file.stem: list(csv.reader(file.read_text().splitlines()))
        for file in sorted(path.glob("*.csv"))
    }
    heads = {name: rows[0][: len(_CONFUSION)] for name, rows in tables.items() if rows}
    return {name: tables[name] for name in heads if heads[name] == _CONFUSION}


def _names(paths: Sequence[epath.Path]) -> list[str]:
    """Returns for each path the shortest suffix that no other path has."""
    whole = [p.parts if "://" in str(p) else p.resolve().parts for p in paths]

    def shortest(parts):
        for length in range(1, len(parts) + 1):
            if [other[-length:] for other in whole].count(parts[-length:]) == 1:
                return "/".join(parts[-length:])
        return "/".join(parts)

    return [*map(shortest, whole)]


@dataclasses.dataclass(frozen=True)
class Model:
    """A pretrained model whose scores are reported.

    Attributes:
      name: name or path of the checkpoint.
      variant: variant, such as "B/16"; "" if unknown.
      pretraining: JFT, I21K, I1K, another data set, or "" if unknown.
      images: number of images in the pretraining split.
      compute: compute of the pretraining, from report.json; {} if unknown.
    """

    name: str
    variant: str
    pretraining: str = ""
    images: int | None = None
    compute: dict = dataclasses.field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """Heading of the model's column."""
        return f"{self.variant or 'model'} ({short_name(self.name)})"

    @property
    def epochs(self) -> Number | None:
        """Number of pretraining epochs; None if unknown."""
        seen = self.compute.get("images_seen")
        return seen / self.images if seen and self.images else None


def _report(source: str) -> dict | None:
    """Returns the content of report.json if a checkpoint is a workdir, else None."""
    folder = epath.Path(source)
    return None if "://" in source or not folder.is_dir() else _load(folder / _REPORT)


def model_of(source: str, variant: str) -> Model:
    """Returns a checkpoint with the known facts about its pretraining.

    `source` is a workdir, or the name of published weights, as for `--model`.
    """
    name, seen = source, []
    # A fine-tuned model has the pretraining of the checkpoint that it was started from.
    while (report := _report(name)) and report.get("init") and name not in seen:
        seen.append(name)
        name = report["init"]
    if report is None:
        data = next((d for pattern, d in _NAMED if re.match(pattern, name)), "")
        named = re.match(_VARIANT, source)
        variant = variant or (named[1] if data and named else "")
        return Model(source, variant, data, IMAGES.get(data))
    data = report.get("dataset", "")
    return Model(
        source,
        variant or report.get("variant", ""),
        _PRETRAINING.get(data.partition(":")[0], dataset_name(data)),
        report.get("examples"),
        report.get("compute", {}),
    )


def short_name(source: str) -> str:
    """Returns a short name of a checkpoint: the last two parts of a folder's path."""
    return source if ":" in source else "/".join(source.split("/")[-2:])


def dataset_name(name: str) -> str:
    """Returns the paper's name of a data set; unchanged if the paper does not have it."""
    return DATASETS.get(name.partition(":")[0], name)


@dataclasses.dataclass(frozen=True)
class Result:
    """One accuracy.

    Attributes:
      model: model that was scored.
      dataset: name of the data set, the paper's if it has one.
      value: top-1 in percent.
      spread: standard deviation over runs, in percent, or None.
      how: description of the run.
      run: name of the run.
      tabled: whether the score is comparable with the paper, which fine-tunes all
        parameters.
    """

    model: Model
    dataset: str
    value: Number
    spread: Number | None
    how: str
    run: str
    tabled: bool = True


def collect(runs: Sequence[Run]) -> list[Result]:
    """Returns the accuracies of all runs, with the most careful protocol first."""
    scored = [one for run in runs for one in (*_transferred(run), *_evaluated(run))]
    return scored + [one for run in runs for one in _trained(run)]


def best(results: Sequence[Result], model: Model, dataset: str) -> Result | None:
    """Returns the first comparable accuracy of a model on a data set, or None."""
    matches = (r for r in results if r.model == model and r.dataset == dataset)
    return next((one for one in matches if one.tabled), None)


def models(results: Sequence[Result]) -> list[Model]:
    """Returns the distinct models, in order."""
    return list(dict.fromkeys(one.model for one in results))


def is_full(report: dict) -> bool:
    """Returns whether a transfer or VTAB-1k run fine-tuned all parameters."""
    return report.get("mode", "full") == "full"


def describe_settings(report: dict) -> str:
    """Describes the settings of a transfer or VTAB-1k run: "full, 384x384"."""
    words = [report.get("mode", "full").replace("_", " ")]
    if report.get("layer_decay"):
        words.append(f"layer decay {report['layer_decay']:g}")
    if size := report.get("resolution"):
        words.append("x".join(map(str, size)))
    return ", ".join(words)


def _in_percent(value: Number | None) -> Number | None:
    return None if value is None else 100 * value


def _transferred(run: Run) -> Iterator[Result]:
    report = run.transfer
    if report is None or report["mean"] is None:
        return
    how = f"transfer, {describe_settings(report)}, {len(report['runs'])} runs"
    yield Result(
        model_of(report["model"], report["variant"]),
        dataset_name(report["dataset"]),
        100 * report["mean"],
        _in_percent(report.get("std")),
        how,
        run.name,
        is_full(report),
    )


def _evaluated(run: Run) -> Iterator[Result]:
    if (report := run.evaluate) is None:
        return
    model = model_of(report["model"], report["variant"])
    for name, kinds in report["results"].items():
        kind, scores = run_report.quoted_scores(kinds)
        about = report.get("evals", {}).get(name, {})
        is_real = about.get("kind") == "real"
        data = "real" if is_real else about.get("dataset", name)
        how = f"evaluate, {name}"
        if splits := about.get("splits"):
            how += f" on {splits[-1]}"
        classifies = is_real or about.get("kind", "classification") == "classification"
        tabled = classifies and (name in DATASETS or is_real)
        for what, accuracy in _accuracies(scores).items():
            words = ", ".join(filter(None, (how, what, kind)))
            yield Result(model, dataset_name(data), *accuracy, words, run.name, tabled)


def _accuracies(scores: dict) -> dict[str, tuple[Number, Number | None]]:
    """Returns accuracy and deviation in percent, by "" (top-1), "5-shot" and so on.

    A key may include the number of small classes: "5-shot (2 classes have fewer
    images)".
    """
    accuracies = {"": (100 * scores["top1"], None)} if "top1" in scores else {}
    for name, value in scores.items():
        if match := re.fullmatch(r"(\d+)shot", name):
            spread = _in_percent(scores.get(f"{name}_std"))
            what = f"{match[1]}-shot{fewer_images(name, scores)}"
            accuracies[what] = 100 * value, spread
    return accuracies


def _trained(run: Run) -> Iterator[Result]:
    """Yields the scores of a training run, for the checkpoint that it started from."""
    if (report := run.training) is None:
        return
    start = report.get("init", "")
    model = model_of(start or str(run.path), report.get("variant", ""))
    for name, kinds in report["final"].items():
        kind, scores = run_report.quoted_scores(kinds)
        data = dataset_name(report.get("dataset", ""))
        if start and name in DATASETS:
            data = DATASETS[name]
        elif not start or name != "test":  # Not a transfer, or not on a test split.
            data = f"{data} ({name})"
        for what, accuracy in _accuracies(scores).items():
            how = ", ".join(filter(None, ("training, 1 run", what, kind)))
            yield Result(model, data, *accuracy, how, run.name, not what)

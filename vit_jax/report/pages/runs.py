"""Reading what runs have left in their folders."""

import csv
import dataclasses
import json
import os
from collections.abc import Sequence

from etils import epath

from vit_jax.errors import UserError

_CONFUSION = ["class", "examples", "accuracy"]  # The first columns.
_METRICS, _REPORT = "metrics.jsonl", "report.json"
# File to the keys that a report cannot do without. All but the first state their kind.
_NEEDED = {
    _REPORT: ("config", "steps", "final"),
    "evaluate.json": ("kind", "model", "variant", "results"),
    "transfer.json": ("kind", "model", "variant", "dataset", "runs", "mean"),
    "vtab.json": ("kind", "model", "tasks"),
    "study.json": ("kind", "points"),
}
_KINDS = {
    "evaluate.json": "evaluate",
    "transfer.json": "transfer",
    "vtab.json": "vtab",
    "study.json": "scaling",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a folder holds; a part that it lacks is None or empty.

    Attributes:
      name: of the folder, with as many of its parents as tell it from others.
      path: as it was given.
      training: `report.json`.
      metrics: lines of `metrics.jsonl`.
      evaluate, transfer, vtab, study: the file of that name.
      confusions: stem of a file to the table in it, as `confusion.to_csv` writes it:
        the head, and a row for each true class.
      inner: what to call them to the training runs in folders of this one, as far as
        they are there; of each only its name, report and metrics.
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


def read(paths: Sequence[str | os.PathLike]) -> list[Run]:
    """Reads the folders of runs.

    Args:
      paths: of workdirs, and of folders that evaluations, transfers and studies wrote.

    Returns:
      One for each.

    Raises:
      UserError: a folder holds nothing that is known, or a file is damaged.
    """
    places = list(dict.fromkeys(epath.Path(path) for path in paths))
    return [
        _read(path, name) for path, name in zip(places, _names(places), strict=True)
    ]


def training_of(source: str) -> dict | None:
    """Returns `report.json` of a source of weights, if it is a run's workdir."""
    if "://" in source or not epath.Path(source).is_dir():
        return None
    return _load(epath.Path(source) / _REPORT)


def _read(path: epath.Path, name: str) -> Run:
    found = {file: _load(path / file) for file in _NEEDED}
    metrics = _lines(path / _METRICS)
    if not metrics and not any(found.values()):
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
    """Reads the training runs that a transfer or a study has left."""
    places: dict[str, list[tuple[str, str]]] = {}
    for point in (study or {}).get("points", []):
        title = f"pretraining on {point['images']:,} images"
        folder = f"{point['model']}-{point['images']}/pretrain"
        places.setdefault(title, []).append((point["model"], folder))
    if transfer:
        trials = [f"rate{trial['rate']:g}" for trial in transfer.get("trials", [])]
        seeds = [f"seed{run['seed']}" for run in transfer["runs"]]
        places["transfer"] = [(name, f"trials/{name}") for name in trials]
        places["transfer"] += [(name, f"runs/{name}") for name in seeds]
    found = {}
    for title, named in places.items():
        read = tuple(_lines_of(path / folder, name) for name, folder in named)
        if there := tuple(run for run in read if run.metrics):
            found[title] = there
    return found


def _lines_of(path: epath.Path, name: str) -> Run:
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
    """Reads metrics; the last line of a run that goes on may be half written."""
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
    """Reads the confusion matrices that an evaluation left beside its scores."""
    found = {}
    for file in sorted(path.glob("*.csv")):
        rows = list(csv.reader(file.read_text().splitlines()))
        if rows and rows[0][: len(_CONFUSION)] == _CONFUSION:
            found[file.stem] = rows
    return found


def _names(places: Sequence[epath.Path]) -> list[str]:
    """Returns for each path the shortest end that no other one has."""
    whole = [p.parts if "://" in str(p) else p.resolve().parts for p in places]

    def end(parts, length):
        return "/".join(parts[-length:])

    def shortest(parts):
        lengths = range(1, len(parts) + 1)
        ends = ((n, end(parts, n)) for n in lengths)
        alone = (e for n, e in ends if sum(end(p, n) == e for p in whole) == 1)
        return next(alone, end(parts, len(parts)))

    return [shortest(parts) for parts in whole]

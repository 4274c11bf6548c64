"""The plain data that the `get_study` of a config file returns, and its checks.

It consists of numbers, strings, booleans, and tuples, lists and dicts of them, since it
is stored in study.json.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from vit_jax.errors import UserError
from vit_jax.tools.sweeps import runs, step_cost

# Functions with the arguments and the report of `runs.train`, by name of a measurement.
MEASURES = {"train": runs.train, "cost": step_cost.measure}
_COLUMNS = ("exaflops", "images_seen", "name")  # Columns that every point has.


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """The content of a study.

    Attributes:
      axes: values by argument of `get_config`. The first axis varies slowest.
      scores: "EVALUATION/METRIC" of the last stage, or "STAGE:EVALUATION/METRIC", by
        name of a column. Points are ranked by the first score.
      stages: values of the argument `stage` of `get_config`; each stage starts from the
        weights of the one before. A study with one stage needs no such argument.
      measure: name in `MEASURES` of the measurement at each point.
      seeds: number of runs per point.
      tune: values by stage and dotted key, or a dict of them by value of an axis; the
        best combination is chosen for each point.
      tune_by: "EVALUATION/METRIC" of the same stage, which chooses.
      labels: texts by name of a column and value of an axis, to group points by.
      published: first score in the paper, by name of a point.
      source: source of the published scores.
      figures: charts, see tools/report/study_blocks.py.
      laws: fits of y = a + b x^-c, see tools/report/study_blocks.py.
    """

    axes: Mapping[str, Sequence]
    scores: Mapping[str, str]
    stages: Sequence[str] = ("train",)
    measure: str = "train"
    seeds: int = 1
    tune: Mapping[str, Mapping[str, Sequence | Mapping[str, Sequence]]] = (
        dataclasses.field(default_factory=dict)
    )
    tune_by: str = "val/top1"
    labels: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""
    figures: Sequence[Mapping[str, object]] = ()
    laws: Sequence[Mapping[str, object]] = ()

    def stage_and_path(self, score: str) -> tuple[str, str]:
        """Returns the stage of a score and its path in the stage's report."""
        stage, colon, path = score.partition(":")
        return (stage, path) if colon else (self.stages[-1], score)

    def grid(self, stage: str, axes: Mapping[str, object]) -> list[dict]:
        """Returns all combinations of the values to try at a point with these axes.

        The last key varies fastest.
        """
        keys = {}
        for key, values in self.tune.get(stage, {}).items():
            if isinstance(values, Mapping):
                values = next(values[v] for v in map(str, axes.values()) if v in values)
            keys[key] = values
        return [
            dict(zip(keys, values, strict=True))
            for values in itertools.product(*keys.values())
        ]


def complete(raw: Mapping, path: str) -> StudyConfig:
    """Checks what `get_study` returned, and returns it as a `StudyConfig`.

    Args:
      raw: value that `get_study` returned.
      path: path of the config file, for messages.

    Raises:
      UserError: a key or a value is wrong; the message describes the required form.
    """
    for problem in _problems(raw):
        raise UserError(f"{path}: get_study returns {problem}")
    return StudyConfig(**raw)


def _problems(raw: Mapping) -> Iterator[str]:
    """Yields the problems; each check assumes that those before it passed."""
    known = [field.name for field in dataclasses.fields(StudyConfig)]
    for key in raw:
        if key not in known:
            yield f"{key!r}, which is not one of {', '.join(known)}"
    for key in ("axes", "scores"):
        if not raw.get(key):
            yield f"no {key}"
    for key, (form, text) in _FORMS.items():
        if key in raw and not _fits(raw[key], form):
            yield f"{key}={raw[key]!r}: give {text}"
    config = StudyConfig(**raw)
    if config.measure not in MEASURES:
        among = ", ".join(MEASURES)
        yield f"measure={config.measure!r}, which is not one of {among}"
    stages = ", ".join(config.stages)
    for stage in config.tune:
        if stage not in config.stages:
            yield f"tune.{stage}, but its stages are {stages}"
    for name, score in config.scores.items():
        if config.stage_and_path(score)[0] not in config.stages:
            yield f"scores.{name}={score!r}, but its stages are {stages}"
    for stage, keys in config.tune.items():
        for key, values in keys.items():
            if isinstance(values, Mapping) and not any(
                {str(v) for v in of_axis} <= values.keys()
                for of_axis in config.axes.values()
            ):
                among = ", ".join(values)
                yield (
                    f"tune.{stage}[{key!r}] for {among}, which are not all the values of "
                    "an axis"
                )
    # Figures and laws can use only columns that points have.
    columns = [*config.axes, *config.labels, *_COLUMNS]
    drawn = [("figures", one) for one in config.figures]
    for name, one in (*drawn, *(("laws", law) for law in config.laws)):
        # The y of a training curve is an evaluation, not a score.
        y_of = [one["y"]] if one["x"] == "step" else [*config.scores]
        x_of = [*columns, "step"] if name == "figures" else columns
        lines = [*one.get("lines", ()), *filter(None, [one.get("colours")])]
        used = [("x", one["x"], x_of), ("y", one["y"], y_of)]
        for key, value, among in used + [("lines", line, columns) for line in lines]:
            if value not in among:
                among = ", ".join(among)
                yield f"{name} with {key}={value!r}, which is not one of {among}"


def _fits(value: object, form: object) -> bool:
    """Returns whether a value has a form: a predicate, or {str: form} for a dict."""
    if not isinstance(form, dict):
        return form(value)
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _fits(part, form[str]) for key, part in value.items()
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_path(value: object) -> bool:
    return _is_text(value) and "/" in value


def _are_plain(values: object) -> bool:
    """Returns whether a value is a sequence of one or more distinct plain values."""
    return (
        isinstance(values, tuple | list)
        and all(type(value) in (int, float, str, bool) for value in values)
        and 0 < len(values) == len(set(map(str, values)))
    )


def _is_tuned(values: object) -> bool:
    return _are_plain(values) or _fits(values, {str: _are_plain})


def _are_drawings(values: object, required: tuple[str, ...] = ()) -> bool:
    return isinstance(values, tuple | list) and all(
        isinstance(value, Mapping)
        and _is_text(value.get("x"))
        and _is_text(value.get("y"))
        and isinstance(value.get("lines", ()), tuple | list)
        and all(key in value for key in required)
        for value in values
    )


_VALUES = "a tuple of different numbers or strings of Python, not of NumPy"
_TUNED = f"{_VALUES} (or to a dict of an axis's values to such tuples)"
_FORMS = {
    "axes": ({str: _are_plain}, f"a dict of arguments to {_VALUES}"),
    "scores": ({str: _is_path}, "a dict of names to EVALUATION/METRIC"),
    "stages": (lambda v: _are_plain(v) and all(map(_is_text, v)), "a tuple of texts"),
    "measure": (_is_text, "a text"),
    "seeds": (lambda v: type(v) is int and v > 0, "a positive integer"),
    "tune": ({str: {str: _is_tuned}}, f"a dict of stages to dicts of keys to {_TUNED}"),
    "tune_by": (_is_path, "EVALUATION/METRIC"),
    "labels": (
        {str: {str: _is_text}},
        "a dict of columns to dicts of an axis's values to texts",
    ),
    "published": (
        {str: lambda v: v is None or type(v) in (int, float)},
        "a dict of points' names to numbers",
    ),
    "source": (_is_text, "a text"),
    "figures": (_are_drawings, "a tuple of dicts with x and y, and lines as a tuple"),
    "laws": (
        lambda v: _are_drawings(v, ("lines",)),
        "a tuple of dicts with x, y and lines, a tuple",
    ),
}

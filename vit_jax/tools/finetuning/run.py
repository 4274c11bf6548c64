"""Fine-tunes a network on a user's images, from the folder to the accuracy."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from etils import epath

from vit_jax import models, weights
from vit_jax.config import fields, loading
from vit_jax.data import fingerprint
from vit_jax.data.sources.base import read_labels
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.files import read_json, replace_text
from vit_jax.printing import masked
from vit_jax.tools.finetuning import layout, rate_range, report, rule, trial
from vit_jax.tools.finetuning.rule import Choice
from vit_jax.tools.sweeps import fine_tuning, runs
from vit_jax.training import loop, run_report
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import TrainConfig, complete
from vit_jax.training.timers import StartupTimer
from vit_jax.weights import workdir as workdirs
from vit_jax.weights.pretrained import Preprocess, Pretrained

FILE = "finetune.json"
SMALL_MODEL, MODEL = "deit:Ti/16", "augreg:S/16"
MINUTES = 15.0
# Keys of `config.data` that describe the layout of the images.
_LAYOUT_KEYS = ("image_key", "label_key", "multi_label", "data_dir")
_LAYOUT_KEYS += ("image_dir", "image_suffix")
_FLAGS = {
    "init": "--model",
    "init.checkpoint": "--model",
    "data.name": "the folder or name",
    "data.split": "the folder or name",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of fine-tuning.

    Attributes:
      report: content of the run's report.json.
      split: evaluation that is scored, "test" or "val".
      metric: "top1", or "map" if images have several labels.
      score: score of the best checkpoint, of averaged parameters if the run has them.
      interval: 95 % interval of top1; None for map.
      examples: number of images that were scored.
      looks: number of evaluations on these images that chose the checkpoint.
      workdir: workdir of the run, which every command accepts as a model.
      page: path of the page on mistakes; "" with several processes.
      folds: number of runs that each scored another part of the images; 0 for one run.
      counts: class -> number of images that were scored; empty if unknown.
    """

    report: dict
    split: str
    metric: str
    score: float
    interval: tuple[float, float] | None
    examples: int
    looks: int
    workdir: str
    page: str = ""
    folds: int = 0
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


def finetune(
    place: str,
    workdir: str,
    *,
    model: str = "",
    minutes: float = MINUTES,
    folds: int = 0,
    overrides: Mapping[str, object] | None = None,
    callbacks: Iterable[Callback] = (),
    say: Callable[[str], None] = print,
) -> Result:
    """Fine-tunes weights on images; the same call resumes after an interruption.

    Args:
      place: folder, table, or name of a data set, see layout.py.
      workdir: folder of the run.
      model: weights; if empty, DeiT-Ti on a CPU and AugReg S/16 on other devices.
      minutes: time to train and evaluate; 0 for no limit.
      folds: number of runs for cross-validation, each of which validates on another part
        of the images; the first run is the model, the others are under workdir/folds. 0
        for one run.
      overrides: dotted config key -> value, instead of the chosen one.
      callbacks: callbacks of the training run.
      say: function called with lines about the images and the choices.

    Raises:
      UserError: the images or weights cannot be read or do not fit, or the workdir holds
        another run.
    """
    if folds < 0 or folds == 1:
        raise UserError(f"folds={folds}: give two or more, or 0 for one run")
    overrides = _allowed(overrides)
    model = _model(model)
    at = os.path.abspath(os.path.expanduser(place))
    place = at if os.path.exists(at) else place
    trained = []
    for fold in range(folds or 1):
        folder = os.path.join(workdir, "folds", str(fold)) if fold else workdir
        if folds:
            say(f"fold {fold + 1} of {folds}: {folder}")
        run = place, folder, model, minutes / (folds or 1), (fold, folds)
        trained.append(_train(*run, overrides, callbacks, say))
    config, result = trained[0]
    if folds:
        result = _pooled([one for _, one in trained])
    if jax.process_count() > 1:  # No process has all parameters.
        return result
    say("looking at mistakes")
    page = report.write(config, workdir, result.split, summary(result)[0])
    return dataclasses.replace(result, page=page)


def _find(
    place: str, overrides: Mapping[str, object], fold: tuple[int, int], workdir: str
) -> layout.Layout:
    """Returns the splits of the images, see `layout.find`; writes their list."""
    splits = layout.find(place, _layout_keys(overrides), workdir)
    if fold[1]:
        layout.take_fold(splits, *fold)
    return splits


def _train(
    place: str,
    workdir: str,
    model: str,
    minutes: float,
    fold: tuple[int, int],
    overrides: Mapping[str, object],
    callbacks: Iterable[Callback],
    say: Callable[[str], None],
) -> tuple[TrainConfig, Result]:
    """Trains one run; `fold` is its number and the number of folds."""
    path = epath.Path(workdir) / FILE
    find = functools.partial(_find, place, overrides, fold)
    raw, images = _begun(place, workdir, find)
    command = {
        "images": images,
        "--model": masked(model),
        "--minutes": minutes,
        "config": {key: str(value) for key, value in overrides.items()},
    }
    if fold[1]:
        command["--folds"] = list(fold)
    free = _free(raw)
    runs.check_command(workdir, command, begun=raw is not None, free=free)
    if raw:
        say(f"resuming with the settings chosen before: {path}")
        again = {key: overrides[key] for key in free & overrides.keys()}
        loading.override(TrainConfig, raw, again)
    else:
        raw, choices = choose(find, place, workdir, model, minutes, overrides, say)
        for line in _table(choices):
            say(line)
        replace_text(path, json.dumps(raw, indent=2) + "\n")
    config = complete(raw)
    done = loop.train(config, workdir, StartupTimer(say=say), callbacks=callbacks)
    return config, _result(done, config, workdir)


def _free(raw: Mapping | None) -> set[str]:
    """Returns the keys of an earlier start's config that change no result."""
    if raw is None:
        return set()
    keys = fields.walk(complete(raw))
    free = {".".join(path) for path, about, _ in keys if not about.changes_result}
    return free - {f"data.{name}" for name in _LAYOUT_KEYS}


def _begun(
    place: str, workdir: str, find: Callable[[str], layout.Layout]
) -> tuple[dict | None, str]:
    """Returns the config that an earlier start chose, or None, and its images.

    The workdir and the images may have been moved: the config gets the paths of this
    start, and images are compared by content.
    """
    path = epath.Path(workdir) / FILE
    if not path.exists():
        return None, place
    raw, images = read_json(path), runs.recorded(workdir).get("images", place)
    data = raw["data"]
    if images == place or not os.path.exists(place):
        if os.path.basename(data["data_dir"]) == layout.SPLIT_FILE:
            data["data_dir"] = layout.split_file(workdir)
        return raw, images
    if not workdirs.has_checkpoint(workdir):
        return None, place
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(UserError):
        moved = complete(raw | {"data": data | find(scratch).data}).data
        source = open_source(moved, moved.split)
        stored = workdirs.read_metadata(workdir)["data"]
        if not fingerprint.differences(stored, source):
            return raw | {"data": data | find(workdir).data}, images
    return raw, place


def find_rate(
    place: str,
    workdir: str,
    *,
    model: str = "",
    overrides: Mapping[str, object] | None = None,
    say: Callable[[str], None] = print,
) -> float:
    """Returns a peak learning rate from a range test; trains nothing else.

    Args:
      place, workdir, model, overrides, say: see `finetune`.

    Raises:
      UserError: see `finetune`.
    """
    overrides = _allowed(overrides)
    find = functools.partial(_find, place, overrides, (0, 0))
    raw, _ = choose(find, place, workdir, _model(model), 0.0, overrides, say)
    result = rate_range.run(raw, say=say)
    written = rate_range.write(result, workdir)
    say(
        f"the loss falls fastest at a rate of {result.suggestion:g} "
        f"({', '.join(written)}); without a test it is {raw['optim']['learning_rate']:g}: "
        f"--config.optim.learning_rate={result.suggestion:g}"
    )
    return result.suggestion


def _allowed(overrides: Mapping[str, object] | None) -> dict[str, object]:
    """Returns the overrides; refuses keys that the command sets."""
    for key in overrides or {}:
        if key in _FLAGS or key.startswith("evals"):
            what = _FLAGS.get(key, "the folder or name")
            raise UserError(f"--config.{key}: it is set by {what} here")
    return dict(overrides or {})


def _model(model: str) -> str:
    return model or (SMALL_MODEL if jax.default_backend() == "cpu" else MODEL)


def _layout_keys(overrides: Mapping[str, object]) -> dict[str, object]:
    """Returns the overrides of the images' layout, without "data."."""
    keys = {name: f"data.{name}" for name in _LAYOUT_KEYS}
    return {name: overrides[k] for name, k in keys.items() if k in overrides}


def choose(
    find: Callable[[str], layout.Layout],
    place: str,
    workdir: str,
    model: str,
    minutes: float,
    overrides: Mapping[str, object],
    say: Callable[[str], None],
) -> tuple[dict, list[Choice]]:
    """Returns the complete config as a dict, and the choices in it; see rule.py."""
    used = _layout_keys(overrides)
    others = {k: v for k, v in overrides.items() if k.removeprefix("data.") not in used}
    name = others.get("optim.name", rule.OPTIMIZER)
    if name != rule.OPTIMIZER and "optim.learning_rate" not in others:
        raise UserError(
            f"--config.optim.name={name}: the rate is chosen for {rule.OPTIMIZER} alone; "
            "set --config.optim.learning_rate too"
        )
    given = _open(find(workdir), place, model, say)
    images = given.images
    patch = models.create(**given.pretrained.options).patch_size
    side = rule.side_of(images, given.weights_side, patch)

    dropped = []

    def config_of(side: int, steps: int, evaluations: int) -> dict:
        raw = _raw(given, side, steps, evaluations)
        if "task.class_weights" in others:  # Weights replace balanced draws.
            raw["data"].pop("class_balance", None)
        dropped.clear()
        loading.override(TrainConfig, raw, others, dropped.append)
        if "epochs" in others:
            raw["total_steps"] = 0
        config = complete(raw)
        chosen = rule.transforms_of(images, given.preprocess, config.data.image_size)
        raw["data"] = chosen | raw["data"]
        if "ema.decay" not in others and not config.task.averages_network:
            raw["ema"]["decay"] = 0.0
        return raw

    length = rule.Length(side, rule.epochs_of(images), math.nan)
    speed = 0.0
    if minutes and not {"total_steps", "epochs"} & others.keys():
        raw = config_of(side, trial.STEPS, 1)
        speed = trial.measure(raw, say)
        side = raw["data"]["image_size"][0]
        step = side if "data.image_size" in others else patch
        length = rule.fit(images, given.validated, side, step, speed, minutes)
    batch = config_of(side, 1, 1)["batch_size"]
    steps = max(1, round(length.epochs * images.count / batch))
    evaluations = max(1, min(rule.EVALUATIONS, round(length.epochs)))
    raw = config_of(length.side, steps, evaluations)
    for line in dropped:
        say(line)
    choices = [
        dataclasses.replace(each, why="set") if each.key in overrides else each
        for each in _choices(given, raw, length, speed, minutes)
    ]
    return fields.to_json(complete(raw)), choices


@dataclasses.dataclass(frozen=True)
class _Given:
    """The images and weights that settings are chosen for."""

    splits: layout.Layout
    images: rule.Images
    classes: int
    validated: int  # Images of the validation split.
    model: str
    pretrained: Pretrained
    preprocess: Preprocess

    @property
    def multi_label(self) -> bool:
        return bool(self.splits.data.get("multi_label"))

    @property
    def weights_side(self) -> int:
        return max(self.preprocess.image_size)


def _open(
    splits: layout.Layout, place: str, model: str, say: Callable[[str], None]
) -> _Given:
    pretrained = weights.open_pretrained(model, with_task=False)
    for note in pretrained.notes:
        say(f"{masked(model)}: {note}")
    source = splits.open(splits.data["split"])
    classes = fine_tuning.num_classes_of(source, place)
    if classes < 2:
        raise UserError(
            f"{place} has images of one class ({', '.join(source.class_names)}): give "
            "two classes or more"
        )
    several = splits.data.get("multi_label")
    return _Given(
        splits,
        rule.look_at(source, None if several else read_labels(source).tolist()),
        classes,
        len(splits.open(splits.validation)),
        model,
        pretrained,
        weights.preprocessing_of(pretrained),
    )


def _raw(given: _Given, side: int, steps: int, evaluations: int) -> dict:
    splits, images, options = given.splits, given.images, given.pretrained.options
    on_cpu = jax.default_backend() == "cpu"
    kind = "multi_label" if given.multi_label else "classification"
    batch = rule.batch_of(images, jax.default_backend(), jax.device_count())
    evals = {"val": {"kind": kind, "split": splits.validation}}
    if splits.test:  # Scored only at the end.
        evals["test"] = {"kind": kind, "split": splits.test, "every": 2**31}
    data = {
        **splits.data,
        "num_classes": given.classes,
        "image_size": (side, side),
        "channels": options["channels"],
        "exif": True,
        "on_error": "skip_few",
        "mean": given.preprocess.mean,
        "std": given.preprocess.std,
    }
    if images.uneven >= rule.UNEVEN and not given.multi_label:
        data["class_balance"] = "sqrt"
    interval = max(1, steps // evaluations)
    return {
        "name": "finetune",
        "total_steps": steps,
        "batch_size": batch,
        "init": given.model,
        "data": data,
        "model": {
            **fine_tuning.inherited(options),
            "dtype": "float32" if on_cpu else "bfloat16",  # CPUs are slow at that.
        },
        "task": {"loss": "sigmoid" if given.multi_label else "softmax"},
        "optim": rule.optimizer(batch),
        "ema": {"decay": rule.ema_of(steps)},
        "log_every_steps": max(1, min(50, steps // 20)),
        "eval_every_steps": interval,
        "checkpoint_every_steps": interval,
        "checkpoint": {"max_to_keep": 1, "best_metric": rule.metric_of(images, data)},
        "early_stopping_evals": rule.patience_of(given.validated),
        "evals": evals,
    }


def _choices(
    given: _Given, raw: dict, length: rule.Length, speed: float, minutes: float
) -> list[Choice]:
    images, trained = given.images, given.weights_side
    data, optim, test = raw["data"], raw["optim"], given.splits.test
    side = data["image_size"][0]
    pixels = "x".join(map(str, dict.fromkeys(data["image_size"])))
    why = f"as the weights ({trained})"
    if side != trained:
        why = f"the images have about {images.side:.0f} pixels; the weights {trained}"
    if length.side < side or (speed and length.side != side):
        why = f"so that {rule.LEAST_EPOCHS} epochs fit into {minutes:g} minutes"
    steps = raw["total_steps"]
    epochs = steps * raw["batch_size"] / images.count
    long = f"{epochs:.1f} epochs; no limit of time"
    if speed:
        long = (
            f"{epochs:.1f} epochs, about {length.seconds / 60:.0f} minutes at the measured "
            f"{speed:.0f} images/s (--minutes={minutes:g})"
        )
    decay, task = raw["ema"]["decay"], raw["task"].get("name", "")
    average = f"average of decay {decay:.4f}", "over the last tenth of the steps"
    if not decay:
        kept_beside = f"task.name={task} keeps the network beside them"
        average = "no average of the parameters", kept_beside if task else "few steps"
    uneven = (
        f"the largest class has {images.uneven:.1f} times the images of the smallest"
    )
    return [
        Choice(given.splits.description, "", "the folder or name"),
        Choice(
            f"{images.count:,} images of {data['num_classes']} classes",
            f"{given.validated:,} to validate on"
            + (f", and the split {test!r} to test on" if test else ""),
            "data.split, evals",
        ),
        Choice(f"images of {pixels} pixels", why, "data.image_size"),
        Choice(
            data["train_transform"],
            "grey images" if images.grey else "photographs",
            "data.train_transform",
        ),
        Choice(
            f"batches of {raw['batch_size']}", "by the number of images", "batch_size"
        ),
        Choice(f"{steps} steps", long, "total_steps or epochs"),
        Choice(
            f"{optim['name']}, rate {optim.get('learning_rate', 0):g}",
            "in proportion to the batch",
            "optim.learning_rate",
        ),
        Choice(*average, "ema.decay"),
        Choice(
            f"classes drawn {data.get('class_balance') or 'as they are'}",
            uneven,
            "data.class_balance",
        ),
        Choice(
            f"the best checkpoint by {raw['checkpoint']['best_metric']}",
            f"looked at every {raw['eval_every_steps']} steps",
            "checkpoint.best_metric",
        ),
        Choice(
            f"ends after {raw['early_stopping_evals']} looks that are no better"
            if raw["early_stopping_evals"]
            else "all steps are taken",
            f"{given.validated:,} images to validate on; {rule.NOISY} or more end a run "
            "early",
            "early_stopping_evals",
        ),
    ]


def _table(choices: list[Choice]) -> list[str]:
    width = max(len(choice.key) for choice in choices)
    return [
        f"{choice.key:<{width}}  {choice.what}"
        + (f" ({choice.why})" * bool(choice.why))
        for choice in choices
    ]


def _result(report: dict, config: TrainConfig, workdir: str) -> Result:
    final = report["final"]
    split = "test" if "test" in final else "val"
    _, scores = run_report.quoted_scores(final[split])
    metric = "map" if config.data.multi_label else "top1"
    looks = 1
    if split == "val" and config.checkpoint.best_metric and config.eval_every_steps:
        looks = math.ceil(report["steps"] / config.eval_every_steps)
    counts, interval, count = {}, None, scores["examples"]
    if metric == "top1":
        interval = rule.interval(round(scores["top1"] * count), count, looks)
        opened = open_source(config.data, config.evals[split].split)
        if (labels := opened.known_labels()) is not None:
            numbers = np.bincount(labels, minlength=config.data.num_classes)
            names = report["class_names"] or map(str, range(len(numbers)))
            counts = dict(zip(names, numbers.tolist(), strict=True))
    return Result(
        *(report, split, metric, scores[metric], interval, count, looks),
        counts=counts,
        workdir=workdir,
    )


def _pooled(results: Sequence[Result]) -> Result:
    """Returns the score over all folds; each image is scored by a run without it."""
    first = results[0]
    counts = {
        name: sum(one.counts.get(name, 0) for one in results) for name in first.counts
    }
    examples = sum(one.examples for one in results)
    score = sum(one.score * one.examples for one in results) / examples
    looks, interval = max(one.looks for one in results), None
    if first.interval:
        interval = rule.interval(round(score * examples), examples, looks)
    return dataclasses.replace(
        first,
        score=score,
        interval=interval,
        examples=examples,
        looks=looks,
        counts=counts,
        folds=len(results),
    )


def summary(result: Result) -> list[str]:
    """Returns lines on the score, and commands to continue with."""
    what = "accuracy" if result.metric == "top1" else "mean average precision"
    line = f"{what} {result.score:.2%}"
    if result.interval:
        low, high = result.interval
        wider = f", for the best of {result.looks} looks" * (result.looks > 1)
        line += f" (95 % interval {low:.2%} to {high:.2%}{wider})"
    chosen = ", which also chose the checkpoint" if result.split == "val" else ""
    on = f"on {result.examples:,} images of {result.split}{chosen}"
    if result.folds:
        on = (
            f"on {result.examples:,} images, each by the one of {result.folds} runs "
            "that was not trained on it"
        )
    model = result.workdir
    page = [f"mistakes:  {result.page}"] if result.page else []
    return [
        f"{line} {on}",
        *_doubts(result),
        *page,
        f"classify:  python -m vit_jax.predict --model={model} IMAGES",
        f"look:      python -m vit_jax.explore --model={model} --images=FOLDER",
        f"export:    python -m vit_jax.convert --model={model} --to=timm --out=FOLDER",
    ]


def _doubts(result: Result) -> list[str]:
    """Returns lines on classes with too few scored images."""
    if not result.counts:
        few = result.examples < rule.FEW * len(result.report["class_names"])
        return [f"note: fewer than {rule.FEW} images a class were scored"] * few
    few = {name: n for name, n in result.counts.items() if n < rule.FEW}
    if not few:
        return []
    named = [f"{name} {n}" for name, n in sorted(few.items(), key=lambda x: x[1])]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    remedy = "" if result.folds else "; --folds=5 scores all images, in 5 runs"
    line = (
        f"note: fewer than {rule.FEW} images were scored of {len(few)} of "
        f"{len(result.counts)} classes ({', '.join(named[:5])}{more}), so that their "
        f"accuracy is rough{remedy}"
    )
    return [line]

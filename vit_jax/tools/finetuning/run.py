"""Fine-tunes a network on a user's images, from the folder to the accuracy."""

import collections
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from vit_jax import models, weights
from vit_jax.command_line.printing import masked
from vit_jax.config import fields, loading
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.evaluators.metric_names import is_beside
from vit_jax.tools import calibrating
from vit_jax.tools.finetuning import layout, rate_range, rule, settings, trial
from vit_jax.tools.finetuning.evaluated import TrainedNetwork
from vit_jax.tools.finetuning.kind import Given, Kind, Result
from vit_jax.tools.finetuning.labelled import Labels
from vit_jax.tools.finetuning.masked import Masks
from vit_jax.tools.finetuning.numbers import Numbers
from vit_jax.tools.sweeps import fine_tuning
from vit_jax.training import run_report
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import TrainConfig, complete

FILE = "finetune.json"
SMALL_MODEL, MODEL = "deit:Ti/16", "augreg:S/16"
MINUTES = 15.0
ASPECTS = ("crop", "keep")
_INTERVALS = {"eval_every_steps", "checkpoint_every_steps"}
_PLACE = "the folder or name"
_FLAGS = {"init": "--model", "init.checkpoint": "--model"}
_FLAGS |= {"data.name": _PLACE, "data.split": _PLACE}


def finetune(
    place: str,
    workdir: str,
    *,
    masks: str = "",
    target: str = "",
    group: str = "",
    model: str = "",
    aspect: str = ASPECTS[0],
    minutes: float = MINUTES,
    folds: int = 0,
    calibrate: bool = False,
    overrides: Mapping[str, object] | None = None,
    callbacks: Iterable[Callback] = (),
    say: Callable[[str], None] = print,
) -> Result:
    """Fine-tunes weights on images; the same call resumes after an interruption.

    Args:
      place: folder, table, or name of a data set, see layout.py.
      masks: folder with the masks of the images in a folder, under the same names.
      target: `config.data.target_key`, names of the numbers to predict.
      group: `config.data.group_key`.
      overrides: values by dotted config key, which replace the chosen ones.
      workdir, model, aspect, minutes, folds, calibrate, callbacks, say: arguments of
        `vit_jax.finetune`.

    Raises:
      UserError: the images or weights cannot be read or do not fit together, or the
        workdir holds another run.
    """
    if folds < 0 or folds == 1:
        raise UserError(f"folds={folds}: give two or more, or 0 for one run")
    minutes /= folds or 1
    keys = _keys(overrides, group=group, target=target)
    request = _request(place, masks, model, keys, say, minutes, aspect)
    request = dataclasses.replace(request, calibrates=calibrate)
    trained = []
    for fold in range(folds or 1):
        folder = os.path.join(workdir, "folds", str(fold)) if fold else workdir
        if folds:
            say(f"fold {fold + 1} of {folds}: {folder}")
        one = dataclasses.replace(request, fold=(fold, folds))
        trained.append(_train(one, folder, callbacks))
    config, result = trained[0]
    # With several processes, none has all the parameters.
    network = TrainedNetwork(config, workdir) if jax.process_count() == 1 else None
    if folds:
        result = _pooled(trained, network)
    result = _calibrated(result, config, network, calibrate, say)
    if not network:
        return result
    say("collecting mistakes")
    score = summary(result)[0]
    page, worst = result.kind.write_page(config, result, score, network)
    return dataclasses.replace(result, page=page, worst=worst)


def _calibrated(
    result: Result,
    config: TrainConfig,
    network: TrainedNetwork | None,
    calibrate: bool,
    say: Callable[[str], None],
) -> Result:
    """Fits the probabilities, if wanted, and thresholds for several labels per image."""
    kind = result.kind
    if calibrate:
        _check_calibrates(kind)
    elif not kind.has_thresholds:
        return result
    say("calibrating" if calibrate else "choosing thresholds")
    how = {"scale": calibrate, "config": config, "network": network}
    decisions = calibrating.calibrate(result.workdir, **how)
    return dataclasses.replace(result, decisions=decisions)


def _check_calibrates(kind: Kind) -> None:
    """Raises UserError if a kind of annotation has no probabilities of classes."""
    if not kind.has_probabilities:
        raise UserError(
            f"--calibrate: these images have {kind.annotation}, and only probabilities of "
            "labels are calibrated: leave it out"
        )


def find_rate(
    place: str,
    workdir: str,
    *,
    masks: str = "",
    target: str = "",
    group: str = "",
    model: str = "",
    aspect: str = ASPECTS[0],
    overrides: Mapping[str, object] | None = None,
    say: Callable[[str], None] = print,
) -> float:
    """Returns a peak learning rate from a range test, without training a model."""
    keys = _keys(overrides, group=group, target=target)
    request = _request(place, masks, model, keys, say, 0.0, aspect)
    raw, _ = choose(request, workdir)
    result = rate_range.run(raw, say=say)
    written = rate_range.write(result, workdir)
    say(
        f"the loss falls fastest at a rate of {result.suggestion:g} "
        f"({', '.join(written)}); without a test it is {raw['optim']['learning_rate']:g}: "
        f"--config.optim.learning_rate={result.suggestion:g}"
    )
    return result.suggestion


@dataclasses.dataclass(frozen=True)
class _Request:
    """What to train on, and how; `fold` has the run's number and the number of runs."""

    place: str
    model: str
    overrides: Mapping[str, object]
    say: Callable[[str], None]
    minutes: float
    aspect: str = ASPECTS[0]
    fold: tuple[int, int] = (0, 0)
    calibrates: bool = False  # Only to refuse it before training.

    file = FILE

    def command(self, images: str) -> dict:
        """Returns everything that determines the results, see settings.py."""
        command = {
            "images": images,
            "--model": masked(self.model),
            "--minutes": self.minutes,
            "config": {key: str(value) for key, value in self.overrides.items()},
        }
        if self.aspect != ASPECTS[0]:
            command["--aspect"] = self.aspect
        if self.fold[1]:
            command["--folds"] = list(self.fold)
        return command

    def moved(self, raw: Mapping, workdir: str) -> dict:
        """Returns a stored config that reads the list in a workdir that was moved."""
        data = dict(raw["data"])
        if os.path.basename(data["data_dir"]) == layout.SPLIT_FILE:
            data["data_dir"] = layout.split_file(workdir)
        return {**raw, "data": data}

    def find(self, workdir: str) -> layout.Layout:
        """Returns the splits of the images; writes their list, see `layout.find`."""
        arranged, _ = settings.divided(self.overrides)
        splits = layout.find(self.place, arranged, workdir)
        if self.fold[1]:
            splits = layout.take_fold(splits, *self.fold)
        return splits


def _keys(overrides: Mapping[str, object] | None, **names: str) -> dict[str, object]:
    """Returns overrides with the keys of columns: data.group_key and so on."""
    given = {f"data.{name}_key": value for name, value in names.items() if value}
    return dict(overrides or {}) | given


def _request(
    place: str,
    masks: str,
    model: str,
    overrides: Mapping[str, object],
    say: Callable[[str], None],
    minutes: float,
    aspect: str,
) -> _Request:
    if aspect not in ASPECTS:
        raise UserError(f"aspect={aspect!r} is not one of {', '.join(ASPECTS)}")
    for key in overrides:
        if key in _FLAGS or key.startswith("evals"):
            raise UserError(f"--config.{key}: {_FLAGS.get(key, _PLACE)} sets it here")
    model = model or (SMALL_MODEL if jax.default_backend() == "cpu" else MODEL)
    place, keys = settings.absolute_place(place), dict(overrides)
    if masks:
        place, folders = layout.common_folder(place, masks)
        keys |= folders
    return _Request(place, model, keys, say, minutes, aspect)


def _train(
    request: _Request, workdir: str, callbacks: Iterable[Callback]
) -> tuple[TrainConfig, Result]:
    config, done = settings.train(request, choose, workdir, callbacks)
    return config, _result(done, config, workdir, in_folds=bool(request.fold[1]))


def _kind_of(data: DataConfig) -> Kind:
    if data.mask_key:
        return Masks()
    return Numbers(data.targets) if data.target_key else Labels(data.multi_label)


def _open(request: _Request, workdir: str) -> Given:
    splits = request.find(workdir)
    pretrained = weights.open_pretrained(request.model, with_task=False)
    for note in pretrained.notes:
        request.say(f"{masked(request.model)}: {note}")
    kind, keeps = _kind_of(splits.config), request.aspect == "keep"
    if request.calibrates:
        _check_calibrates(kind)
    if keeps and splits.config.mask_key:
        raise UserError(
            "aspect='keep' with masks: masks are learnt from crops of one size; leave it "
            "out"
        )
    why = models.create(**pretrained.options).config.no_sequences
    if keeps and why:
        raise UserError(
            f"aspect='keep' with {why}: choose a Vision Transformer without it, or leave "
            "it out"
        )
    return Given(
        kind,
        splits,
        kind.look(splits, request.place),
        len(splits.open(splits.validation)),
        pretrained,
        weights.preprocessing_of(pretrained),
        keeps,
    )


def choose(request: _Request, workdir: str) -> settings.Chosen:
    """Chooses the settings of a run, see rule.py.

    Returns:
      The complete config as a dict, and the choices and reasons by key.
    """
    _, others = settings.divided(request.overrides)
    given = _open(request, workdir)
    kind, images, minutes = given.kind, given.images, request.minutes
    name = others.get("optim.name", kind.optimizer)
    if name != kind.optimizer and "optim.learning_rate" not in others:
        raise UserError(
            f"--config.optim.name={name}: the rate is chosen for {kind.optimizer} only; "
            "set --config.optim.learning_rate too"
        )
    patch = models.create(**given.pretrained.options).config.patch_size
    side = rule.side_of(images, max(given.preprocess.image_size), patch)
    config_of = functools.partial(_config, given, request.model, others)
    epochs = rule.epochs_of(images, kind.most_epochs)
    length, speed = rule.Length(side, epochs, math.nan), 0.0
    if minutes and not {"total_steps", "epochs"} & others.keys():
        raw = config_of(side, trial.STEPS)
        speed = trial.measure(raw, request.say)
        side = raw["data"]["image_size"][0]
        step = side if "data.image_size" in others else patch
        evaluated = round(given.validated * kind.cost(given.seen, speed))
        limits = speed, minutes, epochs
        length = rule.fit(images, evaluated, side, step, *limits)
    batch = config_of(side, 1)["batch_size"]
    steps = max(1, round(length.epochs * images.count / batch))
    raw = config_of(length.side, steps, dropped=request.say)
    choices = _choices(given, raw, length, speed, minutes)
    for key in choices.keys() & request.overrides.keys():
        choices[key] = choices[key][0], "set"
    return fields.to_json(complete(raw)), choices


def _config(
    given: Given,
    model: str,
    overrides: Mapping[str, object],
    side: int,
    steps: int,
    dropped: Callable[[str], None] = lambda line: None,
) -> dict:
    """Returns the chosen config; `dropped` is called with keys that overrides remove."""
    raw = _rule_config(given, model, side, steps)
    if "task.class_weights" in overrides:  # Class weights replace balanced draws.
        raw["data"].pop("class_balance", None)
    loading.override(TrainConfig, raw, overrides, dropped)
    config = complete(raw)
    if not isinstance(config.task, given.kind.task):
        raise UserError(
            f"task.name={config.task.name!r} does not learn from {given.kind.annotation}, "
            "which these images have: leave it out"
        )
    # The length, by which evaluations are spaced, may be that of an override.
    steps, count = config.num_steps(given.images.count), given.images.count
    epochs = round(steps * config.batch_size / count)
    interval = max(1, steps // max(1, min(rule.EVALUATIONS, epochs)))
    for key in _INTERVALS & raw.keys() - overrides.keys():
        raw[key] = interval
    size = config.data.image_size
    raw["data"] = given.kind.transforms(given, size) | raw["data"]
    if not config.task.averages_network:  # It trains other parameters.
        for section, key in (("ema", "decay"), ("optim", "layer_decay")):
            if f"{section}.{key}" not in overrides:
                raw[section][key] = 0.0
    return raw


def _rule_config(given: Given, model: str, side: int, steps: int) -> dict:
    splits, images, options = given.splits, given.images, given.pretrained.options
    kind = given.kind.evaluation
    batch = rule.batch_of(images, jax.default_backend(), jax.device_count())
    evals = {"val": {"kind": kind, "split": splits.validation}}
    if splits.test:  # The test split is scored only at the end.
        evals["test"] = {"kind": kind, "split": splits.test, "every": 2**31}
    data = {
        **splits.data,
        **given.seen.data,
        "image_size": (side, side),
        "channels": options["channels"],
        "exif": True,
        "on_error": "skip_few",
        **given.preprocess.data_keys(),
    }
    sections = given.kind.sections(given, side, batch)
    return {
        "name": "finetune",
        "total_steps": steps,
        "batch_size": batch,
        "init": model,
        "data": data,
        "model": fine_tuning.inherited(options),
        "task": sections["task"],
        "optim": sections["optim"],
        "ema": {"decay": rule.ema_of(steps)},
        "log_every_steps": max(1, min(50, steps // 20)),
        **dict.fromkeys(_INTERVALS, 1),
        "checkpoint": {"max_to_keep": 1, "best_metric": sections["best_metric"]},
        "early_stopping_evals": rule.patience_of(given.validated),
        "evals": evals,
    }


def _size_reason(
    given: Given, size: int, length: rule.Length, speed: float, minutes: float
) -> str:
    if length.side < size or (speed and length.side != size):
        return f"so that {rule.LEAST_EPOCHS} epochs fit into {minutes:g} minutes"
    trained = max(given.preprocess.image_size)
    if size == trained:
        return f"the size of the weights ({trained})"
    return (
        f"the images have about {given.images.side:.0f} pixels; the weights {trained}"
    )


def _time(length: rule.Length, speed: float, minutes: float) -> str:
    if not speed:
        return "; no time limit"
    return (
        f", about {length.seconds / 60:.0f} minutes at the measured {speed:.0f} images/s "
        f"(--minutes={minutes:g})"
    )


def _choices(
    given: Given, raw: dict, length: rule.Length, speed: float, minutes: float
) -> dict[str, tuple[str, str]]:
    """Returns choices and reasons by key."""
    images, test, data, optim = (
        given.images,
        given.splits.test,
        raw["data"],
        raw["optim"],
    )
    size = data["image_size"]
    steps = raw.get("total_steps") or raw["epochs"] * images.count / raw["batch_size"]
    epochs = steps * raw["batch_size"] / images.count
    decay, task = raw["ema"]["decay"], raw["task"].get("name", "")
    average = f"average with decay {decay:.4f}", "over the last tenth of the steps"
    if not decay:
        why = "few steps"
        if not complete(raw).task.averages_network:
            why = f"task.name={task} does not average the network"
        average = "no average of the parameters", why
    patience = raw["early_stopping_evals"]
    validated = f"{given.validated:,} images to validate on"
    best = raw["checkpoint"]["best_metric"]
    chosen = (
        f"the best checkpoint by {best}",
        f"evaluated every {raw['eval_every_steps']} steps",
    )
    if not best:
        why = f"{validated}; from {rule.CHOOSING} on, the best one is chosen"
        chosen = "the last checkpoint", why
    return {
        _PLACE: (given.splits.description, ""),
        "data.split, evals": (
            f"{images.count:,} images {given.kind.contents(data)}",
            f"{given.validated:,} to validate on"
            + (f", and the split {test!r} to test on" if test else ""),
        ),
        **given.seen.choices,
        "data.image_size": (
            f"images of {'x'.join(map(str, dict.fromkeys(size)))} pixels",
            _size_reason(given, size[0], length, speed, minutes),
        ),
        "data.train_transform": (
            data["train_transform"],
            "grey images" if images.grey else "photographs",
        ),
        **rule.products(raw["model"]),
        "batch_size": (f"batches of {raw['batch_size']}", "from the number of images"),
        "total_steps or epochs": (
            f"{round(steps)} steps",
            f"{epochs:.1f} epochs{_time(length, speed, minutes)}",
        ),
        "optim.learning_rate": (
            f"{optim['name']}, rate {optim.get('learning_rate', 0):g}",
            "from the batch size",
        ),
        "ema.decay": average,
        **given.kind.choices(images, raw),
        "checkpoint.best_metric": chosen,
        "early_stopping_evals": (
            f"ends after {patience} evaluations without improvement"
            if patience
            else "all steps are run",
            f"{validated}; with {rule.NOISY} or more, a run may end early",
        ),
    }


def _result(done: dict, config: TrainConfig, workdir: str, *, in_folds: bool) -> Result:
    kind = _kind_of(config.data)
    # Folds score all training images once, but test images again and again.
    split = "test" if "test" in done["final"] and not in_folds else "val"
    _, scores = run_report.quoted_scores(done["final"][split])
    looks = 1
    if split == "val" and config.checkpoint.best_metric and config.eval_every_steps:
        looks = math.ceil(done["steps"] / config.eval_every_steps)
    counts = kind.counts(config, split, done["class_names"])
    return Result(
        done,
        split,
        kind.metric,
        scores,
        scores["examples"],
        looks,
        workdir,
        kind,
        chosen_by=config.checkpoint.best_metric.rpartition("/")[2],
        counts=counts,
    )


def _pooled(
    trained: Sequence[tuple[TrainConfig, Result]], first: TrainedNetwork | None
) -> Result:
    """Returns the scores over all folds; each image is scored by a run without it.

    `first` is the network of the first fold; None if there are several processes.
    """
    results = [result for _, result in trained]
    counts, scores = collections.Counter(), {}
    if first:
        # One after another, so that only the first stays in memory.
        others = (TrainedNetwork(config, one.workdir) for config, one in trained[1:])
        networks = itertools.chain([first], others)
        scores = results[0].kind.score_all(
            network.of_evaluation("val") for network in networks
        )
    for each in results:
        counts.update(each.counts)

    def mean(metric: str) -> float:
        scored = [one for one in results if metric in one.scores]
        total = sum(one.scores[metric] * one.examples for one in scored)
        return total / sum(one.examples for one in scored)

    names = dict.fromkeys(name for one in results for name in one.scores)
    means = {name: mean(name) for name in names if not is_beside(name)}
    return dataclasses.replace(
        results[0],
        scores=scores or means,
        examples=sum(one.examples for one in results),
        looks=max(one.looks for one in results),
        counts=counts,
        folds=len(results),
    )


def summary(result: Result) -> list[str]:
    """Returns lines about the score, and commands to continue with."""
    chosen = ", which also chose the checkpoint" if result.looks > 1 else ""
    on = f"on {result.examples:,} images of {result.split}{chosen}"
    if result.folds:
        on = (
            f"on {result.examples:,} images, each scored by the one of {result.folds} runs "
            "that was not trained on it"
        )
    kind = result.kind
    page = [f"mistakes:  {result.page}"] if result.page else []
    lines = [f"{kind.headline(result)} {on}", *kind.notes(result)]
    return [*lines, *result.worst, *page, *kind.commands(result.workdir)]

"""Pretrains a network on a user's images without labels, with chosen settings."""

import copy
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from vit_jax import models, weights
from vit_jax.analysis import neighbours
from vit_jax.command_line.printing import masked
from vit_jax.config import fields, loading
from vit_jax.data import imagenet, splits
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.evaluators.feature_table import Extractor
from vit_jax.evaluators.image_features import of_split
from vit_jax.tools.finetuning import rule, settings, trial
from vit_jax.tools.pretraining import photos, scores
from vit_jax.tools.pretraining.method import METHODS, Given, Length, Method, suits
from vit_jax.tools.sweeps import fine_tuning
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import TrainConfig, complete
from vit_jax.weights import export
from vit_jax.weights.pretrained import Pretrained

PICTURE, ADAPTER = "neighbours.jpg", "adapter"
MINUTES = 30.0
EVALUATIONS = 6
RANKED = 500  # Number of images whose features' rank is measured, if there are so many.
MOST_EPOCHS = 300
# Network without weights by backend; the patch follows from the size of the images.
_WIDTH = {"cpu": "Ti"}
_WIDTH_ELSEWHERE = "S"
_PATCHES = {128: 16, 64: 8}  # Smallest side in pixels to the patch size.
_SMALLEST_PATCH, _SIDE = 4, 224
_PLACE = "the folder or name"
_FLAGS = {"init": "--model", "init.checkpoint": "--model", "task.name": "--method"}
_FLAGS |= {"data.name": _PLACE, "data.split": _PLACE, "model.variant": "--variant"}


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of pretraining on a user's images.

    Attributes:
      report: content of the run's report.json.
      workdir: workdir of the run, which every command accepts as a model.
      scores: scores before the first step and after each evaluation.
      count: number of training images.
      started: whether the run started from weights.
      picture: path of the picture of nearest neighbours by the trained weights, beside
        those by the starting weights, the teacher or random weights; "" with several
        processes.
      adapter: folder of the adapter in PEFT's format; "" without `lora`.
    """

    report: dict
    workdir: str
    scores: scores.Scores
    count: int
    started: bool
    picture: str = ""
    adapter: str = ""


def pretrain(
    places: Sequence[str],
    workdir: str,
    *,
    model: str = "",
    method: str = "",
    teachers: Sequence[str] = (),
    variant: str = "",
    labels: str = "",
    lora: int = 0,
    minutes: float = MINUTES,
    overrides: Mapping[str, object] | None = None,
    callbacks: Iterable[Callback] = (),
    say: Callable[[str], None] = print,
) -> Result:
    """Pretrains on images without labels; the same call resumes after an interruption.

    Args:
      places: folders, tables, tar shards or names of data sets, see photos.py.
      overrides: values by dotted config key, which replace the chosen ones.
      workdir, model, method, teachers, variant, labels, lora, minutes, callbacks, say:
        arguments of `vit_jax.pretrain`.

    Raises:
      UserError: the images or weights cannot be read or do not fit together, or the
        workdir holds another run.
    """
    request = _request(
        places, model, method, teachers, variant, labels, lora, minutes, overrides, say
    )
    follow = scores.Follow(say)
    config, done = settings.train(request, choose, workdir, (follow, *callbacks))
    compared = scores.read(workdir, config)
    result = Result(done, workdir, compared, done["examples"], bool(model))
    if jax.process_count() > 1:  # No process has all the parameters.
        return result
    trained = weights.open_pretrained(workdir, with_task=bool(lora))
    return dataclasses.replace(
        result,
        picture=_draw_neighbours(config, request, trained, workdir),
        adapter=_write_adapter(trained, workdir, say) if lora else "",
    )


def _draw_neighbours(
    config: TrainConfig, request: "_Request", trained: Pretrained, workdir: str
) -> str:
    """Draws nearest images by the trained weights, and by those it is compared with.

    They are the images whose rank of features is measured.

    Returns:
      The path of the picture; "" if the other weights are gone, or if no features of
      unlabelled images are evaluated.
    """
    split = next((e.split for e in config.evals.values() if e.kind == "rank"), "")
    if not split:  # The user removed the evaluation of features.
        return ""
    source = open_source(config.data, split)
    try:
        other, title = _compared_with(config, request, trained)
    except UserError as error:  # A run that resumed does not need them.
        request.say(f"no picture of neighbours is drawn: {error}")
        return ""
    how = weights.preprocessing_of(trained)
    # A teacher sees images at its size.
    others = weights.preprocessing_of(other) if request.teachers else how
    left_out = lambda name, why: None  # The evaluations warn of it.
    vectors = [
        of_split(source, Extractor(*pair).features, on_unreadable=left_out)
        for pair in ((other, others), (trained, how))
    ]
    numbers = vectors[0].numbers
    picture = neighbours.neighbours_figure(
        lambda i: how.read(source[int(numbers[i])]["image"]),
        vectors[0].features,
        vectors[1].features,
        titles=("photograph", f"nearest {title}", "nearest after training"),
    )
    path = os.path.join(workdir, PICTURE)
    neighbours.write(path, picture)
    return path


def _compared_with(
    config: TrainConfig, request: "_Request", trained: Pretrained
) -> tuple[Pretrained, str]:
    """Returns the starting weights, or the teacher, or random ones, and their title.

    Raises:
      UserError: the weights cannot be read.
    """
    if request.model:
        before = weights.open_pretrained(request.model, with_task=False)
        return before, "before training"
    if request.teachers:
        teacher = weights.open_pretrained(request.teachers[0], with_task=False)
        return teacher, "by the teacher"
    network = models.create(**trained.options)
    params = jax.device_get(network.init(jax.random.key(config.seed)))
    return dataclasses.replace(trained, params=params), "by random weights"


def _write_adapter(
    trained: Pretrained, workdir: str, say: Callable[[str], None]
) -> str:
    """Writes the low-rank updates in PEFT's format; returns the folder, or "" without."""
    folder = pathlib.Path(workdir) / ADAPTER
    try:
        _, notes = export.export(trained, "peft", folder, overwrite=True)
    except UserError as error:  # Not every network exists in transformers.
        say(f"no adapter is written: {error}")
        return ""
    for note in notes:
        say(f"adapter: {note}")
    return str(folder)


def summary(result: Result) -> list[str]:
    """Returns the scores, commands to continue with, and what the training gave."""
    model = result.workdir
    lines = scores.table(result.scores)
    if result.picture:
        lines.append(f"neighbours: {result.picture}")
    if result.adapter:
        lines.append(f"adapter:    {result.adapter}")
    lines += [
        f"fine-tune:  python -m vit_jax.finetune PHOTOS --model={model}",
        f"features:   python -m vit_jax.features --model={model} --out=FILE.parquet IMAGES",
        f"export:     python -m vit_jax.convert --model={model} --to=hf --out=FOLDER",
    ]
    return [
        *lines,
        scores.conclusion(result.scores, result.count, started=result.started),
    ]


@dataclasses.dataclass(frozen=True)
class _Request:
    """What to train on, and how; see `settings.Job`."""

    places: tuple[str, ...]
    model: str
    method: str
    teachers: tuple[str, ...]
    variant: str
    labels: str
    lora: int
    minutes: float
    overrides: Mapping[str, object]
    say: Callable[[str], None]

    file = photos.CHOSEN_FILE

    @property
    def place(self) -> str:
        return os.pathsep.join(self.places)

    def command(self, images: str) -> dict:
        """Returns everything that determines the results, as a JSON value."""
        return {
            "images": images,
            "--model": masked(self.model),
            "--method": self.method,
            "--teacher": [masked(each) for each in self.teachers],
            "--variant": self.variant,
            "--labels": self.labels,
            "--lora": self.lora,
            "--minutes": self.minutes,
            "config": {key: str(value) for key, value in self.overrides.items()},
        }

    def find(self, workdir: str) -> photos.Photos:
        """Returns the splits of the images; writes their list, see `photos.find`."""
        arranged, _ = settings.divided(self.overrides)
        return photos.find(self.places, arranged, workdir, self.labels)

    def moved(self, raw: Mapping, workdir: str) -> dict:
        """Returns a stored config that reads the lists in a workdir that was moved."""
        return photos.with_workdir(raw, workdir)


def _request(
    places: Sequence[str],
    model: str,
    method: str,
    teachers: Sequence[str],
    variant: str,
    labels: str,
    lora: int,
    minutes: float,
    overrides: Mapping[str, object] | None,
    say: Callable[[str], None],
) -> _Request:
    for key in overrides or {}:
        if key in _FLAGS:
            raise UserError(f"--config.{key}: {_FLAGS[key]} sets it here")
    if method and method not in METHODS:
        known = ", ".join(METHODS)
        raise UserError(f"method={method!r} is not a method: choose of {known}")
    if method == "distillation" and not teachers:
        raise UserError(
            "method='distillation' needs weights to learn from: give a teacher"
        )
    if teachers and method not in ("", "distillation"):
        raise UserError(f"method={method!r} has no teacher: leave one of them out")
    if variant and model:
        raise UserError(
            f"variant={variant!r} with model={masked(model)!r}, which has one too: leave one "
            "of them out"
        )
    if lora and not model:
        raise UserError(f"lora={lora} adapts weights: give a model")
    return _Request(
        tuple(place and settings.absolute_place(place) for place in places),
        model,
        method,
        tuple(teachers),
        variant,
        labels if labels in ("", photos.NO_LABELS) else settings.absolute_place(labels),
        lora,
        minutes,
        dict(overrides or {}),
        say,
    )


def choose(request: _Request, workdir: str) -> settings.Chosen:
    """Chooses the settings of a run.

    Returns:
      The complete config as a dict, and the choices and reasons by key.
    """
    _, overrides = settings.divided(request.overrides)
    given = _open(request, workdir)
    name, why = suits(given.pretrained, given.teachers)
    if request.method:
        name, why = request.method, "set"
    method: Method = METHODS[name]
    method.check(given)
    evals = _evaluations(given)
    config_of = functools.partial(_config, given, method, request, overrides, evals)
    wanted = float(np.clip(method.images / given.images.count, 1, MOST_EPOCHS))
    side = _side_of(given, overrides)
    batch = rule.batch_of(given.images, jax.default_backend(), jax.device_count())
    length, speed = rule.Length(side, wanted, math.nan), 0.0
    if request.minutes and not {"total_steps", "epochs"} & overrides.keys():
        raw = config_of(Length(side, batch, trial.STEPS), 1)
        speed = trial.measure(raw, request.say)
        side = raw["data"]["image_size"][0]
        step = side if "data.image_size" in overrides else given.patch
        # Forward passes in units of `rule.EVALUATED` training steps on an image.
        evaluated = round(_evaluated(given) / method.forwards / rule.EVALUATED)
        length = rule.fit(
            given.images, evaluated, side, step, speed, request.minutes, wanted
        )
    first = complete(config_of(Length(side, batch, 1), 1))
    batch, count = first.batch_size, given.images.count
    steps = max(1, round(length.epochs * count / batch))
    if {"total_steps", "epochs"} & overrides.keys():
        steps = first.num_steps(count)
    evaluations = max(1, min(EVALUATIONS, round(steps * batch / count)))
    raw = config_of(Length(length.side, batch, steps), evaluations, request.say)
    choices = _choices(given, method, why, raw, length, speed, request)
    for key in choices.keys() & request.overrides.keys():
        choices[key] = choices[key][0], "set"
    return fields.to_json(complete(raw)), choices


def _side_of(given: Given, overrides: Mapping[str, object]) -> int:
    """Returns the side to begin with: the one that is set, or that of the network."""
    key, raw = "data.image_size", {}
    if key in overrides:
        loading.override(TrainConfig, raw, {key: overrides[key]})
        return max(raw["data"]["image_size"])
    return max(given.network.image_shape[:2])


def _open(request: _Request, workdir: str) -> Given:
    splits = request.find(workdir)
    images = rule.look_at(splits.open(splits.data["split"]), None)
    if request.model:
        pretrained = weights.open_pretrained(request.model, with_task=True)
        for note in pretrained.notes:
            request.say(f"{masked(request.model)}: {note}")
        preprocess = weights.preprocessing_of(pretrained)
        options = pretrained.options
        patch = models.create(**options).config.patch_size
        side = rule.side_of(images, max(preprocess.image_size), patch)
    else:
        pretrained, options = None, {"variant": request.variant}
        patches = (p for least, p in _PATCHES.items() if images.side >= least)
        patch = next(patches, _SMALLEST_PATCH)
        if not request.variant:
            width = _WIDTH.get(jax.default_backend(), _WIDTH_ELSEWHERE)
            options = {"variant": f"{width}/{patch}"}
        patch = models.create(**options, num_classes=0).config.patch_size
        side = max(2, min(_SIDE, int(images.side) or _SIDE) // patch) * patch
        means = {"mean": imagenet.MEAN, "std": imagenet.STD}
        preprocess = Preprocess((side, side), **means, crop_fraction=0.875)
    size = {"image_size": (side, side), "num_classes": 0}
    network = models.create(**options | size)
    validated = len(splits.open(splits.validation))
    teachers = request.teachers
    return Given(splits, images, validated, network, preprocess, pretrained, teachers)


def _evaluated(given: Given) -> int:
    """Returns the number of forward passes of the evaluations after a step."""
    # Two views for the loss, and the features.
    held_out = 2 * given.validated + max(given.validated, RANKED)
    # k-NN also learns from about as many images as there are.
    return held_out + (given.photos.count if given.photos.labelled else 0)


def _evaluations(given: Given) -> dict:
    """Returns the section "evals"."""
    of = given.photos
    ranked = of.validation
    if given.validated < RANKED:  # The rank of few features is noise.
        name = splits.names(of.data["split"])[0]
        ranked = f"{name}[:{min(RANKED, len(of.open(name)))}]"
    evals = {
        "val": {"kind": "task", "split": of.validation},
        "rank": {"kind": "rank", "split": ranked},
    }
    if of.labelled:
        evals["knn"] = {"kind": "knn", **of.labelled}
    return evals


def _config(
    given: Given,
    method: Method,
    request: _Request,
    overrides: Mapping[str, object],
    evals: Mapping[str, dict],
    length: Length,
    evaluations: int,
    dropped: Callable[[str], None] = lambda line: None,
) -> dict:
    """Returns the chosen config; `dropped` is called with keys that overrides remove."""
    sections = method.sections(given, length)
    interval = max(1, length.steps // evaluations)
    size = (length.side, length.side)
    raw = {
        "name": "pretrain",
        "total_steps": length.steps,
        "batch_size": length.batch,
        "init": request.model,
        "data": {
            **given.photos.data,
            "image_size": size,
            "channels": given.network.options["channels"],
            "exif": True,
            "on_error": "skip_few",
            **given.preprocess.data_keys(),
            "eval_transform": given.preprocess.whole(size).line,
            **sections["data"],
        },
        "model": _model(given) | sections.get("model", {}),
        "task": _task(sections["task"], request.lora),
        "optim": sections["optim"],
        "ema": {"decay": 0.0},
        "log_every_steps": max(1, min(50, length.steps // 20)),
        "eval_every_steps": interval,
        "eval_at_start": True,
        "checkpoint_every_steps": interval,
        "checkpoint": {"max_to_keep": 1},
        "evals": copy.deepcopy(evals),
    }
    loading.override(TrainConfig, raw, overrides, dropped)
    for best in ("knn/top1", method.best, ""):  # Overrides may remove evaluations.
        if not best or best.partition("/")[0] in raw["evals"]:
            raw["checkpoint"].setdefault("best_metric", best)
            break
    complete(raw)  # Bad values end the command before anything is measured.
    return raw


def _model(given: Given) -> dict:
    """Returns the section "model"."""
    if given.pretrained:
        return fine_tuning.inherited(given.pretrained.options)
    return fine_tuning.dtypes() | {"variant": given.network.options["variant"]}


def _task(task: dict, rank: int) -> dict:
    """Returns the section "task", with low-rank updates of a frozen network if asked."""
    return {"name": "adapters", "rank": rank, "of": task} if rank else task


def _choices(
    given: Given,
    method: Method,
    why: str,
    raw: dict,
    length: rule.Length,
    speed: float,
    request: _Request,
) -> dict[str, tuple[str, str]]:
    """Returns choices and reasons by key."""
    images, data, optim = given.images, raw["data"], raw["optim"]
    steps = raw.get("total_steps") or raw["epochs"] * images.count / raw["batch_size"]
    epochs = steps * raw["batch_size"] / images.count
    side = data["image_size"][0]
    if speed:
        time = (
            f", about {length.seconds / 60:.0f} minutes at the measured {speed:.0f} "
            f"images/s (--minutes={request.minutes:g})"
        )
    else:
        time = "; no time limit"
    where = "the weights" if given.pretrained else "the images"
    best = raw["checkpoint"]["best_metric"]
    labelled = given.photos.labelled
    shown = "k-NN of labelled images" if labelled else "no labels are read"
    low_rank = f"adapters of rank {request.lora}" if request.lora else "all parameters"
    return {
        _PLACE: (given.photos.description, ""),
        "data.split, evals": (
            f"{images.count:,} images",
            f"{given.validated:,} held-out images are scored; {shown}",
        ),
        "--method": (f"{method.name}: {method.what}", why),
        "--model": (
            given.network.options["variant"],
            "its weights are the start" if given.pretrained else "random weights",
        ),
        "--lora": (f"trains {low_rank}", ""),
        "data.image_size": (f"images of {side} pixels", f"from {where} and the time"),
        **rule.products(raw["model"]),
        "batch_size": (f"batches of {raw['batch_size']}", "from the number of images"),
        "total_steps or epochs": (
            f"{round(steps)} steps",
            f"{epochs:.1f} epochs{time}",
        ),
        "optim.learning_rate": (
            f"{optim['name']}, rate {optim.get('learning_rate', 0):g}",
            "from the method and the batch size",
        ),
        "checkpoint.best_metric": (
            f"the best checkpoint by {best}" if best else "the last checkpoint",
            f"evaluated before the first step and every {raw['eval_every_steps']} steps"
            if raw["evals"]
            else "without evaluations",
        ),
    }

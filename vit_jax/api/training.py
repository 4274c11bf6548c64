"""Trains, fine-tunes and evaluates models from Python."""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from vit_jax import weights
from vit_jax.api.open_network import WeightsArguments, at_step
from vit_jax.command_line.files import default_workdir, new_workdir
from vit_jax.command_line.printing import print_line
from vit_jax.config import arguments, fields, loading
from vit_jax.config.fields import key
from vit_jax.data.config import PLACE, names_in
from vit_jax.data.sources.arrays import IN_MEMORY, check_pair, depth_of, open_arrays
from vit_jax.data.sources.open import opened_by
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint
from vit_jax.tools.finetuning import run as finetuning
from vit_jax.tools.pretraining import run as pretraining
from vit_jax.training import loop
from vit_jax.training import train_setup as setups
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.training.timers import StartupTimer
from vit_jax.training.train_setup import TrainSetup

# Keys of `data` about the location of files and their content.
_OF_FILES = {*PLACE, "num_examples", "exclude", "label_key", "mask_key"}
_BATCH = 64  # Images per batch of an evaluation without a config.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(WeightsArguments):
    model: str = key("", "Weights.")
    workdir: str = key("", "Folder of a run.")
    masks: str = key("", "Folder of masks.")
    aspect: str = key("crop", "How images that are not square are handled.")
    minutes: float = key(0.0, "Time limit in minutes.", below=2**31)
    folds: int = key(0, "Number of folds of the cross-validation.")
    calibrate: bool = key(False, "Whether to calibrate the probabilities.")
    method: str = key("", "Method of pretraining.")
    variant: str = key("", "Network without weights.")
    labels: str = key("", "Folder of labelled images.")
    lora: int = key(0, "Rank of low-rank updates.")
    num_examples: int = key(1, "Images per epoch.", at_least=1)
    callbacks: tuple[Callback, ...] = key((Callback(),), "Called during training.")


_checked = arguments.checked(_Arguments)

Arrays = tuple[np.ndarray, np.ndarray]


@_checked
def train(
    config: str | os.PathLike | Mapping | TrainConfig,
    workdir: str | os.PathLike | None = None,
    *,
    data: Arrays | Mapping[str, Arrays] | None = None,
    class_names: Sequence[str] = (),
    callbacks: Iterable[Callback] = (),
    **overrides,
) -> dict:
    """Trains, evaluates and reports; resumes an interrupted run in `workdir`.

    Args:
      config: file of a recipe, followed by a colon and its argument if it takes one; or
        a mapping or config with the same keys.
      workdir: folder for checkpoints, metrics and the report; a new one under runs/ if
        None.
      data: a pair (images, labels) in place of the config's data set, or a dict of such
        pairs by split name: the run trains on "train" and evaluates all others. Images
        are uint8 or uint16 (N, height, width, channels) or grey (N, height, width), or
        floats with any number of channels but 1 and 3; labels are integers (N,), or with
        `data.target_key` the numbers that it names, floats (N,) or (N, T). The
        transforms of the config apply to them as to files.
      class_names: class names of `data`, in label order.
      callbacks: objects whose methods are called during training, see `Callback`.
      **overrides: config keys, such as `epochs=3` or `**{"optim.learning_rate": 0.01}`.

    Returns:
      The content of `report.json`: final accuracies, steps, seconds and more.

    Raises:
      UserError: the input is bad, or memory or disk is full.

    Example:
      >>> import numpy as np, vit_jax
      >>> images = np.random.default_rng(0).integers(0, 256, (256, 8, 8), np.uint8)
      >>> labels = np.arange(256) % 2
      >>> pairs = {"train": (images, labels), "test": (images[:64], labels[:64])}
      >>> report = vit_jax.train(
      ...     "configs/digits.py",
      ...     "runs/noise",
      ...     data=pairs,
      ...     epochs=2,
      ...     **{"optim.warmup_epochs": 0},
      ... )  # doctest: +ELLIPSIS
         0.0 s  imported; finding the devices
      ...
      >>> sorted(report["final"]["test"])
      ['ema', 'params']
    """
    arrays, sections = {}, {}
    if data is not None:
        config = _raw(config, TrainConfig)
        key = config.get("data", {}).get("target_key", "")
        count = len(names_in(overrides.get("data.target_key", key)))
        arrays = _arrays(data, "train", class_names, num_targets=count)
        sections = _training_sections(arrays, class_names, labelled=not count)
    complete = _config(config, overrides, sections)
    with _opened(arrays, class_names):
        return loop.train(
            complete,
            workdir or new_workdir(complete.name),
            StartupTimer(say=print_line),
            callbacks=callbacks,
        )


@_checked
def finetune(
    photos: str | os.PathLike | Arrays | Mapping[str, Arrays],
    workdir: str | os.PathLike | None = None,
    *,
    masks: str | os.PathLike = "",
    target: str | Sequence[str] = "",
    group: str | Sequence = "",
    class_names: Sequence[str] = (),
    model: str | os.PathLike = "",
    aspect: str = finetuning.ASPECTS[0],
    minutes: int | float = finetuning.MINUTES,  # noqa: PYI041 (beartype knows)
    folds: int = 0,
    calibrate: bool = False,
    callbacks: Iterable[Callback] = (),
    tell: Callable[[str], None] = print,
    **overrides,
) -> finetuning.Result:
    """Fine-tunes weights on your images; resumes an interrupted run.

    Each setting that is not given follows from the number and size of the images and
    the speed of the device; each choice is printed with the key that changes it.

    Args:
      photos: folder with one folder per class, or with splits that hold such folders; a
        table of paths and labels (CSV, TSV, JSON Lines, Parquet); the name of a data
        set, such as "owner/name" on the Hugging Face hub; or arrays, like `data` of
        `train`.
      workdir: folder of the run, which `load_model` can open. If None, a folder under
        runs/finetune that depends on the images and the model only.
      masks: folder with the masks of the images, under the same file names, to learn
        the class of every pixel. Not needed for a folder that holds both.
      target: numbers to predict, such as "age" or ["age", "weight"]: columns of a table,
        features of a data set, fields of JSON; for arrays the names of the numbers that
        they have in place of labels, floats (N,) or (N, T), NaN where one is missing.
      group: images that stay together in splits and folds, such as photographs of one
        patient: a column of the table, or a regular expression for file names whose
        first parentheses hold the group; for arrays, the group of each training image.
      class_names: class names of arrays, in label order.
      model: weights, see `load_model`; if empty, DeiT-Ti on a CPU and AugReg S/16
        elsewhere.
      aspect: "crop" crops images to squares; "keep" keeps their aspect ratio, with as
        many patches as a square would have (NaFlex, docs/any_size.md).
      minutes: time limit for training and evaluation, kept by means of the measured
        speed; 0 for no limit.
      folds: number of runs, each with another part of the images held out for
        validation, so that every image of a small set is scored; the first run is the
        model.
      calibrate: whether to fit the probabilities to the validation images, and sets of
        classes for `PretrainedModel.predict(coverage=...)`.
      callbacks: objects whose methods are called during training, see `Callback`.
      tell: function that receives lines about the images and the choices.
      **overrides: config keys, such as `epochs=3` or `**{"optim.learning_rate": 0.01}`.

    Returns:
      The score on the test images, or without these on the validation images, with
      its 95 % interval, and the report of the run.

    Raises:
      UserError: images or weights cannot be read, or they do not fit together.

    Example:
      >>> import vit_jax
      >>> result = vit_jax.finetune(
      ...     "photos", "runs/photos", model="runs/digits", epochs=2
      ... )  # doctest: +ELLIPSIS
      runs/digits: ...
      >>> result.split, result.metric, result.interval[0] < result.score
      ('val', 'top1', True)
    """
    target = target if isinstance(target, str) else ",".join(target)
    arrays, place = {}, photos
    if isinstance(photos, Mapping | tuple | list):
        count = len(names_in(target))
        arrays = _arrays(photos, "train", class_names, num_targets=count)
        place = IN_MEMORY
        if masks:
            raise UserError(
                f"masks={masks!r}: photos are arrays, which cannot have masks: give the "
                "folder of the images, or leave it out"
            )
    place = arguments.take("photos", fields.Key(help=""), place, "")
    groups = _groups(group, arrays)
    with _opened(arrays, class_names, groups):
        return finetuning.finetune(
            place,
            workdir or default_workdir("finetune", model, place, masks, target),
            masks=masks,
            target=target,
            group="given" if groups else group,
            model=model,
            aspect=aspect,
            minutes=minutes,
            folds=folds,
            calibrate=calibrate,
            overrides=overrides,
            callbacks=callbacks,
            say=tell,
        )


@_checked
def pretrain(
    photos: str
    | os.PathLike
    | Sequence[str | os.PathLike]
    | np.ndarray
    | Arrays
    | Mapping[str, np.ndarray | Arrays],
    workdir: str | os.PathLike | None = None,
    *,
    model: str | os.PathLike = "",
    method: str = "",
    teacher: str | os.PathLike | Sequence[str | os.PathLike] = (),
    variant: str = "",
    labels: str | os.PathLike = "",
    lora: int = 0,
    minutes: int | float = pretraining.MINUTES,  # noqa: PYI041 (beartype knows)
    callbacks: Iterable[Callback] = (),
    tell: Callable[[str], None] = print,
    **overrides,
) -> pretraining.Result:
    """Pretrains on your images without labels; resumes an interrupted run.

    Each setting that is not given follows from the images, the weights and the speed of
    the device; each choice is printed with the flag or key that changes it.

    Args:
      photos: a folder of images at any depth, a table of paths (CSV, TSV, JSON Lines,
        Parquet), a tar shard or a folder of them, the name of a data set, such as
        "owner/name" on the Hugging Face hub; or a list of them. Or an array of images
        (see `train`), a pair (images, labels), whose labels are only for k-NN, or a
        dict of these by split name.
      workdir: folder of the run, which `load_model` can open. If None, a folder under
        runs/pretrain that depends on the images, the method and the weights only.
      model: weights to start from, see `load_model`; if empty, random ones.
      method: "dinov2", "mae" or "distillation"; if empty, it follows from the weights.
      teacher: weights whose features are learnt, or several of them.
      variant: network without `model`, such as "Ti/16".
      labels: folder with one folder per class, as `finetune` takes, on which k-NN is
        scored; if empty, the folders of `photos` if they are classes.
      lora: rank of low-rank updates, the only parameters of the network that are
        trained; 0 trains all parameters.
      minutes: time limit for training and evaluation, kept by means of the measured
        speed; 0 for no limit.
      callbacks: objects whose methods are called during training, see `Callback`.
      tell: function that receives lines about the images, choices and scores.
      **overrides: config keys, such as `epochs=3` or `**{"optim.learning_rate": 1e-4}`.

    Returns:
      The scores before, during and after the training, and the report of the run.

    Raises:
      UserError: images or weights cannot be read, or they do not fit together.

    Example:
      >>> import vit_jax
      >>> result = vit_jax.pretrain(
      ...     "photos", "runs/unlabelled", total_steps=2
      ... )  # doctest: +ELLIPSIS
      the folder or name ...
      >>> sorted(result.scores.by_step)
      [0, 2]
    """
    arrays, with_labels = _images(photos)
    folders = photos if isinstance(photos, list | tuple) else [photos]
    if arrays:
        folders = [IN_MEMORY]
        labels = labels or (IN_MEMORY if with_labels else "")
    teachers = teacher if isinstance(teacher, list | tuple) else [teacher]
    take = lambda name, one: arguments.take(name, fields.Key(help=""), one, "")
    teachers = [take("teacher", each) for each in teachers if each]
    places = [take("photos", place) for place in folders]
    if not places:
        raise UserError("photos=[]: give a folder of images, or several")
    given = workdir or default_workdir(
        "pretrain", method, model, ",".join(teachers), *places
    )
    with _opened(arrays, ()):
        return pretraining.pretrain(
            places,
            given,
            model=model,
            method=method,
            teachers=teachers,
            variant=variant,
            labels=labels,
            lora=lora,
            minutes=minutes,
            overrides=overrides,
            callbacks=callbacks,
            say=tell,
        )


@_checked
def evaluate(
    source: str | os.PathLike,
    config: str | os.PathLike | Mapping | EvaluationConfig | None = None,
    *,
    data: Arrays | Mapping[str, Arrays] | None = None,
    class_names: Sequence[str] = (),
    step: int | None = None,
    use_ema: bool = True,
    num_heads: int = 0,
    architecture: str = "",
    tell: Callable[[str], None] = print,
    **overrides,
) -> dict:
    """Evaluates weights as a config describes.

    Args:
      source: weights, see `load_model`.
      config: file of a recipe, such as "configs/eval/fewshot.py:data=digits", or a
        mapping or config with the same keys; optional if `data` is given.
      data: a pair (images, labels) to classify, as in `train`, in place of the config's
        data set and evaluations; or a dict of such pairs by split name.
      class_names: class names of `data`, in label order.
      step, use_ema, num_heads, architecture: options of `load_model`.
      tell: function that receives lines about the progress.
      **overrides: config keys, as in `train`.

    Returns:
      Metrics by evaluation, such as {"test": {"params": {"top1": 0.97, ...}}}.

    Raises:
      UserError: the weights or the data cannot be read, or they do not fit together.

    Example:
      >>> import numpy as np, vit_jax
      >>> pair = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 10
      >>> scores = vit_jax.evaluate("runs/digits", data=pair, tell=lambda line: None)
      >>> scores["test"]["weights"]["top1"]
      0.1
    """
    if data is None and config is None:
        raise UserError(
            "config=None: give a recipe, as 'configs/eval/fewshot.py:data=digits', or "
            "data=(images, labels) to classify"
        )
    pretrained, how = weights.open_weights(
        at_step(source, step),
        {},
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        with_task=True,
        tell=tell,
    )
    arrays, sections = {}, {}
    if data is not None:
        targets = pretrained.targets.names if pretrained.targets else ()
        arrays = _arrays(data, "", class_names, num_targets=len(targets))
        keys = {"name": IN_MEMORY}
        sections = _sections(arrays, keys, arrays, labelled=not targets)
    config = {"batch_size": _BATCH} if config is None else config
    config = _config(config, overrides, sections, cls=EvaluationConfig)
    with _opened(arrays, class_names):
        return checkpoint.evaluate(pretrained, how, config, tell).scores


@_checked
def train_setup(
    config: str | os.PathLike | Mapping | TrainConfig, num_examples: int, **overrides
) -> TrainSetup:
    """Builds the training step and the initial state for your own training loop.

    Args:
      config: recipe, see `train`.
      num_examples: number of images per epoch, for schedules.
      **overrides: config keys, as in `train`.

    Returns:
      A `TrainSetup`, with `initial_state()`, the jitted `train_step(state, batch)`,
      which returns the next state and metrics, and `total_steps`.

    Raises:
      UserError: the input is bad.

    Example:
      >>> import numpy as np, vit_jax
      >>> setup = vit_jax.train_setup("configs/digits.py", num_examples=1_442)
      >>> state = setup.initial_state()
      >>> batch = {
      ...     "image": np.zeros((64, 8, 8, 1), np.uint8),
      ...     "label": np.zeros(64, np.int32),
      ...     "index": np.arange(64, dtype=np.uint32),
      ... }
      >>> state, metrics = setup.train_step(state, batch)
      >>> round(float(metrics["loss"]), 3), int(state.step)
      (2.303, 1)
    """
    complete = _config(config, overrides)
    complete.task.check_without_records()
    return setups.build(complete, meshes.create(complete.mesh), num_examples)


def _training_sections(
    arrays: Mapping[str, Arrays], class_names: Sequence[str], *, labelled: bool
):
    """Returns `_sections` that train on the split "train" and evaluate all others."""
    images, labels = map(np.asarray, arrays["train"])
    classes = len(class_names) or int(labels.max(initial=0)) + 1 if labelled else 0
    keys = {
        "name": IN_MEMORY,
        "split": "train",
        "num_classes": classes,
        "channels": images.shape[3] if images.ndim == 4 else 1,
        "pixels": depth_of(images),
    }
    return _sections(arrays, keys, arrays.keys() - {"train"}, labelled=labelled)


def _sections(
    arrays: Mapping[str, Arrays],
    keys: Mapping,
    evaluated: Container[str],
    *,
    labelled: bool = True,
) -> dict[str, Callable[[Mapping], Mapping]]:
    """Returns functions that set `data` (to `keys`) and `evals` (evaluated splits)."""
    kind = {} if labelled else {"kind": "regression"}
    evals = {name: {"split": name, **kind} for name in arrays if name in evaluated}
    return {
        "data": lambda given: {k: given[k] for k in given.keys() - _OF_FILES} | keys,
        "evals": lambda _: evals,
    }


def _arrays(
    data: Arrays | Mapping[str, Arrays],
    main: str,
    class_names: Sequence[str],
    *,
    num_targets: int = 0,
) -> dict[str, Arrays]:
    """Checks and returns images and labels by split; the split `main` must exist.

    With `num_targets` there are numbers in place of labels, see `open_arrays`.
    """
    arrays = dict(data) if isinstance(data, Mapping) else {main or "test": data}
    if main and main not in arrays:
        raise UserError(f"data has no {main!r} among {', '.join(arrays) or 'nothing'}")
    for name, pair in arrays.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            what = f"{type(pair).__name__} {fields.shown(pair)}"
            raise UserError(f"data {name}={what}: give a pair (images, labels)")
        check_pair(f"data {name}: ", *pair, class_names, num_targets=num_targets)
    return arrays


def _images(photos: object) -> tuple[dict[str, Arrays], bool]:
    """Returns images and labels by split, and whether all have labels.

    Labels that are not given are 0. The dict is empty if `photos` are not arrays.
    """
    is_pair = isinstance(photos, tuple | list) and any(
        isinstance(one, np.ndarray) for one in photos
    )
    if not is_pair and not isinstance(photos, Mapping | np.ndarray):
        return {}, False
    given = photos if isinstance(photos, Mapping) else {"train": photos}
    alone = {name for name, one in given.items() if isinstance(one, np.ndarray)}
    pairs = {
        name: (one, np.zeros(len(one), np.int32)) if name in alone else one
        for name, one in given.items()
    }
    return _arrays(pairs, "train", ()), not alone


def _groups(
    group: str | Sequence, arrays: Mapping[str, Arrays]
) -> tuple[str, ...] | None:
    """Returns the group of each training image in `arrays`; None for other images."""
    if isinstance(group, str):
        if group and arrays:
            raise UserError(
                f"group={group!r}: photos are arrays: give the group of each of their "
                "training images"
            )
        return None
    count = len(arrays["train"][0]) if arrays else 0
    if len(group) != count:
        raise UserError(
            f"group has {len(group)} values: give one for each of the {count} training "
            "images in arrays, or the column or rule of other images"
        )
    return tuple(map(str, group))


def _opened(
    arrays: Mapping[str, Arrays],
    class_names: Sequence[str],
    groups: Sequence[str] | None = None,
):
    """Replaces every data set by the arrays, if there are any."""
    if not arrays:
        return contextlib.nullcontext()

    return opened_by(
        lambda data, split, _: open_arrays(
            arrays,
            split,
            IN_MEMORY,
            class_names,
            groups,
            num_targets=len(data.targets),
        )
    )


def _config(
    config, overrides: Mapping, sections: Mapping | None = None, cls=TrainConfig
):
    """Completes a config; `sections` are functions that change it before overrides."""
    raw = _raw(config, cls)
    for name, change in (sections or {}).items():
        raw[name] = change(raw.get(name, {}))
    loading.override(TrainConfig, raw, overrides)
    return loading.complete(cls, raw)


def _raw(config, cls: type) -> dict:
    """Returns a copy of the keys of a recipe, a mapping or a config."""
    if isinstance(config, str | os.PathLike):
        return loading.read(TrainConfig, os.fspath(config))
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if isinstance(config, cls):
        return fields.to_dict(config)
    raise UserError(
        f"config={fields.shown(config)} is {type(config).__name__}: give the file of a "
        f"recipe, a mapping of its keys or a {cls.__name__}"
    )

"""Training, fine-tuning and evaluation."""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from vit_jax import weights
from vit_jax.api.pretrained_model import WeightsArguments, at_step
from vit_jax.command_line.files import default_workdir, new_workdir
from vit_jax.command_line.printing import print_line
from vit_jax.config import arguments, fields, loading
from vit_jax.config.fields import key
from vit_jax.data.config import PLACE
from vit_jax.data.sources.arrays import IN_MEMORY, check_pair, depth_of, open_arrays
from vit_jax.data.sources.open import opened_by
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint
from vit_jax.tools.finetuning import run as finetuning
from vit_jax.training import loop
from vit_jax.training import train_setup as setups
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.training.timers import StartupTimer
from vit_jax.training.train_setup import TrainSetup

# Keys of `data` that say where files are and what is in them.
_OF_FILES = {*PLACE, "num_examples", "exclude", "label_key", "mask_key"}
_BATCH = 64  # Images per batch of an evaluation without a config.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(WeightsArguments):
    model: str = key("", "Weights.")
    workdir: str = key("", "Folder of a run.")
    masks: str = key("", "Folder of masks.")
    aspect: str = key("crop", "What becomes of images that are not square.")
    minutes: float = key(0.0, "Time to train in.", below=2**31)
    folds: int = key(0, "Runs, each with another part to validate on.")
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
    """Trains, evaluates and reports; resumes where a run in `workdir` was interrupted.

    Args:
      config: file of a recipe, with its argument after a colon if it takes one; or a
        mapping or config of the same keys.
      workdir: folder for checkpoints, metrics and the report; a new one under runs/ if
        None.
      data: images, uint8 or uint16 (N, height, width, channels) or grey (N, height,
        width), or floats of other channels than 1 or 3; and their labels, integers (N,),
        in place of the config's data set; or such pairs by the name of their split, of
        which "train" is trained on and all others are evaluated. Transforms of the
        config prepare them, as those of files.
      class_names: of `data`, in label order.
      callbacks: see `Callback`.
      **overrides: config keys, as `epochs=3` or `**{"optim.learning_rate": 0.01}`.

    Returns:
      The content of `report.json`: final accuracies, steps, seconds and more.

    Raises:
      UserError: bad input, or memory or disk is full.

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
    arrays = {} if data is None else _arrays(data, "train", class_names)
    sections = _training_sections(arrays, class_names) if arrays else {}
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
    class_names: Sequence[str] = (),
    model: str | os.PathLike = "",
    aspect: str = finetuning.ASPECTS[0],
    minutes: int | float = finetuning.MINUTES,  # noqa: PYI041 (beartype knows)
    folds: int = 0,
    callbacks: Iterable[Callback] = (),
    tell: Callable[[str], None] = print,
    **overrides,
) -> finetuning.Result:
    """Fine-tunes weights on your images; resumes where it was interrupted.

    A rule chooses every setting that is not given, from the number and size of the images
    and the speed of the device, and prints each choice with the key that changes it.

    Args:
      photos: folder with folders of classes, or of splits with those; a table of paths
        and labels (CSV, TSV, JSON Lines, Parquet); or the name of a data set, as
        "owner/name" on the Hugging Face hub. Or images and labels, or such pairs by the
        name of their split, as `data` of `train`.
      workdir: folder of the run, which is a model for `load_model`; one under
        runs/finetune, the same for the same images and model, if None.
      masks: folder of the masks of the images in a folder, with the same names: the class
        of every pixel is learnt. A folder of both needs none.
      class_names: of arrays, in label order.
      model: weights, see `load_model`; DeiT-Ti on a CPU and AugReg S/16 elsewhere if
        empty.
      aspect: "crop" for squares; "keep" for images of any size, of as many patches as a
        square has (NaFlex, docs/any_size.md).
      minutes: to train and evaluate in, by the measured speed; 0 is no limit.
      folds: train so often, each time with another part of the images to validate on, so
        that all of a small set are scored; the first run is the model.
      callbacks: see `Callback`.
      tell: called with lines about the images and the choices.
      **overrides: config keys, as `epochs=3` or `**{"optim.learning_rate": 0.01}`.

    Returns:
      The score on the test images, or else on those that validate, with its 95 %
      interval, and the run's report.

    Raises:
      UserError: images or weights cannot be read, or do not fit each other.

    Example:
      >>> import vit_jax
      >>> result = vit_jax.finetune(
      ...     "photos", "runs/photos", model="runs/digits", epochs=2
      ... )  # doctest: +ELLIPSIS
      runs/digits: ...
      >>> result.split, result.metric, result.interval[0] < result.score
      ('val', 'top1', True)
    """
    arrays, place = {}, photos
    if isinstance(photos, Mapping | tuple | list):
        arrays, place = _arrays(photos, "train", class_names), IN_MEMORY
        if masks:
            raise UserError(
                f"masks={masks!r}: photos are arrays, which have no masks here: give the "
                "folder of the images, or leave it out"
            )
    place = arguments.take("photos", fields.Key(help=""), place, "")
    with _opened(arrays, class_names):
        return finetuning.finetune(
            place,
            workdir or default_workdir("finetune", model, place, masks),
            masks=masks,
            model=model,
            aspect=aspect,
            minutes=minutes,
            folds=folds,
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
    """Runs the evaluations of a config on weights.

    Args:
      source: weights, see `load_model`.
      config: file of a recipe, as "configs/eval/fewshot.py:data=digits", or a mapping or
        config of the same keys; needed unless `data` is classified.
      data: images and labels to classify, as of `train`, in place of the config's data
        set and evaluations; or such pairs by the name of their split.
      class_names: of `data`, in label order.
      step, use_ema, num_heads, architecture: see `load_model`.
      tell: called with lines about what happens.
      **overrides: config keys, as of `train`.

    Returns:
      Metrics by evaluation, as {"test": {"params": {"top1": 0.97, ...}}}.

    Raises:
      UserError: the weights or the data cannot be read or do not fit each other.

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
    arrays = {} if data is None else _arrays(data, "", class_names)
    keys = {"name": IN_MEMORY}
    sections = {} if data is None else _sections(arrays, keys, arrays)
    config = {"batch_size": _BATCH} if config is None else config
    config = _config(config, overrides, sections, cls=EvaluationConfig)
    pretrained, how = weights.open_weights(
        at_step(source, step),
        {},
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        with_task=True,
        tell=tell,
    )
    with _opened(arrays, class_names):
        return checkpoint.evaluate(pretrained, how, config, tell).scores


@_checked
def train_setup(
    config: str | os.PathLike | Mapping | TrainConfig, num_examples: int, **overrides
) -> TrainSetup:
    """Builds the step and the initial state for your training loop.

    Args:
      config: see `train`.
      num_examples: images of an epoch, for schedules.
      **overrides: config keys, as of `train`.

    Returns:
      Among others `initial_state()`, the jitted `train_step(state, batch)`, which returns
      the next state and metrics, and `total_steps`.

    Raises:
      UserError: bad input.

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


def _training_sections(arrays: Mapping[str, Arrays], class_names: Sequence[str]):
    """Returns `_sections` that train on the arrays of "train" and evaluate on the others."""
    images, labels = map(np.asarray, arrays["train"])
    keys = {
        "name": IN_MEMORY,
        "split": "train",
        "num_classes": len(class_names) or int(labels.max(initial=0)) + 1,
        "channels": images.shape[3] if images.ndim == 4 else 1,
        "pixels": depth_of(images),
    }
    return _sections(arrays, keys, arrays.keys() - {"train"})


def _sections(
    arrays: Mapping[str, Arrays], keys: Mapping, evaluated: Container[str]
) -> dict[str, Callable[[Mapping], Mapping]]:
    """Returns changes of `data` (to `keys`) and `evals` (splits to evaluate) of a config."""
    evals = {name: {"split": name} for name in arrays if name in evaluated}
    return {
        "data": lambda given: {k: given[k] for k in given.keys() - _OF_FILES} | keys,
        "evals": lambda _: evals,
    }


def _arrays(
    data: Arrays | Mapping[str, Arrays], main: str, class_names: Sequence[str]
) -> dict[str, Arrays]:
    """Returns images and labels by the name of their split, checked; `main` is required."""
    arrays = dict(data) if isinstance(data, Mapping) else {main or "test": data}
    if main and main not in arrays:
        raise UserError(f"data has no {main!r} among {', '.join(arrays) or 'nothing'}")
    for name, pair in arrays.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            what = f"{type(pair).__name__} {fields.shown(pair)}"
            raise UserError(f"data {name}={what}: give a pair (images, labels)")
        check_pair(f"data {name}: ", *pair, class_names)
    return arrays


def _opened(arrays: Mapping[str, Arrays], class_names: Sequence[str]):
    """Opens arrays, if there are any, in place of every data set."""
    if not arrays:
        return contextlib.nullcontext()

    return opened_by(
        lambda _, split, __: open_arrays(arrays, split, IN_MEMORY, class_names)
    )


def _config(
    config, overrides: Mapping, sections: Mapping | None = None, cls=TrainConfig
):
    """Completes a config; sections are changed by functions before overrides."""
    if isinstance(config, str | os.PathLike):
        raw = loading.read(TrainConfig, os.fspath(config))
    elif isinstance(config, Mapping):
        raw = copy.deepcopy(dict(config))
    elif isinstance(config, cls):
        raw = fields.to_dict(config)
    else:
        raise UserError(
            f"config={fields.shown(config)} is {type(config).__name__}: give the file of a recipe, "
            f"a mapping of its keys or a {cls.__name__}"
        )
    for name, change in (sections or {}).items():
        raw[name] = change(raw.get(name, {}))
    loading.override(TrainConfig, raw, overrides)
    return loading.complete(cls, raw)

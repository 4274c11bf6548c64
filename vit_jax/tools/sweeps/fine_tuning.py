"""The config of a fine-tuning run, from a recipe, a checkpoint and overrides."""

import dataclasses
import pathlib
from collections.abc import Mapping

import jax

from vit_jax import models
from vit_jax.config import fields, loading
from vit_jax.config.lengths import depends_on_epochs
from vit_jax.data import splits
from vit_jax.data.config import DataConfig
from vit_jax.data.sources import folder
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_unchecked, source_type
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import kernels
from vit_jax.tools.sweeps import recipes, split_guard
from vit_jax.training import train_setup
from vit_jax.training.config import TrainConfig, complete
from vit_jax.weights.preprocessing import preprocessing_of
from vit_jax.weights.pretrained import Pretrained

# Parameters that each mode freezes; only the head is new in all of them.
MODES = {
    "full": {},
    "head": {"freeze": (r"^(?!head(_dist)?/)",)},
    "head_then_all": {"freeze": (r"^(?!head(_dist)?/)",), "freeze_fraction": 0.2},
}
# Number of checkpoints per run, and minimum number of steps between them.
_SAVES, _LEAST = 10, 50
# Options that are not taken from the checkpoint: regularisation and the old head.
_NOT_INHERITED = ("num_classes", "image_size", "channels", "head_bias_init", "init")
_NOT_INHERITED += ("dtype", "matmul_dtype")
_NOT_INHERITED += ("representation_layer", "dropout", "drop_path_rate", "patch_dropout")
# The flag that sets each key.
_FLAGS = {
    "init": "--model",
    "init.checkpoint": "--model",
    "seed": "--seeds",
    "optim.learning_rate": "--learning_rates",
    "optim.base_learning_rate": "--learning_rates",
    "optim.layer_decay": "--layer_decay",
    "data.name": "--dataset",
    "data.data_dir": "--data_dir",
    "data.image_size": "--resolution",
}
_PARTS = ("data.split", "data.exclude", "data.num_examples", "evals")


@dataclasses.dataclass(frozen=True)
class TransferTask:
    """A data set to fine-tune a checkpoint on.

    Attributes:
      recipe: recipe of the data set.
      config: complete config of all runs, except for learning rate, seed and splits.
      rates: peak learning rates to choose from.
      notes: assumptions, for the log.
      mode: one of `MODES`.
      overrides: values set by the user, by dotted config key.
    """

    recipe: recipes.Recipe
    config: TrainConfig
    rates: tuple[float, ...]
    notes: tuple[str, ...] = ()
    mode: str = "full"
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def trial(self, rate: float) -> TrainConfig:
        """Returns the config of a run that is scored on the held-out split."""
        return self._run(rate, 0, self.recipe.part, held_out=self.recipe.held_out)

    def final(self, rate: float, seed: int) -> TrainConfig:
        """Returns the config of a run that is scored once, on the test split."""
        return self._run(rate, seed, self.recipe.train, test=self.recipe.test)

    def _run(self, rate, seed, split, **evals) -> TrainConfig:
        raw = fields.to_json(self.config)
        raw["seed"], raw["optim"]["learning_rate"] = seed, rate
        raw["data"]["split"], raw["evals"] = split, evals
        if "test" in evals:
            raw |= {"eval_every_steps": 0, "eval_every_epochs": 0.0}
        return complete(raw)


def task(
    pretrained: Pretrained,
    recipe: recipes.Recipe,
    *,
    resolution: tuple[int, int] | None = None,
    mode: str = "full",
    layer_decay: float = 0.0,
    rates: tuple[float, ...] = (),
    overrides: Mapping[str, object] | None = None,
) -> TransferTask:
    """Completes a recipe for a checkpoint; opens only the training split.

    Args:
      pretrained: checkpoint, from `weights.open_pretrained`.
      recipe: recipe of the data set.
      resolution: height and width in pixels; `usual_size` if None.
      mode: one of `MODES`.
      layer_decay: value of `optim.layer_decay`.
      rates: peak learning rates to choose from; the recipe's if empty.
      overrides: values for all runs, by dotted config key.

    Raises:
      UserError: a value does not fit, or an override belongs to a flag or the recipe.
    """
    overrides = dict(overrides or {})
    _refuse_overrides(overrides)
    if split_guard.overlap(recipe.train, recipe.test):
        raise UserError(
            f"--test={recipe.test}: {recipe.dataset} is trained on {recipe.train!r}, "
            "which must not share a split with it: set --test=SPLIT"
        )
    raw = _raw(pretrained, recipe, resolution or usual_size(pretrained), mode)
    raw["optim"]["layer_decay"] = layer_decay
    _apply_overrides(raw, overrides)
    _fill(raw)
    config = complete(raw)
    config.build_model()  # Raises early if options contradict each other.
    notes = [f"recipe: {recipe.source}"]
    is_set = {"data.mean", "data.std"} <= overrides.keys()
    if pretrained.preprocess is None and not is_set:
        described = preprocessing_of(pretrained).describe()
        notes.append(
            f"{pretrained.source} does not record how its images are normalised; assumed "
            f"as in {described}: otherwise set --config.data.mean and --config.data.std"
        )
    chosen = tuple(sorted(set(rates or recipe.rates)))
    return TransferTask(recipe, config, chosen, tuple(notes), mode, overrides)


def usual_size(pretrained: Pretrained) -> tuple[int, int]:
    """Returns 384, 518 (H/14 in the paper) or the nearest multiple of the patch."""
    patch = models.create(**pretrained.options).config.patch_size
    candidates = (384, 518, max(1, round(384 / patch)) * patch)
    side = next(size for size in candidates if size % patch == 0)
    return side, side


def _fill(raw: dict) -> None:
    """Sets missing numbers of classes and steps from the training split."""
    data, timed = raw["data"], raw["total_steps"] or raw.get("epochs")
    if not data["num_classes"] or not timed:
        # Labels are not checked here, so any number of classes will do.
        opened = DataConfig(**data | {"num_classes": 1})
        source = open_unchecked(opened, opened.split)
        data["num_classes"] = data["num_classes"] or num_classes_of(
            source, data["name"]
        )
        if not timed:
            raw["total_steps"] = recipes.steps_for(len(source))
    if raw["total_steps"]:
        often = max(_LEAST, raw["total_steps"] // _SAVES)
        raw.setdefault("checkpoint_every_steps", often)


def num_classes_of(source: Source, name: str) -> int:
    """Returns the number of classes of a training split of the data set `name`.

    Raises:
      UserError: the source has neither class names nor labels.
    """
    if source.class_names:
        return len(source.class_names)
    if source.labels is not None:
        return int(source.labels.max()) + 1
    raise UserError(
        f"{name} does not name its classes: set --config.data.num_classes to "
        "their number"
    )


def _raw(pretrained, recipe, size, mode) -> dict:
    """Returns the config that the recipe and the checkpoint determine."""
    preprocess = preprocessing_of(pretrained)
    return {
        "name": f"transfer_{recipe.title.replace('/', '_')}",
        "total_steps": recipe.steps,
        "batch_size": 512,
        "init": pretrained.source,
        "data": {
            "name": recipe.dataset,
            "data_dir": recipe.data_dir,
            "split": recipe.train,
            "num_classes": recipe.num_classes,
            "image_size": size,
            "channels": pretrained.options["channels"],
            **recipe.transforms(size, preprocess.interpolation),
            **preprocess.data_keys(),
        },
        "model": inherited(pretrained.options),
        "task": {"loss": "softmax"},
        "optim": {
            "name": "sgd",
            "momentum": 0.9,
            "mu_dtype": recipe.mu_dtype,
            "schedule": "cosine",
            "weight_decay": 0.0,
            "grad_clip_norm": 1.0,
            "warmup_steps": recipe.warmup,
            "learning_rate": 1.0,  # Replaced for each run.
            **MODES[mode],
        },
        "ema": {"decay": recipe.average(size)},
        "log_every_steps": 50,
        "eval_every_steps": 0,
        "checkpoint": {"max_to_keep": 1},
        "evals": {},
    }


def inherited(options: Mapping[str, object]) -> dict:
    """Returns the keys of `config.model` for the checkpoint's network."""
    variant = options["variant"]
    known = fields.fields(models.VARIANTS.find(variant, "model"))
    return dtypes() | {
        name: options[name]
        for name, about in known.items()
        if name in options
        and name not in _NOT_INHERITED
        and about.changes_result
        and fields.is_read(about, options)  # Given the checkpoint's choices.
    }


def dtypes() -> dict[str, str]:
    """Returns the keys of `config.model` for the numbers that suit this machine."""
    if jax.default_backend() != "cpu":
        return {"dtype": "bfloat16"}
    # CPUs are slow in bfloat16, except in products.
    return {"dtype": "float32", "matmul_dtype": "bfloat16" if kernels.has_amx() else ""}


def check_feasible(task: TransferTask) -> None:
    """Checks that all runs of a task can be built, before anything is written.

    Opens the training split, usually reading one record, and nothing of the test split.

    Raises:
      UserError: the test split does not exist, or a length or the network does not fit.
    """
    config, recipe = task.config, task.recipe
    sizes = _sizes(task)
    if recipe.dataset == "folder":
        _check_folders(recipe.test, recipe.data_dir)
    elif sizes:
        try:
            splits.select(recipe.test, sizes, recipe.title)
        except UserError as error:
            raise UserError(f"--test={recipe.test}: {error}") from error
    # The number of examples matters only if a length is given in epochs.
    lengths = {config.batch_size}
    if config.epochs or depends_on_epochs(config.optim):
        parts = (recipe.train, recipe.part)[: len(task.rates)]  # One rate: no trials.
        lengths = {
            len(splits.Numbering.of(split, sizes, recipe.title))
            if sizes
            else len(open_unchecked(config.data, split))
            for split in parts
        }
    final, mesh = task.final(task.rates[0], 0), meshes.create(config.mesh)
    for examples in sorted(lengths):
        train_setup.build(final, mesh, examples)


def _sizes(task: TransferTask) -> Mapping[str, int]:
    """Returns the number of records by split name; {} if unknown."""
    if not source_type(task.recipe.dataset).numbered:
        return {}
    # One record is enough: its source has the sizes of all splits.
    first = f"{splits.names(task.recipe.train)[0]}[:1]"
    numbering = open_unchecked(task.config.data, first).split_numbering()
    return {} if numbering is None else numbering.sizes


def _check_folders(test: str, data_dir: str) -> None:
    root = pathlib.Path(data_dir).expanduser()
    folders = folder.visible_folders(root)
    for name in splits.names(test):
        if name not in folders and not folder.has_split(root, name):
            raise UserError(
                f"--test={test}: {data_dir} has no folder {name!r}; it has "
                f"{', '.join(folders) or 'none'}"
            )


def _refuse_overrides(overrides: Mapping[str, object]) -> None:
    """Raises UserError for keys that a flag or the recipe sets."""
    for key in overrides:
        if key in _FLAGS:
            raise UserError(f"--config.{key}: {_FLAGS[key]} sets it here")
        if key.startswith(_PARTS):
            raise UserError(
                f"--config.{key}: the recipe sets the splits for training and scoring; "
                "set --dataset and --test"
            )
        if isinstance(fields.fields(TrainConfig).get(key), fields.Section):
            raise UserError(f"--config.{key}: it is a section; set a key of it")


def _apply_overrides(raw: dict, overrides: Mapping[str, object]) -> None:
    """Applies overrides to a config, whose `data.num_classes` may still be 0."""
    loading.override(TrainConfig, raw, overrides)
    if raw.get("epochs") and "total_steps" not in overrides:
        raw["total_steps"] = 0
    classes = raw["data"]["num_classes"] or 1
    complete(raw | {"data": raw["data"] | {"num_classes": classes}})

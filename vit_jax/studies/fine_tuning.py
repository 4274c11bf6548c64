"""The config of a fine-tuning run: a recipe, a checkpoint, and what the user states."""

import dataclasses
import re
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from vit_jax import config as configuration
from vit_jax import models
from vit_jax.data import sources
from vit_jax.errors import UserError
from vit_jax.evaluation import network
from vit_jax.schema import CHOICES, COMMON, FORMS
from vit_jax.studies import keeper, recipes
from vit_jax.studies import overrides as overriding
from vit_jax.weights import preprocess as preprocessing
from vit_jax.weights.pretrained import Pretrained

# What moves in each mode; the classifier is the only new parameter in all of them.
MODES = {
    "full": {},
    "head": {"freeze": (r"^(?!head(_dist)?/)",)},
    "head_then_all": {"freeze": (r"^(?!head(_dist)?/)",), "freeze_fraction": 0.2},
}
# Steps between checkpoints: so many parts of a run, and not fewer than this.
_SAVES, _LEAST = 10, 50
# Of the checkpoint, but a run's own: what is drawn while it trains, and the old head.
_NOT_INHERITED = (
    *("classes", "image_size", "channels", "head_bias", "dtype", "representation"),
    *("dropout", "stochastic_depth"),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set to fine-tune a checkpoint on.

    Attributes:
      recipe: of the data set, with all of its numbers.
      config: complete config that all runs share, but for rate, seed and splits.
      rates: peak rates to choose from.
      notes: lines on what was assumed.
      mode: one of `MODES`.
      overrides: dotted config key to value, as the user stated them.
    """

    recipe: recipes.Recipe
    config: ConfigDict
    rates: tuple[float, ...]
    notes: tuple[str, ...] = ()
    mode: str = "full"
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def trial(self, rate: float) -> ConfigDict:
        """Returns the config of a run that is scored on the held-out part."""
        return self._run(rate, 0, self.recipe.part, held_out=self.recipe.held_out)

    def final(self, rate: float, seed: int) -> ConfigDict:
        """Returns the config of a run that is scored once, on the test split."""
        return self._run(rate, seed, self.recipe.train, test=self.recipe.test)

    def _run(self, rate, seed, split, **evals) -> ConfigDict:
        raw = configuration.to_json(self.config)
        raw["seed"], raw["optim"]["rate"] = seed, rate
        raw["data"]["split"], raw["evals"] = split, evals
        if "test" in evals:
            raw["every"] |= {"evaluate": 0, "evaluate_epochs": 0.0}
        return configuration.complete(raw)


def task(
    pretrained: Pretrained,
    recipe: recipes.Recipe,
    *,
    resolution: tuple[int, int] | None = None,
    mode: str = "full",
    layer_decay: float = 0.0,
    rates: tuple[float, ...] = (),
    overrides: Mapping[str, object] | None = None,
) -> Task:
    """Completes a recipe for a checkpoint; opens the training split, nothing else.

    Args:
      pretrained: what `weights.open_pretrained` returns.
      recipe: of the data set.
      resolution: height and width in pixels; `usual_size` if None.
      mode: one of `MODES`.
      layer_decay: see `optim.layer_decay`.
      rates: in place of the recipe's.
      overrides: dotted config key to value, for all runs.

    Raises:
      UserError: something does not fit, or an override is a flag's or the study's.
    """
    overrides = dict(overrides or {})
    overriding.refuse(overrides)
    if keeper.touch(recipe.train, recipe.test):
        raise UserError(
            f"--test={recipe.test}: {recipe.dataset} is trained on {recipe.train!r}, "
            "which must have no split in common with it: state --test=SPLIT"
        )
    raw = _raw(pretrained, recipe, resolution or usual_size(pretrained), mode)
    raw["optim"]["layer_decay"] = layer_decay
    overriding.apply(raw, overrides)
    _fill(raw)
    config = configuration.complete(raw)
    models.create(  # Refuses here and now what does not fit.
        **config.model,
        classes=config.data.classes,
        image_size=config.data.image_size,
        channels=config.data.channels,
    )
    notes = [f"recipe: {recipe.source}"]
    if pretrained.preprocess is None and not {"data.mean", "data.std"} <= set(
        overrides
    ):
        described = preprocessing.describe(network.preprocessing_of(pretrained))
        notes.append(
            f"{pretrained.source} does not tell how its images are normalised; assumed "
            f"as of {described}: else set --config.data.mean and --config.data.std"
        )
    chosen = tuple(sorted(set(rates or recipe.rates)))
    return Task(recipe, config, chosen, tuple(notes), mode, overrides)


def usual_size(pretrained: Pretrained) -> tuple[int, int]:
    """Returns 384 x 384, or the nearest size that the patches divide, upwards at 14.

    The paper takes 518 for H/14.
    """
    patch = models.create(**pretrained.options).patch
    candidates = (384, 518, max(1, round(384 / patch)) * patch)
    side = next(size for size in candidates if size % patch == 0)
    return side, side


def _fill(raw: dict) -> None:
    """Finds out from the training split what neither recipe nor user state."""
    data, timed = raw["data"], raw["total_steps"] or raw.get("epochs")
    if not data["classes"] or not timed:
        # One class for the moment: what is opened unchecked may have more.
        opened = ConfigDict(COMMON["data"] | data | {"classes": 1})
        source = sources.open_unchecked(opened, opened.split)
        data["classes"] = data["classes"] or _classes(source, data["name"])
        raw["total_steps"] = (
            raw["total_steps"] if timed else recipes.steps_for(len(source))
        )
    if raw["total_steps"]:
        often = max(_LEAST, raw["total_steps"] // _SAVES)
        raw["every"] = {"checkpoint": often} | raw["every"]


def _classes(source: sources.Source, name: str) -> int:
    if source.class_names:
        return len(source.class_names)
    if source.labels is not None:
        return int(source.labels.max()) + 1
    raise UserError(
        f"--dataset={name} does not name its classes: set --config.data.classes to "
        "their number"
    )


def _raw(pretrained, recipe, size, mode) -> dict:
    """Returns what the recipe and the checkpoint state."""
    preprocess = network.preprocessing_of(pretrained)
    on_cpu = jax.default_backend() == "cpu"
    optim = {"name": "sgd", "momentum": 0.9, "decay": "cosine", "weight_decay": 0.0}
    return {
        "name": f"transfer_{recipe.title.replace('/', '_')}",
        "total_steps": recipe.steps,
        "batch_size": 512,
        "init": pretrained.source,
        "init_head": "replace",
        "data": {
            "name": recipe.dataset,
            "data_dir": recipe.data_dir,
            "split": recipe.train,
            "classes": recipe.classes,
            "image_size": size,
            "channels": pretrained.options["channels"],
            "ops": recipe.ops(size),
            "eval_ops": "resize",
            "mean": preprocess.mean,
            "std": preprocess.std,
        },
        "model": {
            **_inherited(pretrained.options),
            # bfloat16 is what TPUs and GPUs are fast at, and CPUs are not.
            "dtype": "float32" if on_cpu else "bfloat16",
        },
        "loss": {"name": "softmax"},
        "optim": {
            **optim,
            "clip_norm": 1.0,
            "warmup_steps": recipe.warmup,
            "rate": 1.0,  # Until a run states its own.
            **MODES[mode],
        },
        "average": {"decay": recipe.average(size)},
        "every": {"log": 50, "evaluate": 0},
        "keep": {"last": 1},
        "evals": {},
    }


def _inherited(options: Mapping[str, object]) -> dict:
    """Returns the keys of `config.model` that make the checkpoint's network."""
    variant = options["variant"]
    form = next(form for form in FORMS if re.fullmatch(form, variant))
    known = {"variant": variant} | FORMS[form]
    for (section, choice), ways in CHOICES.items():
        if section == "model" and choice in known:
            # Keys that are read only under the choice that the checkpoint makes.
            known |= ways[options.get(choice, known[choice])]
    ignored = (*_NOT_INHERITED, *models.EXECUTION)
    return {k: v for k, v in options.items() if k in known and k not in ignored}

"""The configs of a training run and of an evaluation of weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import models
from vit_jax.command_line import files
from vit_jax.config import fields, loading
from vit_jax.config.fields import Choice, choice, chosen, epochs, key, named, section
from vit_jax.data.config import DataConfig, ReaderConfig
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.distributed.sharding import ShardingConfig
from vit_jax.errors import UserError
from vit_jax.evaluators import EVALUATORS
from vit_jax.evaluators.protocol import SKIPPED
from vit_jax.evaluators.splits import EvalConfig
from vit_jax.tasks import TASKS
from vit_jax.tasks.task import TaskConfig
from vit_jax.training.optim import OPTIMIZERS, OptimConfig
from vit_jax.training.trackers import TRACKERS
from vit_jax.training.trackers.tracker import TrackerConfig
from vit_jax.weights.init_config import InitConfig

# Largest weight of the initial parameters in an average that gives no warning.
_MOST_OF_START = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Moving average of the parameters (Polyak averaging)."""

    decay: float = key(
        0.9999, "Decay of the moving average per step; 0 is off.", below=1
    )
    warmup: bool = key(
        True,
        "Use the smaller decay (1 + step) / (10 + step) at the start of the run, until "
        "it reaches `ema.decay`; a decay of 0.9999 is reached after 90,000 steps.",
    )

    def note(self, steps: int) -> str:
        """Returns a warning if the average after a run is mostly the initial network.

        Args:
          steps: length of the run in steps.
        """
        # With the warmup the initial network has no weight after a dozen steps.
        part = 0.0 if self.warmup else self.decay**steps
        if part < _MOST_OF_START:
            return ""
        return (
            f"warning: ema.decay={self.decay} with ema.warmup=False: after {steps:,} steps "
            f"the initial network has a weight of {part:.0%} in the average, which all "
            "commands use; set ema.warmup=True, a smaller ema.decay, or 0 for no "
            "average"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Rules for which checkpoints are kept, and for which one is the best."""

    max_to_keep: int = key(2, "Number of the newest checkpoints to keep.", at_least=1)
    keep_period: int = key(
        0,
        "Also keep every checkpoint whose step is a multiple of this number; 0 is off.",
        reason="studying how a network changes in training",
    )
    best_metric: str = key(
        "",
        "Metric that chooses the best checkpoint, EVALUATION/METRIC such as "
        '"val/top1", '
        "computed with the averaged parameters if there are any. The best checkpoint "
        "is kept, and it is restored at the end of the run. Lower is better for "
        "losses, "
        'errors and ece. "" uses the last checkpoint.',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCheckpointConfig:
    """Checkpoints on local disks, between those in the workdir."""

    dir: str = key(
        "",
        "Folder for checkpoints on the local disk of each host, the same text on all "
        'hosts; "$VARIABLES" and "~" are expanded.',
        reason="large models on clusters, whose shared storage is slow",
        of_host=True,
    )
    every_steps: int = key(
        0,
        "Steps between local checkpoints; 0 is off.",
        reason="losing fewer steps when a host fails",
    )

    def __post_init__(self):
        files.refuse_scheme("local_checkpoint.dir", self.dir, local=True)
        if self.every_steps and not self.dir:
            raise UserError(
                f"local_checkpoint.every_steps={self.every_steps} needs "
                "local_checkpoint.dir: a folder on each host's local disk"
            )


def _interval(default: object, help: str, **rules) -> Any:
    return key(default, help, changes_result=False, in_step=False, **rules)


def _interval_in_epochs(help: str, **rules) -> Any:
    return _interval(0.0, help, below=2**31, **rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """Keys that both training and evaluation read."""

    name: str = key(
        "",
        "Name of the run, used to name new workdirs; by default the file name of the "
        "recipe.",
        in_step=False,
    )
    batch_size: int = key(
        0, "Images per step, over all devices and microbatches.", at_least=1
    )
    compilation_cache_dir: str = key(
        "auto",
        'Folder of JAX\'s cache of compiled programs; "auto" is one folder per user, '
        '"" keeps the setting of JAX.',
        reason="clusters whose hosts share a disk",
        changes_result=False,
        of_host=True,
    )
    mesh: MeshConfig = section(MeshConfig, changes_result=False)
    sharding: ShardingConfig = section(ShardingConfig, changes_result=False)
    evals: dict[str, EvalConfig] = named(
        Choice(types=EVALUATORS, default="classification", text_key="kind"),
        text_key="split",
        reserved=(SKIPPED,),
        help=(
            "Evaluations by name. A value is a split of the data set, which is "
            "classified, or a section whose `kind` is the kind of evaluation."
        ),
        changes_result=False,
        in_step=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(_Config):
    """Keys that an evaluation of weights without training reads."""

    data: ReaderConfig = section(ReaderConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(_Config):
    """Keys that training reads."""

    seed: int = key(
        0,
        "Seed of the initial parameters, data order, augmentation and dropout.",
        below=2**32,
        in_step=False,
    )
    total_steps: int = key(
        0, "Length of the run in steps; set this or `epochs`.", below=2**31
    )
    epochs: float = epochs(
        "Length of the run in passes over the training split; set this or "
        "`total_steps`."
    )
    extend_schedule: str = key(
        "none",
        "Action if a resumed run has larger `total_steps` or `epochs` than before: "
        '"none" refuses to resume, "stretch" continues with the schedules of a run of '
        "the new length.",
        reason="training a finished run for longer",
        choices=("none", "stretch"),
        changes_result=False,
        in_step=False,
    )
    init: InitConfig = section(InitConfig, text_key="checkpoint", in_step=False)
    debug_nans: bool = key(
        False,
        "Stop at the operation that produces the first NaN or infinite value (slow).",
        reason="debugging",
        changes_result=False,
    )
    profile_steps: tuple[int, ...] = key(
        (0, 0),
        "First and last step to trace for the profiler xprof; (0, 0) is off.",
        reason="finding slow operations",
        changes_result=False,
        in_step=False,
    )
    slow_step_factor: float = key(
        3.0,
        "Report steps that take longer than this multiple of the median step time; 0 "
        "is off.",
        reason="finding slow devices, disks and hosts",
        changes_result=False,
    )
    stall_timeout: float = key(
        1_800.0,
        "Seconds without a finished step, evaluation batch or save after which the run "
        "prints the stacks of all threads and ends; before the first step it waits 3 "
        "times as long. 0 is off.",
        reason="clusters, where a run that hangs blocks its machines",
        below=2**31,
        changes_result=False,
    )
    data: DataConfig = section(DataConfig)
    model: Any = chosen(models.VARIANTS)
    task: TaskConfig = choice(TASKS, "classification")
    optim: OptimConfig = choice(OPTIMIZERS, "adam")
    ema: EmaConfig = section(EmaConfig)
    log_every_steps: int = _interval(
        50, "Number of steps between two lines of metrics.", at_least=1
    )
    log_every_epochs: float = _interval_in_epochs(
        "Number of epochs between two lines of metrics; 0 is off.",
        reason="runs whose other intervals are in epochs",
    )
    eval_every_steps: int = _interval(
        0,
        "Number of steps between evaluations; 0 is off. The last step is always "
        "evaluated.",
    )
    eval_every_epochs: float = _interval_in_epochs(
        "Number of epochs between evaluations; 0 is off."
    )
    eval_at_start: bool = key(
        False,
        "Whether a new run also evaluates before its first step; these scores are "
        "logged at step 0. `checkpoint.best_metric` and `early_stopping_evals` ignore "
        "them.",
        reason="comparing with the weights that a run starts from",
        changes_result=False,
        in_step=False,
    )
    early_stopping_evals: int = _interval(
        0,
        "End the run after this number of consecutive evaluations without an "
        "improvement of `checkpoint.best_metric`; 0 is off.",
        reason="small data sets; the command `finetune` sets it",
        below=2**31,
    )
    checkpoint_every_steps: int = _interval(
        1_000,
        "Number of steps between checkpoints; the last step is always saved.",
        at_least=1,
    )
    checkpoint_every_epochs: float = _interval_in_epochs(
        "Number of epochs between checkpoints; 0 is off."
    )
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, changes_result=False, in_step=False
    )
    local_checkpoint: LocalCheckpointConfig = section(
        LocalCheckpointConfig, changes_result=False, in_step=False
    )
    tracker: TrackerConfig = choice(
        TRACKERS, "none", base=TrackerConfig, changes_result=False, in_step=False
    )

    def __post_init__(self):
        first, last = self.profile_steps if len(self.profile_steps) == 2 else (1, 0)
        if self.profile_steps and (first > last or (first == 0) != (last == 0)):
            raise UserError(
                f"profile_steps={self.profile_steps} is not (first step, last step): set "
                "it to two steps in ascending order, such as (10, 15)"
            )
        if "/" in self.name or self.name in (".", ".."):
            raise UserError(
                f"name={self.name!r} cannot be the name of a new folder under runs/: "
                "leave out the slashes and dots, or set --workdir"
            )
        self._check_best_metric()

    def _check_best_metric(self) -> None:
        metric = self.checkpoint.best_metric
        if self.early_stopping_evals and not metric:
            raise UserError(
                f"early_stopping_evals={self.early_stopping_evals} needs "
                "checkpoint.best_metric: set it to the metric to compare, such as "
                "val/top1"
            )
        evaluation, _, name = metric.partition("/")
        if metric and (evaluation not in self.evals or not name):
            known = ", ".join(f"{each}/..." for each in self.evals) or "none"
            raise UserError(
                f"checkpoint.best_metric={metric!r} is not EVALUATION/METRIC, such as "
                f"val/top1; the evaluations are {known}"
            )

    @property
    def has_average(self) -> bool:
        """Whether a state has averaged parameters, which commands load by default."""
        return bool(self.ema.decay) or self.optim.has_average

    def build_model(self, platform: str = "") -> models.Model:
        """Builds the network.

        Args:
          platform: platform of the devices, see `models.create`.

        Raises:
          UserError: the keys of the model do not fit each other or the images.
        """
        if getattr(self.model, "pool", "") == "none":
            raise UserError(
                "model.pool='none' classifies each token, which no task can train: "
                "choose another value, such as 'gap'"
            )
        dropped = getattr(self.model, "patch_dropout", 0)
        if dropped and self.task.needs_all_patches:
            raise UserError(
                f"model.patch_dropout={dropped}: task.name={self.task.name!r} needs all "
                "patches: set model.patch_dropout to 0"
            )
        return models.build(
            dataclasses.replace(self.model.sized(), platform=platform),
            num_classes=self.task.num_logits(self.data),
            image_size=self.data.image_size,
            channels=self.data.channels,
        )

    def num_steps(self, examples: int) -> int:
        """Returns the length of the run in steps.

        Args:
          examples: number of images of the training split.

        Raises:
          UserError: both or neither of `total_steps` and `epochs` are set.
        """
        if bool(self.total_steps) == bool(self.epochs):
            raise UserError(
                f"total_steps={self.total_steps} and epochs={self.epochs}: set exactly one "
                "of them, and the other to 0"
            )
        total = self.total_steps or max(
            1, round(self.epochs * examples / self.batch_size)
        )
        if total >= 2**31:  # The step is counted in 32 bits.
            raise UserError(
                f"epochs={self.epochs}: with {examples:,} images and "
                f"batch_size={self.batch_size} the run would have {total:,} steps, but the "
                "number of steps must be below 2**31: lower epochs"
            )
        return total


def load(spec: str, overrides: Mapping[str, object] | None = None) -> TrainConfig:
    """Reads a config file, applies overrides and completes it.

    Args:
      spec: path of a config file, followed by a colon and the file's argument if it
        takes one: "configs/digits.py",
          "configs/transfer.py:model=B/16,dataset=cifar100".
      overrides: dotted keys to values, such as {"optim.learning_rate": 0.01}.

    Raises:
      UserError: the file, the argument or a key does not exist, or a value does not
        fit its key.
    """
    return complete(loading.read(TrainConfig, spec, overrides))


def complete(raw: Mapping | ConfigDict | TrainConfig) -> TrainConfig:
    """Adds the defaults to the keys of a recipe and checks every key and value.

    Args:
      raw: nested mapping with the keys of a recipe.

    Raises:
      UserError: a key is unknown (the message suggests the nearest known key), a value
        has the wrong type or is out of bounds, or values do not fit each other.
    """
    return loading.complete(TrainConfig, raw)


def load_evaluation(
    spec: str, overrides: Mapping[str, object] | None = None
) -> EvaluationConfig:
    """Reads a config file for `python -m vit_jax.evaluate`.

    Args:
      spec: see `load`.
      overrides: see `load`.

    Raises:
      UserError: a key is only read by training, no evaluation is set, or there is an
        error that `load` raises.
    """
    raw = loading.read(TrainConfig, spec, overrides)
    data = raw.get("data")
    data = data if isinstance(data, Mapping) else {}
    for prefix, keys, cls in ("", raw, EvaluationConfig), ("data.", data, ReaderConfig):
        known = fields.fields(cls)
        for name in keys:
            if name not in known:
                raise UserError(
                    f"config key {prefix}{name} is not read by an evaluation of weights: "
                    f"leave it out; the keys that are read are {', '.join(known)}"
                )
    return _evaluation(raw)


def evaluation_of_run(
    stored: Mapping, overrides: Mapping[str, object] | None = None
) -> EvaluationConfig:
    """Returns the evaluations of a run, for its weights after training.

    Args:
      stored: config of the run. Its mesh is left out: other devices may evaluate.
      overrides: see `load`.

    Raises:
      UserError: no evaluation is set, or there is an error that `load` raises.
    """
    read = {*fields.fields(EvaluationConfig)} - {"mesh", "sharding"}
    raw = {name: value for name, value in stored.items() if name in read}
    data, read = stored.get("data", {}), fields.fields(ReaderConfig)
    raw["data"] = {name: value for name, value in data.items() if name in read}
    loading.override(TrainConfig, raw, overrides or {})
    return _evaluation(raw)


def _evaluation(raw: Mapping) -> EvaluationConfig:
    if not raw.get("evals"):
        raise UserError(
            "the config has no evaluations: set evals, for example to {'val': 'val'}"
        )
    return loading.complete(EvaluationConfig, raw)

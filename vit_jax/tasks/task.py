"""The protocol of a training task.

The trainer initialises, differentiates, averages, shards, saves and restores; the task
defines the loss, the arrays of a batch and the state beside the parameters.
Letters: B images per step.
"""

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config.fields import key
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.data.transforms import device as device_transforms
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.models import STATE, Model, cost, patches, stacking
from vit_jax.models.patches import PatchSequences

if TYPE_CHECKING:  # Not imported for tasks without texts.
    from vit_jax.models.targets import Targets
    from vit_jax.models.text_tower import TextTower

Tree = Any  # Nested dicts of arrays; None if there are no arrays.
Batch = dict[str, jax.Array | PatchSequences]


class Pictures(NamedTuple):
    """Inputs and predictions of a task as images (B, Y, X, C), normalised like a batch.

    Attributes:
      original: the images.
      masked: their visible part, which the network gets.
      reconstruction: the predictions for the whole images.
      reconstruction_and_visible: the predictions in the hidden part, the images
        elsewhere.
    """

    original: jax.Array
    masked: jax.Array
    reconstruction: jax.Array
    reconstruction_and_visible: jax.Array


class Ratio(NamedTuple):
    """A quotient of two means, such as the fraction of pixels that are right.

    The trainer averages both over the microbatches of a step before it divides, so that
    the quotient does not depend on the number of microbatches.

    Attributes:
      total: numerator.
      count: denominator; if it is 0, the quotient is 0.
    """

    total: jax.Array
    count: jax.Array

    @property
    def value(self) -> jax.Array:
        """The quotient."""
        empty = self.count == 0
        return jnp.where(empty, 0, self.total / jnp.where(empty, 1, self.count))


def divide_ratios(tree: Tree) -> Tree:
    """Returns a tree in which every `Ratio` is its value."""
    is_one = lambda x: isinstance(x, Ratio)
    return jax.tree.map(lambda x: x.value if is_one(x) else x, tree, is_leaf=is_one)


@runtime_checkable
class Task(Protocol):
    """A network and its training objective.

    A task that derives from this class defines the abstract methods and overrides the
    others as needed.

    Attributes:
      model: network that is evaluated and exported; `backbone` returns its parameters.
      notes: lines that are logged at every start.
      tower: text tower for evaluations; None if the task does not have one. Its
        parameters are the task's, under the names of models/text.py.
      segment: method from `params`, `extra` and normalised images (B, Y, X, C) to the
        logits of a grid of cells, (B, y, x, classes); None if the task does not
        classify pixels.
      targets: what the outputs of the model mean if they are numbers, see
        models/targets.py; None for classes.
      statistics: names of entries of `extra` that predictions need beside the
        parameters, such as running means, or that another run starts from.
      trained: path in `params` of a network, such as a student, that is trained instead
        of the one that `backbone` returns; None if both are the same.
      coupled: names of computations in `loss` over several images of a microbatch, such
        as BatchNorm, whose results depend on the number of microbatches.
    """

    model: Model
    notes: tuple[str, ...] = ()
    tower: "TextTower | None" = None
    segment: Callable[[dict, Tree, jax.Array], jax.Array] | None = None
    targets: "Targets | None" = None
    statistics: tuple[str, ...] = ()
    trained: str | None = None

    @abc.abstractmethod
    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of a batch of B images, by names of the pipeline."""

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        """Draws the parameters, and `extra`, the state beside them.

        This method is traced; arrays from files come from `load`.
        """

    def load(self) -> dict:
        """Loads entries of `extra` from files, which replace those of `init`.

        The trainer calls it when a run begins; a resumed run has the entries in its
        checkpoint. It may also be called without a run.

        Raises:
          UserError: an entry cannot be read, or has another shape.
        """
        return {}

    def metadata(self) -> dict:
        """Returns values from which a resumed run builds this task without its files.

        They are stored in every checkpoint as JSON, and passed to `TaskConfig.build` as
        `saved` when the run resumes. Tuples become lists.
        """
        return {}

    @property
    def coupled(self) -> tuple[str, ...]:
        return ("BatchNorm",) if self.model.stateful else ()

    def check_microbatch(self, size: int) -> list[str]:
        """Checks the number of images that `loss` gets at once.

        Returns:
          Lines for the log about computations that differ from what the config asks
          for.

        Raises:
          UserError: the loss is not defined for this number.
        """
        return []

    @abc.abstractmethod
    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Transforms a batch on the device, before it is split into microbatches.

        A divisor of the loss is computed here, where the whole batch is available: if
        images or pixels have different weights, the loss gets weights whose mean is 1.
        """

    @abc.abstractmethod
    def loss(
        self, params: dict, extra: Tree, batch: Batch, rng: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array | Ratio], Tree]]:
        """Returns the mean loss of a microbatch, its metrics and statistics.

        Args:
          params: trained parameters.
          extra: state beside them, which gets no gradient.
          batch: output of `prepare`, or a microbatch of it.
          rng: key of dropout and all other random numbers of the step.

        Returns:
          The loss; scalar metrics, including the loss as "loss"; and statistics for
          `update`. Gradients, metrics and statistics of several microbatches are
          averaged. A metric or statistic that is not a mean over images is a `Ratio`.
        """

    def update(self, extra: Tree, params: dict, stats: Tree, step: jax.Array) -> Tree:
        """Returns `extra` after a step, such as a moving average of the parameters.

        Args:
          extra: state before the step.
          params: parameters after the step as evaluations read them; for a
            schedule-free optimiser this is its average over the steps.
          stats: statistics that `loss` returned.
          step: number of steps taken, this one included.
        """
        return extra

    def held_out_metrics(
        self, params: dict, extra: Tree, batch: Batch, rng: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns metrics of held-out images, for `evals` of kind "task".

        Args:
          params, extra: training state.
          batch: "image" (B, Y, X, C), normalised, "index" (B,), record numbers, and
            fields of records that are `in_eval` (data/fields), except for labels.
          rng: random key, equal in all evaluations.

        Returns:
          Metric name to a value per image, (B,), whose mean is reported; may be empty.
        """
        return {}

    def pictures(
        self, params: dict, extra: Tree, batch: Batch, rng: jax.Array
    ) -> Pictures | None:
        """Returns inputs and predictions as images, for trackers and figures.

        Args:
          params, extra, batch, rng: arguments of `held_out_metrics`.

        Returns:
          The images; None if the task predicts none.
        """
        return None

    def warning(self, metrics: dict[str, float]) -> str:
        """Returns a warning about the training and its remedy; "" without a problem.

        Args:
          metrics: metrics of a logged step; the trainer calls this for each such step.
        """
        return ""

    def backbone(self, params: dict, extra: Tree) -> dict:
        """Returns the parameters of `model`: `params`, `extra`, or a dict within one.

        The leaves may be of any type: checkpoints are read with paths as leaves.
        """
        return params

    def with_backbone(
        self, params: dict, extra: Tree, network: dict
    ) -> tuple[dict, Tree]:
        """Returns the state of `init` with the given parameters of `model` in it.

        By default they replace what `backbone` returns. A task with two networks, a
        student and a teacher, replaces both.

        Args:
          params, extra: state of `init`.
          network: parameters, in the structure that `backbone` returns.
        """
        paths = backbone_paths(self, params, extra)
        state = {"params": params, "extra": extra}
        rest = {name: value for name, value in network.items() if name != STATE}
        state = _replace(state, paths["path"].split("/"), rest)
        if "state" in paths:
            state = _replace(state, paths["state"].split("/"), network[STATE])
        return state["params"], state["extra"]

    def with_task_params(
        self, params: dict, extra: Tree, task_params: dict
    ) -> tuple[dict, Tree]:
        """Returns the state of `init` with the task's pretrained parameters in it.

        By default, parameters that `left_out` names stay as in `init`.

        Args:
          params, extra: state of `init`.
          task_params: parameters beside the network, from weights whose task has the
            same name, see `Pretrained`.

        Raises:
          UserError: the task needs all of them, and a name or shape differs.
        """
        left = self.left_out(params, extra, task_params)

        def fill(tree):
            return {
                name: stacking.join(stacking.separate(task_params[name]), like=value)
                if name in task_params and name not in left
                else value
                for name, value in tree.items()
            }

        return fill(params), fill(extra) if extra else extra

    def left_out(self, params: dict, extra: Tree, task_params: dict) -> dict[str, str]:
        """Returns the names of parameters that `with_task_params` omits, with reasons.

        Args:
          params, extra, task_params: arguments of `with_task_params`, or their shapes.
        """
        has = {**params, **(extra or {})}
        left = {}
        for name, value in task_params.items():
            if name not in has:
                left[name] = "this run has none"
            elif difference := stacking.difference(value, has[name]):
                left[name] = difference
        return left

    def training_flops(self) -> int | None:
        """Returns the floating-point operations of a training step, per image.

        Forward and backward pass count, rematerialisation does not: 6 operations per
        multiply-accumulate of a trained layer, 2 of a frozen one.
        """
        return cost.training_flops(self.model)

    def tower_flops(self) -> dict[str, int | None]:
        """Returns the operations of the forward pass of each tower, per image.

        A tower is a named part of `params` whose inputs do not come from other parts.
        If the whole tower is frozen, as in LiT, it has no backward pass, which accounts
        for two thirds of its operations in `training_flops`. By default the result
        is empty; a value is None if unknown.
        """
        return {}


class ImageTask(Task):
    """Base of tasks whose batches are images, transformed by `data.train_transform`.

    Args:
      model: network that is trained.
      data: `config.data`.

    Attributes:
      takes_sequences: whether images may be sequences of patches (models/patches.py).

    Raises:
      UserError: the transforms do not suit the images or the task.
    """

    takes_sequences: ClassVar[bool] = False

    def __init__(self, model: Model, data: DataConfig):
        self.model, self.data = model, data
        host, device = data.transforms
        self._ops = device_transforms.apart(device, data.repeats)
        # Shapes as loaded, before the device resizes the images.
        made = parse.loaded(parse.Transforms(host, ()), data)
        self._specs, self._packs = made, data.transforms.packs
        if "grids" in made:
            self._check_sequences()
        else:  # Only one view of an image, even if a transform makes several.
            shape, dtype = made["image"]
            self._specs = {"image": (shape[-3:], dtype)}

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns image (B, Y, X, C) and index (B,).

        With sequences of K images each, it returns image (B / K, N S, S, C) and grids
        (B / K, K, 2), see models/patches.py.
        """
        if batch_size % self._packs:
            raise UserError(
                f"batch_size={batch_size} is not a multiple of the {self._packs} images "
                f"that data.train_transform={self.data.train_transform!r} packs into a "
                "row: change one of them"
            )
        spec = {"index": jax.ShapeDtypeStruct((batch_size,), np.uint32)}
        for name, (shape, dtype) in self._specs.items():
            rows = batch_size // self._packs
            spec[name] = jax.ShapeDtypeStruct((rows, *shape), dtype)
        return spec

    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Returns image (B, Y, X, C), transformed and normalised, or sequences."""
        return {"image": transform(self._ops, self.data, batch, rng)[0]}

    def training_flops(self) -> int | None:
        if "grids" not in self._specs:
            return super().training_flops()
        flops = []
        for op, _ in self.data.transforms.views.alternatives():
            shapes = op.output_shapes(self.data.channels)
            row = PatchSequences(
                jax.ShapeDtypeStruct((1, *shapes["image"]), jnp.float32),
                jax.ShapeDtypeStruct((1, *shapes["grids"]), jnp.int32),
            )
            flops.append(cost.training_flops(self.model, row) / op.packs)
        return round(sum(flops) / len(flops))

    def _check_sequences(self) -> None:
        where = f"data.train_transform={self.data.train_transform!r}"
        why = self.model.config.no_sequences if self.takes_sequences else "this task"
        if why:
            raise UserError(
                f"{where} makes images of any size, which do not go with {why}: end it with "
                "resize or a crop"
            )
        if self._ops:
            raise UserError(
                f"{where}: {type(self._ops[0]).__name__.lower()} acts on whole images: "
                "put no transform after naflex, which has arguments to crop and flip"
            )


def transform(
    ops: tuple,
    data: DataConfig,
    batch: Batch,
    rng: jax.Array,
    labels: jax.Array | None = None,
) -> tuple[jax.Array | PatchSequences, jax.Array]:
    """Returns transformed and normalised images, and labels mixed as the images are.

    For label maps, also call `transforms.apply_to_maps(ops, label_maps, index, rng)`.

    Args:
      ops: device transforms, see `data.transforms.parse`.
      data: `config.data`, for its mean and standard deviation.
      batch: image (B, Y, X, C) uint8, and index (B,), record numbers; for sequences
        also grids (B, K, 2).
      rng: random key.
      labels: labels, (B, L) floats; None for images without labels.
    """
    if labels is None:
        labels = jnp.zeros((len(batch["index"]), 1))
    images = batch["image"]
    if ops:  # Never with sequences, whose rows may have several labels.
        images, labels = device_transforms.apply(
            ops, images, labels, batch["index"], rng
        )
    images = device_transforms.normalize(images, data.mean, data.std)
    return patches.of_batch(batch, images), labels


def feature_width(model: Model, task: str) -> int:
    """Returns the width of a network's "pre_logits"; see `check_features`."""
    check_features(model, task)
    images = jax.ShapeDtypeStruct((1, *model.image_shape), jnp.float32)
    outputs = jax.eval_shape(model.apply, model.shapes, images)
    return outputs["pre_logits"].shape[-1]


def check_features(model: Model, task: str) -> None:
    """Refuses a network without features.

    Args:
      model: the network.
      task: name of the task that learns from its "pre_logits".

    Raises:
      UserError: the network does not return "pre_logits".
    """
    if not model.representations:
        raise UserError(
            f"model.variant={model.options['variant']!r} returns no 'pre_logits', which "
            f"task.name={task!r} learns from: return them"
        )


def backbone_paths(task: Task, params: Tree, extra: Tree) -> dict[str, str]:
    """Returns the paths of the network's parameters in a training state.

    Args:
      task: task that defines `backbone`.
      params, extra: state of `Task.init`, or its shapes.

    Returns:
      "path": path of the parameters, such as "params" or "params/network"; and "state":
      path of the running means, if they are elsewhere.

    Raises:
      UserError: `backbone` does not return one dict of the state, or one dict for
        parameters and one for running means.
    """
    paths = jax.tree.map_with_path(
        lambda keys, _: jax.tree_util.keystr(keys, simple=True, separator="/"),
        {"params": params, "extra": extra},
    )
    network = task.backbone(paths["params"], paths["extra"])
    state = network.get(STATE)
    others = {name: value for name, value in network.items() if name != STATE}
    path = _common_path(others)
    subtree = _at(paths, path)
    if subtree == network:
        return {"path": path}
    if subtree == others and state and _at(paths, _common_path(state)) == state:
        return {"path": path, "state": _common_path(state)}
    raise UserError(
        f"{type(task).__name__}.backbone returns parameters of several parts of the "
        "state: keep the network's in one dict of `params` or `extra`, and return that"
    )


def _at(tree: dict, path: str) -> Tree:
    return functools.reduce(operator.getitem, path.split("/"), tree)


def _common_path(paths: dict) -> str:
    """Returns the path of a dict whose leaves are their paths."""
    keys, path = jax.tree.leaves_with_path(paths)[0]
    within = jax.tree_util.keystr(keys, simple=True, separator="/")
    return path.removesuffix(f"/{within}")


def _replace(tree: dict, path: list[str], value: Tree) -> Tree:
    if not path:
        return value
    first, *rest = path
    return {**tree, first: _replace(tree.get(first, {}), rest, value)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Keys of `config.task` that every task has."""

    # Whether the task has `Task.pictures` that need the parameters, but not `extra`.
    has_pictures: ClassVar[bool] = False
    # Whether the network gets a classifier, if the data set has classes.
    has_classifier: ClassVar[bool] = True
    # Whether the task uses every patch, so that the network must not drop any.
    needs_all_patches: ClassVar[bool] = False
    # Whether `params`, and so their moving average `ema`, include the network.
    averages_network: ClassVar[bool] = True

    name: str = key("classification", "Task to train.")

    @property
    def pretrained_name(self) -> str:
        """Name of the task whose pretrained parameters `with_task_params` takes."""
        return self.name

    def num_logits(self, data: DataConfig) -> int:
        """Returns the number of outputs of the network's classifier; 0 for none."""
        return data.num_classes if self.has_classifier else 0

    def of_records(self, data: DataConfig, source: Source) -> "TaskConfig":
        """Returns the config with values that are computed from the training records.

        Args:
          data: `config.data`.
          source: training split.

        Raises:
          UserError: a label is out of range, or the config does not suit the data.
        """
        return self

    def check_without_records(self) -> None:
        """Checks that the config can be used without training records.

        Raises:
          UserError: a value must be computed from training records, see `of_records`.
        """

    def build(
        self,
        model: Model,
        data: DataConfig,
        run: RunLength,
        saved: dict | None = None,
    ) -> Task:
        """Builds the task.

        Args:
          model: network of `config.model`.
          data: `config.data`.
          run: length of the run, for schedules.
          saved: value of `Task.metadata` in the checkpoint of a run that resumes; None
            in a new run.
        """
        raise NotImplementedError

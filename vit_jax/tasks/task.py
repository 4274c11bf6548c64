"""What a task is: all that the trainer asks of what is learnt.

The trainer initialises, differentiates, averages, shards, saves and restores; which loss
it is, what a batch holds and what there is beside the parameters, only the task knows.
Letters: B images a step.
"""

import abc
import dataclasses
import functools
import operator
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax

from vit_jax.config.fields import key
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.models import STATE, Model, cost
from vit_jax.models.text_tower import TextTower

Tree = Any  # Nested dicts of arrays, or None where there is nothing.
Batch = dict[str, jax.Array]


class Pictures(NamedTuple):
    """What a task sees and answers: images (B, Y, X, C), normalised as those of a batch.

    Attributes:
      original: as it is.
      masked: what the network sees of it.
      reconstruction: what it answers, for all of the image.
      reconstruction_and_visible: the same where something was hidden.
    """

    original: jax.Array
    masked: jax.Array
    reconstruction: jax.Array
    reconstruction_and_visible: jax.Array


@runtime_checkable
class Task(Protocol):
    """A network and what it learns.

    A task that derives from this class defines the abstract methods, and inherits the
    others where it has nothing of the kind.

    Attributes:
      model: the network that is evaluated, and that a workdir hands on; its parameters
        are what `backbone` returns.
      notes: lines for the log of every start.
      tower: text tower of a task that has one, for evaluations; its parameters are those
        of the task, under the names of models/text.py.
    """

    model: Model
    notes: tuple[str, ...] = ()
    tower: TextTower | None = None

    @abc.abstractmethod
    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch of B images, by their names in the pipeline."""

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        """Draws the parameters, and the state beside them, called `extra`.

        It is traced: what lies on a disk comes from `load`.
        """

    def load(self) -> dict:
        """Returns entries of `extra` that lie on a disk, in place of those of `init`.

        They are put into the state when a run begins; a resumed run has them in its
        checkpoint. A task may be built, and this be called, without a run.

        Raises:
          UserError: they cannot be read, or do not fit.
        """
        return {}

    def metadata(self) -> dict:
        """Returns what a resumed run needs to build this task again without its files.

        It is stored in every checkpoint as JSON, and is the `saved` of
        `TaskConfig.build` when the run resumes. Tuples come back as lists.
        """
        return {}

    @abc.abstractmethod
    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Transforms a whole batch on the device, before it is cut into microbatches."""

    @abc.abstractmethod
    def loss(
        self, params: dict, extra: Tree, batch: Batch, rng: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Tree]]:
        """Returns the mean loss of a microbatch, its metrics, and statistics.

        Args:
          params: what is differentiated by.
          extra: the state beside them, which gets no gradient.
          batch: of `prepare`, or a microbatch of it.
          rng: of dropout and all else that is drawn in the step.

        Returns:
          The loss; metrics, scalars with "loss" among them; and statistics, which
          `update` gets. Of several microbatches both are means.
        """

    def update(self, extra: Tree, params: dict, stats: Tree, step: jax.Array) -> Tree:
        """Returns the state after a step, such as a moving average of the parameters.

        Args:
          extra: before the step.
          params: after it.
          stats: of `loss`.
          step: steps taken, this one included.
        """
        return extra

    def held_out_metrics(
        self, params: dict, extra: Tree, batch: Batch, rng: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns metrics of images that are not trained on, for `evals` of kind "task".

        Args:
          params, extra: of the state.
          batch: "image" (B, Y, X, C), normalised, "index" (B,), the number of each
            record.
          rng: the same at every evaluation.

        Returns:
          Name to a number for each image, (B,); their mean is reported. Empty for a
          task that has none.
        """
        return {}

    def pictures(
        self, params: dict, extra: Tree, batch: Batch, rng: jax.Array
    ) -> "Pictures | None":
        """Returns pictures of what the task sees and answers, for the log and figures.

        Args:
          params, extra, batch, rng: as of `held_out_metrics`.

        Returns:
          The pictures; None for a task that has none.
        """
        return None

    def warning(self, metrics: dict[str, float]) -> str:
        """Returns what is wrong with the training, and what to change; "" if nothing.

        Args:
          metrics: of a step that is logged; it is called at each of them, in order.
        """
        return ""

    def backbone(self, params: dict, extra: Tree) -> dict:
        """Returns the parameters of `model`: one of the two, or a dict within one.

        It is called with trees of anything in the place of arrays, also of the paths by
        which checkpoints are read.
        """
        return params

    def with_backbone(
        self, params: dict, extra: Tree, network: dict
    ) -> tuple[dict, Tree]:
        """Returns the state of `init` with given parameters of `model` in it.

        By default they stand where `backbone` finds them, and the rest is as drawn. A
        task that holds them twice, as student and teacher, sets both.

        Args:
          params, extra: of `init`.
          network: as `backbone` returns it.
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
        """Returns the state of `init` with what weights have beside the network.

        Args:
          params, extra: of `init`.
          task_params: of weights whose task has the same name, see `Pretrained`.

        Raises:
          UserError: they do not fit.
        """
        return params, extra

    def training_flops(self) -> int | None:
        """Returns the floating-point operations of a training step, per image.

        Counted are forward and backward pass, without what rematerialisation computes
        again: 6 for each multiply-accumulate of what is trained, 2 of what is frozen.
        """
        return cost.training_flops(self.model)


def backbone_paths(task: Task, params: Tree, extra: Tree) -> dict[str, str]:
    """Returns where a state holds the network.

    Args:
      task: whose `backbone` is asked.
      params, extra: as of `Task.init`, or shapes.

    Returns:
      "path": of its parameters, as "params" or "params/network"; and "state": of its
      running means, if they are elsewhere.

    Raises:
      UserError: `backbone` returns something else than a dict of the state for each.
    """
    paths = jax.tree.map_with_path(
        lambda keys, _: jax.tree_util.keystr(keys, simple=True, separator="/"),
        {"params": params, "extra": extra},
    )
    network = task.backbone(paths["params"], paths["extra"])
    state = network.get(STATE)
    others = {name: value for name, value in network.items() if name != STATE}
    path = _place(others)
    there = _at(paths, path)
    if there == network:
        return {"path": path}
    if there == others and state and _at(paths, _place(state)) == state:
        return {"path": path, "state": _place(state)}
    raise UserError(
        f"{type(task).__name__}.backbone returns parameters of several places of the "
        "state: keep those of the network in one dict of `params` or `extra`, and return "
        "that"
    )


def _at(tree: dict, path: str) -> Tree:
    return functools.reduce(operator.getitem, path.split("/"), tree)


def _place(part: dict) -> str:
    """Returns the path of a dict of paths."""
    keys, path = jax.tree.leaves_with_path(part)[0]
    within = jax.tree_util.keystr(keys, simple=True, separator="/")
    return path.removesuffix(f"/{within}")


def _replace(tree: dict, path: list[str], value: Tree) -> Tree:
    if not path:
        return value
    first, *rest = path
    return {**tree, first: _replace(tree.get(first, {}), rest, value)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What `config.task` states of every task."""

    # Whether it has `Task.pictures`, and needs no more than parameters for them.
    has_pictures: ClassVar[bool] = False
    # Whether its network gets a classifier, if the data set has classes.
    has_classifier: ClassVar[bool] = True
    # Whether its network is in the parameters, of which `ema` holds a moving average.
    averages_network: ClassVar[bool] = True

    name: str = key("classification", "What is learnt.")

    def of_records(self, data: DataConfig, source: Source) -> "TaskConfig":
        """Returns the config with what follows from the training records in place.

        Args:
          data: `config.data`.
          source: its training split.

        Raises:
          UserError: the records do not fit.
        """
        return self

    def check_without_records(self) -> None:
        """Checks that nothing follows from the training records, where there are none.

        Raises:
          UserError: something does, see `of_records`.
        """

    def build(
        self,
        model: Model,
        data: DataConfig,
        run: RunLength,
        saved: dict | None = None,
    ) -> Task:
        """Returns the task.

        Args:
          model: network of `config.model`.
          data: `config.data`.
          run: length of the run, for what changes in its course.
          saved: what `Task.metadata` returned when the run began, from its checkpoint;
            None for a run that begins.
        """
        raise NotImplementedError

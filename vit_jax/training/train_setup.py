"""Builds the parts of a run from its config: task, layout of arrays, training step."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import ESTIMATE
from vit_jax.data.sources.base import Source
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import TrainedTask
from vit_jax.evaluators.suite import Suite
from vit_jax.tasks.task import Task, backbone_paths
from vit_jax.training import checks, optim
from vit_jax.training import step as steps
from vit_jax.training.config import TrainConfig
from vit_jax.training.layout import Layout, lay_out
from vit_jax.training.schedules import Number
from vit_jax.training.step import Step
from vit_jax.training.train_state import (
    TrainState,
    create_train_state,
    init_key,
)


class FirstState(NamedTuple):
    """The functions that build the state before the first step.

    Attributes:
      init: initialises the parameters and the task's `extra`; call it under jit.
      create: builds the state from parameters and `extra`; call it under jit with
        shardings.
    """

    init: Callable[[], tuple[dict, object]]
    create: Callable[[dict, object], TrainState]


class TrainSetup(NamedTuple):
    """The parts of a training run.

    Attributes:
      task: task, which computes the loss.
      length: number of steps of the run and of an epoch.
      mesh: mesh of all devices.
      layout: shapes and shardings of state and batch.
      first: functions that build the first state, see `initial_state`.
      train_step: jitted step (state, batch) -> (state, metrics), see `make_train_step`.
      notes: lines for the log: notes of the task, and results that depend on the number
        of microbatches.
      training_flops: floating-point operations of a step per image:
        `Task.training_flops` without the backward pass of towers that are frozen for
        the whole run, times the number of passes of the optimiser. None if unknown.
      metadata: JSON that checkpoints store beside the config. "task" is what is needed
        to build the task again; "network" has the paths of the network in the state
        (`backbone_paths`), its options, and `Task.statistics`.
      source: training split, opened by `loop.build_setup`; None if no data is read.
      suite: evaluations, shared with an earlier run of a sweep; None if not opened yet.
      compiled: compiled `train_step` of an earlier run of a sweep; None if there is
        none.
    """

    task: Task
    length: RunLength
    mesh: Mesh
    layout: Layout
    first: FirstState
    train_step: Step
    notes: tuple[str, ...]
    training_flops: int | None
    metadata: dict
    source: Source | None = None
    suite: Suite | None = None
    compiled: Step | None = None

    @property
    def model(self) -> models.Model:
        """The network of the task."""
        return self.task.model

    @property
    def total_steps(self) -> int:
        """Length of the run."""
        return self.length.total_steps

    @property
    def trained_task(self) -> TrainedTask:
        """The functions and shapes of the task that evaluations need."""
        task, shapes, shardings = self.task, self.layout.shapes, self.layout.shardings
        return TrainedTask(
            task.backbone,
            task.held_out_metrics,
            task.pictures,
            task.segment,
            (shapes.params, shapes.extra),
            (shardings.params, shardings.extra),
            self.model.image_shape,
            task.tower,
            task.targets,
        )

    def initial_state(self) -> TrainState:
        """Returns the first state, initialised on the devices that hold each part."""
        init, create = self.first
        make = jax.jit(lambda: create(*init()), out_shardings=self.layout.shardings)
        return self._load_extra(make())

    def state_from(self, network: dict, others: dict | None = None) -> TrainState:
        """Returns the first state of a run that starts from a given network.

        Args:
          network: parameters of the network in the form of checkpoints, in host memory,
            equal on all processes. Each device receives only its shards.
          others: parameters of the task beside the network, for
            `Task.with_task_params`; parameters that are not among them are initialised.

        Raises:
          UserError: the parameters do not fit the task.
        """
        task, shardings = self.task, self.layout.shardings

        def first(network, others):
            state = task.with_backbone(*self.first.init(), network)
            state = task.with_task_params(*state, others) if others else state
            return self.first.create(*state)

        create = jax.jit(first, out_shardings=shardings, donate_argnums=0)
        places = task.backbone(shardings.params, shardings.extra)
        network = jax.device_put(self.layout.disk.arrange(network), places)
        return self._load_extra(create(network, others or {}))

    def _load_extra(self, state: TrainState) -> TrainState:
        """Replaces entries of the initialised `extra` by those that the task loads."""
        loaded = self.task.load()
        if not loaded:
            return state
        places = {name: self.layout.shardings.extra[name] for name in loaded}
        return state.replace(extra={**state.extra, **jax.device_put(loaded, places)})


def build(
    config: TrainConfig, mesh: Mesh, num_examples: int, saved: dict | None = None
) -> TrainSetup:
    """Builds the parts of a run; nothing is computed or compiled yet.

    Args:
      config: complete config.
      mesh: mesh from `meshes.create`, of devices that are present or of a topology.
      num_examples: number of images of the training split.
      saved: metadata of the task from the run's checkpoint; None for a new run.

    Raises:
      UserError: batch, model or sharding rules do not fit the mesh or each other.
    """
    for name in ("mean", "std"):
        if getattr(config.data, name) == ESTIMATE:
            raise UserError(
                f"data.{name}={ESTIMATE!r} needs the training images: set numbers"
            )
    key = "epochs" if config.epochs else "total_steps"
    steps_per_epoch = num_examples / config.batch_size
    length = RunLength(config.num_steps(num_examples), steps_per_epoch, key)
    model = config.build_model(mesh.devices.flat[0].platform)
    task = config.task.build(model, config.data, length, saved)
    batch_spec = checks.check_task(task, config)

    # Jitted so that it is traced once, for the shapes and for the first state; inlined
    # so that the compiled programs do not depend on this.
    @functools.partial(jax.jit, inline=True)
    def init():
        return task.init(init_key(config.seed))

    params, extra = jax.eval_shape(init)
    notes = checks.check_batches(task, batch_spec, params, extra, mesh, config)
    notes = (*notes, *optim.warmup_notes(config.optim, length))
    sharding.check_memory(params, list(mesh.devices.flat), extra)
    paths = backbone_paths(task, params, extra)
    peak = config.optim.peak_learning_rate(config.batch_size)
    optimizer = build_optimizer(config, task, length, mesh, params, paths["path"], peak)
    create = functools.partial(
        create_train_state,
        init_optimizer=optimizer.init,
        seed=config.seed,
        average=config.has_average,
    )
    shapes = jax.eval_shape(create, params, extra)
    layout = lay_out(config, mesh, task, shapes, batch_spec)
    step = build_step(config, task, mesh, layout, optimizer)
    return TrainSetup(
        task=task,
        length=length,
        mesh=mesh,
        layout=layout,
        first=FirstState(init, create),
        train_step=steps.jit_step(
            step,
            mesh,
            layout.shardings,
            bfloat16=config.model.rounds_products,
            donate=not config.debug_nans,
        ),
        notes=notes,
        training_flops=_training_flops(task, params, config),
        metadata=_metadata(task, paths),
    )


def build_optimizer(
    config: TrainConfig,
    task: Task,
    length: RunLength,
    mesh: Mesh,
    params: dict,
    path: str,
    peak: Number,
) -> optim.Optimizer:
    """Builds the optimiser of a run.

    Args:
      config: complete config.
      task, length, mesh: see `TrainSetup`.
      params: parameters, as arrays or shapes.
      path: path of the network in the state, see `backbone_paths`.
      peak: highest learning rate; it may be an argument of a jitted function.
    """
    loss_and_aux = optim.without_frozen(task.loss, config.optim)
    loss = lambda *args: loss_and_aux(*args)[0]
    parts = math.prod(config.optim.microbatches(config.batch_size, mesh))
    if parts > 1:  # Keeps the activations of one microbatch at a time.
        loss = steps.accumulate(jax.checkpoint(loss), parts)
    tree, _, within = path.partition("/")
    within = within if tree == "params" else task.trained
    network = task.model.config
    return optim.build(config.optim, params, peak, length, network, within, loss)


def build_step(
    config: TrainConfig,
    task: Task,
    mesh: Mesh,
    layout: Layout,
    optimizer: optim.Optimizer,
) -> Step:
    """Builds the training step, not jitted.

    Args:
      config: complete config.
      task, mesh, layout: see `TrainSetup`.
      optimizer: result of `build_optimizer`.
    """
    loss = optim.without_frozen(task.loss, config.optim)
    groups, parts = config.optim.microbatches(config.batch_size, mesh)
    gradients = steps.gradients_of(loss, layout.shardings.params)
    gradients = optimizer.wrap(steps.accumulate(gradients, parts))
    gradients = steps.accumulate(gradients, groups)
    return steps.make_train_step(task, gradients, optimizer, config.ema, mesh)


def _training_flops(task: Task, params: dict, config: TrainConfig) -> int | None:
    """Returns `TrainSetup.training_flops`, the operations of a step per image."""
    flops = task.training_flops()
    if flops is None:
        return None
    frozen = optim.always_frozen(params, config.optim)
    for name, forward in task.tower_flops().items():
        if all(map(np.all, jax.tree.leaves(frozen[name]))):
            flops -= 2 * forward
    return flops * config.optim.passes


def _metadata(task: Task, paths: dict[str, str]) -> dict:
    """Returns the metadata from which the task and its network can be built again."""
    network = {
        **paths,
        "options": task.model.portable_options,
        "statistics": list(task.statistics),
    }
    return {"task": task.metadata(), "network": network}

"""The training step, and what is built from a config before it runs."""

import concurrent.futures
import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from vit_jax import models
from vit_jax.config import fields
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import ESTIMATE
from vit_jax.data.sources.base import Source
from vit_jax.data.transforms import device as transforms
from vit_jax.data.transforms import parse
from vit_jax.distributed import compilation, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import TrainedTask
from vit_jax.evaluators.suite import Suite
from vit_jax.models import stacking
from vit_jax.tasks.task import Task, backbone_paths, divide_ratios
from vit_jax.training import disk_layout, optim, sharpness
from vit_jax.training.config import TrainConfig
from vit_jax.training.disk_layout import DiskLayout
from vit_jax.training.schedules import Number, Schedule
from vit_jax.training.train_state import (
    TrainState,
    create_train_state,
    init_key,
    update_ema,
)

Step = Callable[[TrainState, dict], tuple[TrainState, dict]]


class TrainSetup(NamedTuple):
    """The functions of a training run, and the shapes and shardings of its arrays.

    Attributes:
      task: task, which computes the loss.
      model: network of the task.
      total_steps: length of the run.
      steps_per_epoch: training examples by batch size, a float.
      init: initialises the parameters and the task's `extra`; call it under jit.
      create: builds the first state from these; call it under jit with `shardings`.
      shapes: state with a jax.ShapeDtypeStruct for each array.
      shardings: state with a NamedSharding for each array.
      disk: form of the state in checkpoints.
      notes: lines for the log: the task's, and what depends on microbatches.
      train_step: jitted step (state, batch) -> (state, metrics), see `make_train_step`.
      step_at: returns the step that is not jitted, for a peak learning rate.
      batch_shapes: name to jax.ShapeDtypeStruct of a global batch, with its sharding.
      training_flops: floating-point operations of a step per image, from
        `Task.training_flops` less the backward pass of towers that are frozen for the
        whole run; twice as many with SAM. None if unknown.
      metadata: JSON that checkpoints store beside the config: "task", what the task
        needs to be built again, and "network", the paths of the network in the state
        (`backbone_paths`), its options, and `Task.statistics`.
      mesh: mesh of all devices.
      source: training split, opened by `loop.build_setup`; None where nothing is read.
      suite: evaluations, if an earlier run of a sweep has the same ones.
      compiled: compiled `train_step`, if an earlier run of a sweep has the same one.
    """

    task: Task
    model: models.Model
    total_steps: int
    steps_per_epoch: float
    init: Callable[[], tuple[dict, object]]
    create: Callable[[dict, object], TrainState]
    shapes: TrainState
    shardings: TrainState
    disk: DiskLayout
    notes: tuple[str, ...]
    train_step: Step
    step_at: Callable[[Number], Step]
    batch_shapes: dict[str, jax.ShapeDtypeStruct]
    training_flops: int | None
    metadata: dict
    mesh: Mesh
    source: Source | None = None
    suite: Suite | None = None
    compiled: Step | None = None

    @property
    def trained_task(self) -> TrainedTask:
        """Functions and shapes of the task that evaluations need."""
        task = self.task
        return TrainedTask(
            task.backbone,
            task.held_out_metrics,
            task.pictures,
            task.segment,
            (self.shapes.params, self.shapes.extra),
            (self.shardings.params, self.shardings.extra),
            self.model.image_shape,
            task.tower,
        )

    def initial_state(self) -> TrainState:
        """Returns the first state, initialised on the devices that hold each part."""
        create = jax.jit(
            lambda: self.create(*self.init()), out_shardings=self.shardings
        )
        return self._load_extra(create())

    def state_from(self, network: dict, others: dict | None = None) -> TrainState:
        """Returns the first state of a run that starts from a given network.

        Args:
          network: parameters of the network as in checkpoints, in host memory, equal on
            all processes. Each device receives only its shards.
          others: parameters of the task beside the network, for `Task.with_task_params`;
            the rest is initialised.

        Raises:
          UserError: they do not fit.
        """
        task = self.task
        if self.model.config.stacked:
            network = stacking.stack(network)

        def first(network, others):
            state = task.with_backbone(*self.init(), network)
            state = task.with_task_params(*state, others) if others else state
            return self.create(*state)

        create = jax.jit(first, out_shardings=self.shardings, donate_argnums=0)
        shardings = task.backbone(self.shardings.params, self.shardings.extra)
        network = jax.device_put(network, shardings)
        return self._load_extra(create(network, others or {}))

    def _load_extra(self, state: TrainState) -> TrainState:
        """Replaces entries of the initialised `extra` by what the task loads."""
        loaded = self.task.load()
        if not loaded:
            return state
        places = {name: self.shardings.extra[name] for name in loaded}
        return state.replace(extra={**state.extra, **jax.device_put(loaded, places)})


def build_train_setup(
    config: TrainConfig, mesh: Mesh, num_examples: int, saved: dict | None = None
) -> TrainSetup:
    """Builds the functions of a run; nothing is computed or compiled yet.

    Args:
      config: complete config.
      mesh: mesh from `meshes.create`, of devices that are present or of a topology.
      num_examples: size of the training split.
      saved: metadata of the task from the run's checkpoint; None for a run that begins.

    Raises:
      UserError: batch, model or sharding rules do not fit the mesh or each other.
    """
    for name in ("mean", "std"):
        if getattr(config.data, name) == ESTIMATE:
            raise UserError(
                f"data.{name}={ESTIMATE!r} needs the training images: give numbers"
            )
    splits = sharpness.splits(config.optim, config.batch_size, mesh)
    key = "epochs" if config.epochs else "total_steps"
    steps_per_epoch = num_examples / config.batch_size
    run = RunLength(config.num_steps(num_examples), steps_per_epoch, key)
    model = config.build_model(mesh.devices.flat[0].platform)
    task = config.task.build(model, config.data, run, saved)
    batch_spec = _check_task(task, config)
    notes = (*task.notes, *_check_microbatches(task, config, splits))

    # Inlined, so that programs are the same; traced once for shapes and first state.
    @functools.partial(jax.jit, inline=True)
    def init():
        return task.init(init_key(config.seed))

    params, extra = jax.eval_shape(init)
    _check_running_means(task, params, extra, config)
    if config.optim.freeze and task.model.stateful:
        line = (
            f"optim.freeze={config.optim.freeze} freezes parameters; the running means of "
            "BatchNorm go on following the training images"
        )
        notes = (*notes, line)
    notes = (*notes, *_check_rows(batch_spec, splits, mesh, config))
    sharding.check_memory(params, list(mesh.devices.flat), extra)

    paths = backbone_paths(task, params, extra)
    tree, _, within = paths["path"].partition("/")
    of_network = model.config, within if tree == "params" else task.trained

    def optimizer(peak):
        rate = optim.learning_rate(config.optim, peak, run)
        return rate, optim.optimizer(config.optim, params, rate, run, *of_network)

    peak = config.optim.peak_learning_rate(config.batch_size)
    create = functools.partial(
        create_train_state,
        tx=optimizer(peak)[1],
        seed=config.seed,
        average=config.has_average,
    )
    shapes = jax.eval_shape(create, params, extra)
    shardings, disk = disk_layout.lay_out(config, mesh, task, shapes)

    def step_at(peak):
        rate, tx = optimizer(peak)
        rho = sharpness.radius(config.optim, rate, peak, run)
        how = splits, mesh, shardings, optim.Thawing.of(config.optim, params, run)
        return make_train_step(config, task, tx, rate, rho, *how)

    return TrainSetup(
        task=task,
        model=task.model,
        total_steps=run.total_steps,
        steps_per_epoch=run.steps_per_epoch,
        init=init,
        create=create,
        shapes=shapes,
        shardings=shardings,
        disk=disk,
        notes=notes,
        train_step=jit_step(
            step_at(peak), mesh, shardings, donate=not config.debug_nans
        ),
        step_at=step_at,
        batch_shapes=_with_sharding(batch_spec, meshes.batched(mesh)),
        training_flops=_training_flops(task, params, config),
        metadata=_metadata(task, paths),
        mesh=mesh,
    )


def _training_flops(task: Task, params: dict, config: TrainConfig) -> int | None:
    """Returns the operations of a step per image, see `TrainSetup.training_flops`."""
    flops = task.training_flops()
    if flops is None:
        return None
    frozen = optim.always_frozen(params, config.optim)
    for name, forward in task.tower_flops().items():
        if all(map(np.all, jax.tree.leaves(frozen[name]))):
            flops -= 2 * forward
    return flops * (2 if config.optim.sam_rho else 1)


def _with_sharding(shapes: dict, sharding: NamedSharding) -> dict:
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in shapes.items()
    }


def _metadata(task: Task, paths: dict[str, str]) -> dict:
    """Returns what checkpoints store to build the task and its network again."""
    network = {
        **paths,
        "options": task.model.portable_options,
        "statistics": list(task.statistics),
    }
    return {"task": task.metadata(), "network": network}


def _check_task(task: Task, config: TrainConfig) -> dict:
    """Checks a task, and that a user's applies the device part of the transforms.

    Returns:
      Its `batch_spec`.
    """
    name, data = config.task.name, config.data
    if not isinstance(task, Task):
        raise UserError(
            f"task.name={name!r}: its `build` returned {task!r}, which lacks a method of "
            "`Task` (vit_jax/tasks/task.py)"
        )
    batch_spec = task.batch_spec(config.batch_size)
    parse.check_batch(batch_spec, data)
    wanted = ()
    if re.fullmatch(fields.CUSTOM, name):
        wanted = parse.parse_train(data.train_transform, data.image_size).device
    if wanted:
        with transforms.recording() as applied:
            jax.eval_shape(task.prepare, batch_spec, jax.random.key(0))
        # A task may take partners from elsewhere in the batch than ours do.
        applied = transforms.apart(applied, 1)
        if missing := [type(op).__name__ for op in wanted if op not in applied]:
            raise UserError(
                f"data.train_transform={data.train_transform!r}: {', '.join(missing)} run "
                f"on the device, but `prepare` of task.name={name!r} does not apply them: "
                "call `transforms.apply` there (docs/extending.md), or leave them out"
            )
    return batch_spec


def _check_microbatches(
    task: Task, config: TrainConfig, splits: tuple[int, int]
) -> list[str]:
    """Checks the size of microbatches; returns lines about results that depend on it."""
    count, size = math.prod(splits), config.batch_size // math.prod(splits)
    lines = task.check_microbatch(size)
    if count > 1 and task.coupled:
        key = "grad_accum_steps" if splits[1] > 1 else "sam_batch_size"
        lines.append(
            f"optim.{key}={getattr(config.optim, key)}: {', '.join(task.coupled)} take the "
            f"{size} images of a microbatch and not the {config.batch_size} of the batch, "
            "so results depend on the number of microbatches"
        )
    return lines


def _check_rows(
    batch_spec: dict, splits: tuple[int, int], mesh: Mesh, config: TrainConfig
) -> list[str]:
    """Checks that groups and arrays with fewer rows than images split over devices.

    Returns:
      Lines about groups that are not those of the config.
    """
    group, lines = getattr(config.model, "drop_path_group", 0), []
    for name, shape in ((name, spec.shape) for name, spec in batch_spec.items()):
        if group and len(shape) >= 4:  # Images, or several crops of each.
            views = shape[1] if len(shape) == 5 else 1
            at_once = views * shape[0] // math.prod(splits)
            meshes.check_groups(at_once, group, mesh)
            if (size := math.gcd(at_once, group)) != group:
                lines.append(
                    f"model.drop_path_group={group} does not divide the {at_once} rows of "
                    f"{name} that pass through the network at once: groups have {size}"
                    f"{', so no branch is dropped' if size == 1 else ''}"
                )
    rows = {spec.shape[0] for spec in batch_spec.values()}
    if len(rows) == 1:
        return lines
    where = (
        f"data.train_transform={config.data.train_transform!r} packs images into rows"
    )
    if splits[0] * splits[1] > 1:
        raise UserError(
            f"{where}, which parts of a batch cannot have: set optim.grad_accum_steps=1 and "
            "optim.sam_batch_size=0"
        )
    devices = math.prod(mesh.shape[axis] for axis in meshes.BATCH_AXES)
    if min(rows) % devices:
        raise UserError(
            f"{where}, of which batch_size={config.batch_size} makes {min(rows)}, no "
            f"multiple of {devices} devices: change one of them"
        )
    return lines


def _check_running_means(task, params, extra, config) -> None:
    """Checks that a task carries the running means of its network, untrained."""
    if not task.model.stateful:
        return
    key = jax.tree_util.DictKey(models.STATE)
    in_params, in_extra = (
        any(key in keys for keys, _ in jax.tree.leaves_with_path(tree))
        for tree in (params, extra)
    )
    if in_params or not in_extra:
        raise UserError(
            f"task.name={config.task.name!r} does not carry the running means "
            f"({models.STATE}) of model.variant={config.model.variant!r}: classification, "
            "distillation, lora and linear_probe do; or use GroupNorm or LayerNorm"
        )


def make_train_step(
    config: TrainConfig,
    task: Task,
    tx: optax.GradientTransformation,
    learning_rate: Schedule,
    rho: Schedule,
    splits: tuple[int, int],
    mesh: Mesh,
    shardings: TrainState,
    thawing: optim.Thawing | None,
) -> Step:
    """Returns the training step, not jitted.

    It maps state and batch (`task.batch_spec`, split over the mesh) to the next state and
    scalars: the metrics of the task, grad_norm, param_norm, and `learning_rate`, which `tx`
    has already. `rho` and `splits` are from sharpness.py. The norm of gradients is that of
    parameters that move in this step, as `thawing` has it.
    """

    def loss_fn(params, extra, batch, key):
        params = optim.stop_frozen_gradients(params, config.optim)
        return task.loss(params, extra, batch, key)

    def grad_fn(params, extra, batch, key):
        grads, aux = jax.grad(loss_fn, has_aux=True)(params, extra, batch, key)
        # As soon as they exist, so that no device holds all of them.
        return jax.lax.with_sharding_constraint(grads, shardings.params), aux

    groups, parts = splits
    # For optimisers that derive it; of several microbatches it keeps one's activations.
    loss_alone = lambda *args: loss_fn(*args)[0]
    if groups * parts > 1:
        loss_alone = accumulate(jax.checkpoint(loss_alone), groups * parts)

    def moving(grads, step):
        return thawing.moving(grads, step) if thawing else grads

    def gradients_at(step):
        function = accumulate(grad_fn, parts)
        if config.optim.sam_rho:
            of_moving = functools.partial(moving, step=step)
            function = sharpness.climb(function, config.optim, rho(step), of_moving)
        return accumulate(function, groups)

    def train_step(state, batch):
        augment_key, dropout_key = jax.random.split(state.key)
        batch = task.prepare(batch, augment_key)
        key = jax.random.fold_in(dropout_key, state.step)
        with sharding.activations(mesh):
            grads, aux = gradients_at(state.step)(state.params, state.extra, batch, key)
            metrics, stats = divide_ratios(aux)
            updates, opt_state = tx.update(
                grads,
                state.opt_state,
                state.params,
                step=state.step,
                value=metrics["loss"],
                value_fn=lambda params: loss_alone(params, state.extra, batch, key),
            )
        params = optax.apply_updates(state.params, updates)
        step, average, ema = state.step + 1, state.average, config.ema
        evaluated = config.optim.evaluated(opt_state, params)
        if average is not None:
            average = (
                update_ema(average, evaluated, step, ema.decay, ema.warmup)
                if ema.decay
                else evaluated
            )
        extra = task.update(state.extra, evaluated, stats, step)
        rate = jnp.asarray(learning_rate(state.step), jnp.float32)
        norms = {"grad_norm": optax.tree.norm(moving(grads, state.step))}
        norms["param_norm"] = optax.tree.norm(params)
        metrics = {**metrics, **norms, "learning_rate": rate}
        new = {"params": params, "opt_state": opt_state, "average": average}
        return state.replace(step=step, extra=extra, **new), metrics

    return train_step


def jit_step(
    step: Callable,
    mesh: Mesh,
    shardings: TrainState,
    *,
    donate: bool = True,
    num_scalars: int = 0,
) -> Step:
    """Jits a training step.

    Args:
      step: step of `make_train_step`, or one with `num_scalars` extra arguments.
      mesh: mesh of all devices.
      shardings: state with the sharding of each array.
      donate: reuse the memory of the state that is passed in. JAX's NaN check runs a
        failed step again, which needs its input.
      num_scalars: number of replicated arguments after the batch.
    """
    replicated = meshes.replicated(mesh)
    return jax.jit(
        step,
        donate_argnums=(0,) if donate else (),
        in_shardings=(shardings, meshes.batched(mesh), *[replicated] * num_scalars),
        out_shardings=(shardings, replicated),
        compiler_options=compilation.options(mesh.devices.flat[0].platform),
    )


def accumulate(grad_fn: Callable, parts: int) -> Callable:
    """Returns a function like `grad_fn` that averages over the parts of a batch.

    Args:
      grad_fn: (params, extra, batch, key) -> (gradients, (metrics, stats)), all means, or
        ratios of them; a batch is a name to an array of B rows.
      parts: number of parts, which divides B; each has rows of every device.
    """
    if parts == 1:
        return grad_fn

    def split(x):
        x = x.reshape(len(x) // parts, parts, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1)

    def gradients(params, extra, batch, key):
        def body(total, xs):
            part, i = xs
            means = grad_fn(params, extra, part, jax.random.fold_in(key, i))
            return jax.tree.map(lambda t, p: t + p / parts, total, means), None

        batches = jax.tree.map(split, batch)
        first = jax.tree.map(lambda x: x[0], batches)
        zero = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype),
            jax.eval_shape(grad_fn, params, extra, first, key),
        )
        return jax.lax.scan(body, zero, (batches, jnp.arange(parts)))[0]

    return gradients


_background: list[concurrent.futures.Future] = []


def is_compiling() -> bool:
    """Returns whether a compilation is running, which a process would wait for at exit."""
    return any(not future.done() for future in _background)


def start_compiling(setup: TrainSetup, *, debug_nans: bool) -> Callable[[], Step]:
    """Starts to compile a training step while the state is initialised or restored.

    The step is traced here and now, so that settings of this thread (such as `with
    jax.default_matmul_precision(...)`) apply to it.

    With `debug_nans` nothing is compiled, since JAX will run a failed step again, operation
    by operation.

    Returns:
      Function that waits for the step, and raises what compiling raised, such as running
      out of device memory.
    """
    if debug_nans or setup.compiled is not None:
        return lambda: setup.compiled or setup.train_step
    lowered = setup.train_step.lower(setup.shapes, setup.batch_shapes)
    executor = concurrent.futures.ThreadPoolExecutor(1, "compile")
    future = executor.submit(lowered.compile)
    _background.append(future)
    executor.shutdown(wait=False)
    return future.result

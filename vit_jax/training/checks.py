"""Checks of a task and of the rows of its batches, before a step is built."""

import math
import re

import jax
from jax.sharding import Mesh

from vit_jax import models
from vit_jax.config import fields
from vit_jax.data.transforms import device as device_transforms
from vit_jax.data.transforms import parse
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.tasks.task import Task
from vit_jax.training.config import TrainConfig


def check_task(task: Task, config: TrainConfig) -> dict:
    """Checks the methods of a task.

    A user's task must also apply the transforms that run on the device.

    Returns:
      `batch_spec` of the task for the batch size of the config.

    Raises:
      UserError: a method is missing, or a transform is not applied.
    """
    name, data = config.task.name, config.data
    if not isinstance(task, Task):
        raise UserError(
            f"task.name={name!r}: `build` returned {task!r}, which lacks a method of "
            "`Task`: implement all methods of vit_jax/tasks/task.py"
        )
    batch_spec = task.batch_spec(config.batch_size)
    parse.check_batch(batch_spec, data)
    wanted = ()
    if re.fullmatch(fields.CUSTOM, name):
        wanted = data.transforms.device
    if wanted:
        with device_transforms.recording() as applied:
            jax.eval_shape(task.prepare, batch_spec, jax.random.key(0))
        # Tasks may choose the partners of mixing from the batch in different ways.
        applied = device_transforms.apart(applied, 1)
        if missing := [type(op).__name__ for op in wanted if op not in applied]:
            raise UserError(
                f"data.train_transform={data.train_transform!r}: {', '.join(missing)} run "
                f"on the device, but `prepare` of task.name={name!r} does not apply them: "
                "call `transforms.apply` there (docs/extending.md), or leave them out"
            )
    return batch_spec


def check_batches(
    task: Task,
    batch_spec: dict,
    params: dict,
    extra: object,
    mesh: Mesh,
    config: TrainConfig,
) -> tuple[str, ...]:
    """Checks how batches are split, and the state of the network in the task's arrays.

    Args:
      task: task of the run.
      batch_spec: `batch_spec` of the task.
      params, extra: shapes of the arrays that the task initialises.
      mesh: mesh of all devices.
      config: complete config.

    Returns:
      Lines for the log: the task's notes, and results that depend on how a batch is
      split.

    Raises:
      UserError: batches cannot be split over microbatches and devices, or the running
        means are not in `extra`.
    """
    splits = config.optim.microbatches(config.batch_size, mesh)
    return (
        *task.notes,
        *_check_microbatches(task, config, splits),
        *_check_running_means(task, params, extra, config),
        *_check_rows(task.model.config, batch_spec, splits, mesh, config),
    )


def _check_microbatches(
    task: Task, config: TrainConfig, splits: tuple[int, int]
) -> list[str]:
    """Checks the size of microbatches; returns lines about results that depend on it."""
    count, size = math.prod(splits), config.batch_size // math.prod(splits)
    lines = task.check_microbatch(size)
    if count > 1 and task.coupled:
        lines.append(
            f"{config.optim.microbatch_key(splits[1])}: {', '.join(task.coupled)} use the "
            f"{size} images of a microbatch instead of the {config.batch_size} images of "
            "the batch, so results depend on the number of microbatches"
        )
    return lines


def _check_rows(
    network: models.NetworkConfig,
    batch_spec: dict,
    splits: tuple[int, int],
    mesh: Mesh,
    config: TrainConfig,
) -> list[str]:
    """Checks that the rows of a batch can be split over devices and microbatches.

    Returns:
      Lines about settings that the network cannot apply to this number of rows.
    """
    devices, lines = meshes.num_data_devices(mesh), []
    platform = mesh.devices.flat[0].platform
    for name, shape in ((name, spec.shape) for name, spec in batch_spec.items()):
        if len(shape) >= 4:  # Images, or several crops of each image.
            views = shape[1] if len(shape) == 5 else 1
            at_once = views * shape[0] // math.prod(splits)
            if what := network.check_rows(at_once, devices, platform):
                where = f"{at_once} rows of {name} pass through the network at once"
                lines.append(f"{where}: {what}")
    rows = {spec.shape[0] for spec in batch_spec.values()}
    if len(rows) == 1:
        return lines
    where = (
        f"data.train_transform={config.data.train_transform!r} packs images into rows"
    )
    if splits[0] * splits[1] > 1:
        raise UserError(
            f"{where}, and rows cannot be split into microbatches: leave out "
            f"{config.optim.microbatch_key(splits[1])}"
        )
    if min(rows) % devices:
        raise UserError(
            f"{where}: batch_size={config.batch_size} gives {min(rows)} rows, which is not a "
            f"multiple of the {devices} devices: change batch_size or the number of devices"
        )
    return lines


def _check_running_means(
    task: Task, params: dict, extra: object, config: TrainConfig
) -> list[str]:
    """Checks that a task has the running means of its network in `extra`.

    Returns:
      A line if parameters are frozen, because running means are not.
    """
    if not task.model.stateful:
        return []
    key = jax.tree_util.DictKey(models.STATE)
    in_params, in_extra = (
        any(key in keys for keys, _ in jax.tree.leaves_with_path(tree))
        for tree in (params, extra)
    )
    if in_params or not in_extra:
        raise UserError(
            f"task.name={config.task.name!r} does not support the running means "
            f"({models.STATE}) of model.variant={config.model.variant!r}: choose the task "
            "classification, regression, distillation, lora or linear_probe, or a model "
            "with GroupNorm or LayerNorm"
        )
    if not config.optim.freeze:
        return []
    line = (
        f"optim.freeze={config.optim.freeze} freezes parameters; the running means of "
        "BatchNorm still follow the training images"
    )
    return [line]

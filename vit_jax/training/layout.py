"""Shapes and shardings of a run's arrays, on the devices and in checkpoints."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.models import stacking
from vit_jax.tasks.task import Task
from vit_jax.training.config import TrainConfig
from vit_jax.training.train_state import TrainState


class DiskLayout(NamedTuple):
    """The form of a state in checkpoints, where each block has separate arrays.

    On devices `model.scan` may merge the blocks into one array per parameter. Then
    arrays in the form of checkpoints are in host memory, because a device may not have
    memory for a second state.

    Attributes:
      shapes: state with a jax.ShapeDtypeStruct for each array.
      shardings: state with a NamedSharding for each array.
      to_disk, from_disk: functions that convert a state to this form and back; the
        argument is not donated.
      arrange: function that converts the parameters of the network from this form to
        that on devices; the arrays stay in host memory.
    """

    shapes: TrainState
    shardings: TrainState
    to_disk: Callable[[TrainState], TrainState] = lambda state: state
    from_disk: Callable[[TrainState], TrainState] = lambda state: state
    arrange: Callable[[dict], dict] = lambda network: network


class Layout(NamedTuple):
    """Shapes and shardings of a run's arrays.

    Attributes:
      shapes: state with a jax.ShapeDtypeStruct for each array.
      shardings: state with a NamedSharding for each array.
      batch: names of the arrays of a global batch to jax.ShapeDtypeStruct with
        sharding.
      disk: form of the state in checkpoints.
    """

    shapes: TrainState
    shardings: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    disk: DiskLayout


def lay_out(
    config: TrainConfig, mesh: Mesh, task: Task, shapes: TrainState, batch: dict
) -> Layout:
    """Returns the layout of a run.

    Args:
      config: complete config.
      mesh: mesh of all devices.
      task: task of the run.
      shapes: state with a jax.ShapeDtypeStruct for each array.
      batch: `batch_spec` of the task.
    """
    rules, min_size = config.sharding.rules, config.sharding.min_size
    axes = task.model.config.model_axes

    def place(shapes):
        separate = jax.eval_shape(stacking.separate, shapes.params)
        layouts = [
            (params, sharding.parameters(params, mesh, axes, rules, min_size))
            for params in (shapes.params, separate)
        ]
        extra = sharding.beside(shapes.extra, mesh, axes, rules, min_size)
        return sharding.like(shapes, *layouts).replace(extra=extra)

    shardings = place(shapes)
    disk = DiskLayout(shapes, shardings)
    if task.model.config.stacked:
        disk = _block_by_block(task, shapes, shardings, place)
    rows = meshes.batched(mesh)
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        for name, x in batch.items()
    }
    return Layout(shapes, shardings, batch, disk)


def _block_by_block(
    task: Task,
    shapes: TrainState,
    shardings: TrainState,
    place: Callable[[TrainState], TrainState],
) -> DiskLayout:
    """Returns the form in checkpoints of a state whose blocks are a scan on devices.

    Args:
      task: task of the run.
      shapes, shardings: shapes and shardings of the state on devices.
      place: function from the shapes of a state to its shardings.
    """
    network = task.backbone(shapes.params, shapes.extra)
    convert = functools.partial(stacking.convert, like=shapes, params=network)
    disk_shapes = convert(shapes, stacking.unstack)
    disk_shardings = convert(place(disk_shapes), _on_hosts)
    # Trees of parameters, moments and averages are converted one at a time: together
    # they would need memory for nearly two states (docs/decisions.md).
    on_disk, placed = (
        task.backbone(s.params, s.extra) for s in (disk_shardings, shardings)
    )
    unstack = jax.jit(stacking.unstack, out_shardings=on_disk)
    stack = jax.jit(_stack_on_devices, out_shardings=placed)
    return DiskLayout(
        disk_shapes,
        disk_shardings,
        functools.partial(convert, function=unstack),
        functools.partial(convert, function=stack),
        stacking.stack,
    )


def _stack_on_devices(params: dict) -> dict:
    return stacking.stack(jax.device_put(params, jax.memory.Space.Device))


def _on_hosts(shardings: dict) -> dict:
    """Moves parameters to host memory if devices have separate memory."""

    def move(place):
        separate = next(iter(place.device_set)).platform in ("gpu", "tpu")
        return place.with_memory_kind("pinned_host") if separate else place

    return jax.tree.map(move, shardings)

"""What a config computes on a mesh: the same for a run and for the compile verb."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax import models
from vit_jax.config import fields
from vit_jax.data import ops
from vit_jax.models import stacking
from vit_jax.parallel import capacity, sharding
from vit_jax.parallel import mesh as meshes
from vit_jax.training import optim
from vit_jax.training import state as states
from vit_jax.training import step as steps
from vit_jax.training.config import TrainConfig


class Program(NamedTuple):
    """A training run's functions, and the form and place of their arrays.

    Attributes:
      model: network.
      total: steps of the run.
      epoch: steps an epoch, not always whole.
      rate: learning rate as a function of the step.
      tx: optimiser.
      init: draws the initial parameters; call it under jit with `shardings.params`.
      create: builds the first state from parameters; under jit with `shardings`.
      shapes: the state with a jax.ShapeDtypeStruct for each array.
      shardings: the state with a NamedSharding for each array.
      disk_shapes, disk_shardings: the same of what is on disk, where the encoder's
        blocks lie one by one also if `model.scan` has them stacked. Then these arrays
        are in the memory of the hosts where the devices have their own: a second state
        beside the first may be more than they hold.
      to_disk, from_disk: the state as it is on disk, and back; what is given stays.
      step: jitted; see `training.step.define`.
      batch_shapes: name to jax.ShapeDtypeStruct of a global batch, with its sharding.
    """

    model: models.Model
    total: int
    epoch: float
    rate: optim.Schedule
    tx: optax.GradientTransformation
    init: Callable[[], dict]
    create: Callable[[dict], states.TrainState]
    shapes: states.TrainState
    shardings: states.TrainState
    disk_shapes: states.TrainState
    disk_shardings: states.TrainState
    to_disk: Callable[[states.TrainState], states.TrainState]
    from_disk: Callable[[states.TrainState], states.TrainState]
    step: steps.Step
    batch_shapes: dict[str, jax.ShapeDtypeStruct]

    def start(self) -> states.TrainState:
        """Returns the first state, each part drawn on the devices that hold it."""
        create = jax.jit(lambda: self.create(self.init()), out_shardings=self.shardings)
        return create()

    def start_from(self, params: dict) -> states.TrainState:
        """Returns the first state of a run with given parameters.

        Args:
          params: as on disk, in the host's memory, the same on all processes; only
            their parts are sent.
        """
        if self.model.stacked:
            params = stacking.stack(params)
        create = jax.jit(self.create, out_shardings=self.shardings, donate_argnums=0)
        return create(jax.device_put(params, self.shardings.params))


def build(config: TrainConfig, mesh: Mesh, examples: int) -> Program:
    """Builds the program of a run; computes nothing yet.

    Args:
      config: complete config.
      mesh: from `meshes.create`, of devices that are here or of a topology.
      examples: size of the training split.

    Raises:
      UserError: the batch, the model or the rules do not fit the mesh or each other.
    """
    data = config.data
    meshes.check_batch(config.batch_size, config.optim.accumulate, mesh)
    total = config.num_steps(examples)
    epoch = examples / config.batch_size
    model = models.create(
        **fields.to_dict(config.model),
        classes=data.classes,
        image_size=data.image_size,
        channels=data.channels,
        platform=mesh.devices.flat[0].platform,
    )
    init = functools.partial(states.init_params, model, config.seed)
    params = jax.eval_shape(init)
    capacity.check(params, list(mesh.devices.flat))
    peak = config.optim.peak_rate(config.batch_size)
    stated = "epochs" if config.epochs else "total_steps"
    rate = optim.schedule(config.optim, peak, total, epoch, stated)
    tx = optim.optimizer(config.optim, params, rate, total, epoch)
    create = functools.partial(
        states.create, tx=tx, seed=config.seed, average=bool(config.average.decay)
    )
    shapes = jax.eval_shape(create, params)
    disk_shapes = stacking.convert(shapes, stacking.unstack)
    place = functools.partial(_place, config=config, mesh=mesh)
    shardings, disk_shardings = place(shapes), place(disk_shapes)
    to_disk = from_disk = _same
    if model.stacked:
        disk_shardings = stacking.convert(disk_shardings, _on_hosts)
        # One tree of parameters, moments or averages at a time, or the devices would
        # have to hold nearly two states (docs/decisions.md).
        one_by_one = jax.jit(stacking.unstack, out_shardings=disk_shardings.params)
        stacked = jax.jit(_stacked, out_shardings=shardings.params)
        to_disk = functools.partial(stacking.convert, function=one_by_one)
        from_disk = functools.partial(stacking.convert, function=stacked)
    device_ops = ops.parse_train(data.ops, data.image_size).device
    step = steps.define(model, tx, rate, device_ops, config, mesh, shardings)
    return Program(
        model=model,
        total=total,
        epoch=epoch,
        rate=rate,
        tx=tx,
        init=init,
        create=create,
        shapes=shapes,
        shardings=shardings,
        disk_shapes=disk_shapes,
        disk_shardings=disk_shardings,
        to_disk=to_disk,
        from_disk=from_disk,
        step=steps.jitted(step, config, mesh, shardings),
        batch_shapes=_batch_shapes(config, mesh),
    )


def _place(
    shapes: states.TrainState, config: TrainConfig, mesh: Mesh
) -> states.TrainState:
    rules, smallest = config.sharding.rules, config.sharding.smallest
    params = sharding.parameters(shapes.params, mesh, rules, smallest)
    return sharding.like(shapes, params)


def _same(state: states.TrainState) -> states.TrainState:
    return state


def _stacked(params: dict) -> dict:
    return stacking.stack(jax.device_put(params, jax.memory.Space.Device))


def _on_hosts(shardings: dict) -> dict:
    """Moves parameters to the memory of the hosts, where it is another."""

    def move(place):
        own = next(iter(place.device_set)).platform in ("gpu", "tpu")
        return place.with_memory_kind("pinned_host") if own else place

    return jax.tree.map(move, shardings)


def _batch_shapes(config: TrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    data, place = config.data, meshes.batched(mesh)
    rows = config.batch_size
    forms = {
        "image": ((rows, *data.image_size, data.channels), np.uint8),
        "label": ((rows,), np.int32),
        "index": ((rows,), np.uint32),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for name, (shape, dtype) in forms.items()
    }

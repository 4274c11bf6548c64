"""What the runs of a sweep have in common: one compiled step, one set of evaluations.

Runs that differ in their peak rate and their seed alone compute the same, if the rate
is an argument of the step; the results are those of runs by themselves.
"""

import json
import threading
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import fields
from vit_jax.data import ops
from vit_jax.data.config import DataConfig
from vit_jax.evaluation.suite import Suite
from vit_jax.models import Model
from vit_jax.parallel import mesh as meshes
from vit_jax.training import optim
from vit_jax.training import program as programs
from vit_jax.training import step as steps
from vit_jax.training.config import TrainConfig


class Shared:
    """Hands `loop.train` what an earlier run has built, if it is the same.

    Of each kind only the last is kept. Give one to all runs of a sweep, in one process.
    """

    def __init__(self):
        self._step: tuple[str, _Step] | None = None
        self._suite: tuple[str, Suite] | None = None

    def program(self, config: TrainConfig, mesh: Mesh, examples: int):
        """Does as `program.build`, with a step that may be compiled already."""
        program = programs.build(config, mesh, examples)
        lengths = [program.total]
        stated = fields.to_dict(config.optim)
        if any(value for key, value in stated.items() if key.endswith("_epochs")):
            lengths.append(program.epoch)
        decisive = [
            [path, value] for path, about, value in fields.walk(config) if about.in_step
        ]
        key = _key([decisive, lengths], mesh)
        if self._step is None or self._step[0] != key:
            self._step = key, _Step(config, mesh, program)
        return program._replace(
            step=self._step[1].at(config.optim.peak_rate(config.batch_size))
        )

    def suite(
        self,
        model: Model,
        evals: dict,
        data: DataConfig,
        batch_size: int,
        mesh: Mesh,
        shardings: dict,
    ) -> Suite:
        """Does as `Suite`."""
        named = {name: fields.to_dict(spec) for name, spec in evals.items()}
        places = [str(place.spec) for place in jax.tree.leaves(shardings)]
        decisive = [model.options, named, fields.to_dict(data), batch_size, places]
        key = _key(decisive, mesh)
        if self._suite is None or self._suite[0] != key:
            self._suite = None  # Its images go before those of the next are read.
            suite = Suite(model, evals, data, batch_size, mesh, shardings)
            self._suite = key, suite
        return self._suite[1]


class _Step:
    """A training step with the peak rate as an argument, compiled at most once."""

    def __init__(self, config: TrainConfig, mesh: Mesh, program: programs.Program):
        device_ops = ops.parse_train(config.data.ops, config.data.image_size).device
        params, shardings = program.shapes.params, program.shardings

        def step(state, batch, peak):
            lengths = program.total, program.epoch
            rate = optim.schedule(config.optim, peak, *lengths)
            tx = optim.optimizer(config.optim, params, rate, *lengths)
            take = steps.define(
                program.model, tx, rate, device_ops, config, mesh, shardings
            )
            return take(state, batch)

        self._jitted = steps.jitted(step, config, mesh, shardings, scalars=1)
        self._everywhere = meshes.replicated(mesh)
        self._lowered = self._compiled = None
        self._lock = threading.Lock()

    def at(self, peak: float) -> "_AtRate":
        """Returns the step of a run."""
        # Now, because the loop forbids transfers that it does not ask for.
        return _AtRate(self, jax.device_put(np.float32(peak), self._everywhere))

    def lower(self, *shapes) -> None:
        """Traces it."""
        peak = jax.ShapeDtypeStruct((), np.float32, sharding=self._everywhere)
        self._lowered = self._lowered or self._jitted.lower(*shapes, peak)

    def compile(self) -> Callable:
        """Returns what takes a step at a given peak rate."""
        with self._lock:
            self._compiled = self._compiled or self._lowered.compile()
        return self._compiled

    def __call__(self, *args):
        return self._jitted(*args)


class _AtRate:
    """A step at one peak rate, lowered and compiled as a jitted function is."""

    def __init__(self, step: _Step, peak: jax.Array):
        self._step, self._peak = step, peak

    def lower(self, *shapes) -> "_AtRate":
        self._step.lower(*shapes)
        return self

    def compile(self) -> steps.Step:
        step = self._step.compile()
        return lambda state, batch: step(state, batch, self._peak)

    def __call__(self, state, batch):
        return self._step(state, batch, self._peak)


def _key(decisive: list, mesh: Mesh) -> str:
    """Names all that decides what is computed."""
    places = [[str(d) for d in mesh.devices.flat], list(mesh.shape.items())]
    return json.dumps([decisive, places])

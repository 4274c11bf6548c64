"""Reuse between the runs of a sweep: one compiled step, one set of evaluations.

Runs that differ only in peak learning rate and seed share a step that takes the rate as
an argument. Results are bit-identical to those of separate runs.
"""

import json
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import fields
from vit_jax.config.lengths import RunLength, depends_on_epochs
from vit_jax.data.config import DataConfig
from vit_jax.distributed import mesh as meshes
from vit_jax.evaluators.forward_passes import TrainedTask
from vit_jax.evaluators.suite import Suite
from vit_jax.models import Model
from vit_jax.training import optim, sharpness, train_step
from vit_jax.training.config import TrainConfig
from vit_jax.training.train_step import Step, TrainSetup


class SweepCache:
    """Keeps the last compiled step and evaluations for the next run of a sweep.

    Pass the same one to `loop.train` for all runs of a sweep in one process.
    """

    def __init__(self):
        self._step: tuple[str, _StepOfRate] | None = None
        self._suite: tuple[str, Suite] | None = None

    def build_train_setup(
        self,
        config: TrainConfig,
        mesh: Mesh,
        num_examples: int,
        saved: dict | None = None,
    ) -> TrainSetup:
        """Returns what `train_step.build_train_setup` does, with a shared step."""
        setup = train_step.build_train_setup(config, mesh, num_examples, saved)
        lengths = [setup.total_steps]
        if depends_on_epochs(config.optim):
            lengths.append(setup.steps_per_epoch)
        decisive = [
            [path, value] for path, about, value in fields.walk(config) if about.in_step
        ]
        key = _key([decisive, lengths, setup.metadata], mesh)
        if self._step is None or self._step[0] != key:
            self._step = key, _StepOfRate(config, mesh, setup)
        peak = config.optim.peak_learning_rate(config.batch_size)
        # It stays in this process, and takes the rate that a stored one has inside.
        return setup._replace(train_step=self._step[1].at(peak), program_key=lambda: "")

    def suite(
        self,
        model: Model,
        evals: dict,
        data: DataConfig,
        batch_size: int,
        mesh: Mesh,
        class_names: Sequence[str],
        trained: TrainedTask,
    ) -> Suite:
        """Returns a `Suite` with these arguments."""
        named = {name: fields.to_dict(spec) for name, spec in evals.items()}
        places = [str(place.spec) for place in jax.tree.leaves(trained.shardings)]
        decisive = [model.options, named, fields.to_dict(data), batch_size, places]
        decisive.append(class_names)
        key = _key(decisive, mesh)
        if self._suite is None or self._suite[0] != key:
            self._suite = None  # Its images go before those of the next are read.
            suite = Suite(
                model,
                evals,
                data,
                batch_size,
                mesh,
                class_names=class_names,
                trained=trained,
            )
            self._suite = key, suite
        return self._suite[1]


class _StepOfRate:
    """A training step with the peak rate as an argument, compiled at most once."""

    def __init__(self, config: TrainConfig, mesh: Mesh, setup: TrainSetup):
        params, shardings = setup.shapes.params, setup.shardings

        def step(state, batch, peak):
            run = RunLength(setup.total_steps, setup.steps_per_epoch)
            rate = optim.learning_rate(config.optim, peak, run)
            tx = optim.optimizer(config.optim, params, rate, run, setup.model.config)
            take_step = train_step.make_train_step(
                setup.task,
                tx,
                rate,
                sharpness.radius(config.optim, rate, peak, run),
                sharpness.splits(config.optim, config.batch_size, mesh),
                config.optim,
                config.ema,
                mesh,
                shardings,
            )
            return take_step(state, batch)

        self._jitted = train_step.jit_step(
            step, mesh, shardings, donate=not config.debug_nans, num_scalars=1
        )
        self._everywhere = meshes.replicated(mesh)
        self._lowered = self._compiled = None
        self._lock = threading.Lock()

    def at(self, peak: float) -> "_AtRate":
        """Returns the step at one peak rate."""
        # Now, because the loop forbids transfers that it does not ask for.
        return _AtRate(self, jax.device_put(np.float32(peak), self._everywhere))

    def lower(self, *shapes) -> None:
        """Traces the step, once."""
        peak = jax.ShapeDtypeStruct((), np.float32, sharding=self._everywhere)
        self._lowered = self._lowered or self._jitted.lower(*shapes, peak)

    def compile(self) -> Callable:
        """Compiles the step, once, and returns it."""
        with self._lock:
            self._compiled = self._compiled or self._lowered.compile()
        return self._compiled

    def __call__(self, *args):
        return self._jitted(*args)


class _AtRate:
    """The step at one peak rate, with the methods of a jitted function."""

    def __init__(self, step: _StepOfRate, peak: jax.Array):
        self._step, self._peak = step, peak

    def lower(self, *shapes) -> "_AtRate":
        self._step.lower(*shapes)
        return self

    def compile(self) -> Step:
        step = self._step.compile()
        return lambda state, batch: step(state, batch, self._peak)

    def __call__(self, state, batch):
        return self._step(state, batch, self._peak)


def _key(decisive: list, mesh: Mesh) -> str:
    """Returns a text that is equal for runs that compute the same."""
    places = [[str(d) for d in mesh.devices.flat], list(mesh.shape.items())]
    return json.dumps([decisive, places])

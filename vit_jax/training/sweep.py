"""Sweeps: several runs share one compiled step and one set of evaluations.

Runs that differ only in peak learning rate and seed share a step with the peak learning
rate as an argument. Results are bit-identical to those of separate runs.
"""

import json
import os
from collections.abc import Callable

import jax
import numpy as np

from vit_jax.config import fields
from vit_jax.config.lengths import depends_on_epochs
from vit_jax.distributed import compilation
from vit_jax.distributed import mesh as meshes
from vit_jax.training import guards, loop, train_setup
from vit_jax.training.config import TrainConfig
from vit_jax.training.step import jit_step
from vit_jax.training.train_setup import TrainSetup


class SweepSetups:
    """Builds the setups of the runs of a sweep, to be passed to `loop.train`.

    The step and the evaluations of the previous run are reused if they are the same.
    """

    def __init__(self):
        self._step = self._suite = None
        self._step_key = self._suite_key = ""

    def build(self, config: TrainConfig, workdir: str | os.PathLike) -> TrainSetup:
        """Builds the setup of the next run.

        Args:
          config: complete config.
          workdir: folder of the run, which may contain checkpoints.

        Raises:
          UserError: see `loop.train`.
        """
        compilation.enable_cache(config.compilation_cache_dir)
        with guards.clear_errors(config):
            setup = loop.build_setup(config, workdir)
            key = _suite_key(config, setup)
            if key != self._suite_key:
                self._suite = None  # Frees its images before the next are read.
                self._suite, self._suite_key = loop.open_suite(config, setup), key
            setup = setup._replace(suite=self._suite)
            if config.debug_nans:  # JAX's NaN check needs a step that is only jitted.
                return setup
            key = _step_key(config, setup)
            if key != self._step_key:
                self._step, self._step_key = _compile(config, setup), key
            # Transferred here, because the loop forbids implicit transfers.
            peak = np.float32(config.optim.peak_learning_rate(config.batch_size))
            peak = jax.device_put(peak, meshes.replicated(setup.mesh))
            step = self._step
            return setup._replace(
                compiled=lambda state, batch: step(state, batch, peak)
            )


def _step_key(config: TrainConfig, setup: TrainSetup) -> str:
    """Returns a text that is equal for runs that can share a step."""
    lengths = [setup.total_steps]
    if depends_on_epochs(config.optim):
        lengths.append(setup.length.steps_per_epoch)
    decisive = [[path, v] for path, about, v in fields.walk(config) if about.in_step]
    return json.dumps([decisive, lengths, setup.metadata, _places(setup)])


def _suite_key(config: TrainConfig, setup: TrainSetup) -> str:
    """Returns a text that is equal for runs that can share evaluations."""
    evals = {name: fields.to_dict(spec) for name, spec in config.evals.items()}
    shardings = jax.tree.leaves(setup.trained_task.shardings)
    decisive = [setup.model.options, evals, fields.to_dict(config.data)]
    decisive += [config.batch_size, [str(place.spec) for place in shardings]]
    return json.dumps([decisive, setup.source.class_names, _places(setup)])


def _places(setup: TrainSetup) -> list:
    mesh = setup.mesh
    return [[str(d) for d in mesh.devices.flat], list(mesh.shape.items())]


def _compile(config: TrainConfig, setup: TrainSetup) -> Callable:
    """Compiles a training step with the peak learning rate as its last argument."""
    task, mesh, layout = setup.task, setup.mesh, setup.layout
    path = setup.metadata["network"]["path"]

    def step(state, batch, peak):
        optimizer = train_setup.build_optimizer(
            config, task, setup.length, mesh, layout.shapes.params, path, peak
        )
        take = train_setup.build_step(config, task, mesh, layout, optimizer)
        return take(state, batch)

    jitted = jit_step(
        step,
        mesh,
        layout.shardings,
        bfloat16=config.model.rounds_products,
        num_scalars=1,
    )
    peak = jax.ShapeDtypeStruct((), np.float32, sharding=meshes.replicated(mesh))
    return jitted.lower(layout.shapes, layout.batch, peak).compile()

"""The outputs of a run's network for its images: for its page, folds and calibration."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from vit_jax import weights
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.evaluators import calibration, forward_passes
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.splits import VALIDATIONS, EvalSplit, EvalSplits, Subset
from vit_jax.evaluators.suite import full_batch
from vit_jax.models.targets import Targets
from vit_jax.training.config import TrainConfig
from vit_jax.weights import surgery
from vit_jax.weights.pretrained import Pretrained


class SplitOutputs(NamedTuple):
    """Logits, features and labels of the images of a split that could be read.

    `targets` says what the logits of a regression mean; None for classes.
    """

    outputs: Outputs
    source: Source
    targets: Targets | None


class TrainedNetwork:
    """The best network of a run, on the devices of this process; loaded when needed.

    Args:
      config: config of the run.
      workdir: workdir of the run.
    """

    def __init__(self, config: TrainConfig, workdir: str):
        self._config, self._workdir = config, workdir
        self._known: dict[str, SplitOutputs] = {}

    @functools.cached_property
    def pretrained(self) -> Pretrained:
        """The network's parameters and description."""
        return weights.open_pretrained(self._workdir)

    @functools.cached_property
    def _loaded(self) -> tuple:
        """The evaluation step, parameters on the devices, and their mesh."""
        data = self._config.data
        how = Preprocess.of_data(vars(data))
        model, params = surgery.fit_network(self.pretrained, how)
        mesh = meshes.create(meshes.MeshConfig(), jax.local_devices())
        wanted = Wanted(logits=True, features=True)
        step = forward_passes.make_eval_step(model, data, mesh, wanted)
        return step, jax.device_put(params), mesh

    def of_evaluation(self, name: str) -> SplitOutputs:
        """Returns the outputs for an evaluation of the run; computes them once."""
        if name not in self._known:
            self._known[name] = self._compute(self._split(name))
        return self._known[name]

    def of_split(self, split: str) -> tuple[calibration.Outputs, str]:
        """Returns the logits and labels for an evaluation's split, and its name.

        Raises:
          UserError: logits are not finite.
        """
        evals = self._config.evals
        name = next(name for name, one in evals.items() if one.split == split)
        seen = self.of_evaluation(name)
        return calibration.Outputs.of(seen.outputs, seen.source, split), split

    def of_training(self, most: int) -> SplitOutputs:
        """Returns the outputs for at most `most` training images, evenly spaced."""
        data = self._config.data
        source = open_source(data, data.split)
        if len(source) > most:
            numbers = np.linspace(0, len(source) - 1, most).astype(int)
            source = Subset(source, numbers)
        return self._compute(dataclasses.replace(self._split("val"), source=source))

    def _split(self, name: str) -> EvalSplit:
        names = self.pretrained.class_names
        splits = EvalSplits(self._config.data, class_names=names, order=VALIDATIONS)
        splits.targets = self.pretrained.targets
        (one,) = self._config.evals[name].open(name, splits).passes
        return one.split

    def _compute(self, split: EvalSplit) -> SplitOutputs:
        # Damaged images are skipped; training has already reported them.
        data = dataclasses.replace(split.data, on_error="skip")
        split = dataclasses.replace(split, data=data)
        step, params, mesh = self._loaded
        size = full_batch(self._config.batch_size, mesh)
        with split.batches(None, size, 0, 1) as batches:
            seen = forward_passes.collect_outputs(
                step, {"": params}, batches, mesh, title=split.title
            )
        return SplitOutputs(seen[""], split.source, self.pretrained.targets)

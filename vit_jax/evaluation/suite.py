"""The evaluations that a config names, run together."""

from collections.abc import Callable

from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.data import pipeline, sources
from vit_jax.evaluation import classification
from vit_jax.models import Model
from vit_jax.parallel import mesh as meshes

Scores = dict[str, dict[str, dict[str, float]]]


class Suite:
    """All of `config.evals`, over splits that are opened once.

    Args:
      model: network.
      config: complete config.
      mesh: of all devices.
      shardings: of the parameters; whole copies everywhere if None.

    Raises:
      UserError: a split cannot be opened.
    """

    def __init__(
        self,
        model: Model,
        config: ConfigDict,
        mesh: Mesh,
        shardings: dict | None = None,
    ):
        self._config, self._mesh = config, mesh
        self._part, self._parts = meshes.share(mesh)
        self._step = classification.build(model, config, mesh, shardings)
        self._sources = {
            name: sources.open_source(config.data, split)
            for name, split in config.evals.items()
        }

    def run(
        self, params: dict[str, dict], stop: Callable[[], bool] = lambda: False
    ) -> Scores | None:
        """Scores sets of parameters on every split.

        Args:
          params: name of a set ("raw", "ema") to parameters.
          stop: asked before every batch; True abandons the evaluation.

        Returns:
          Evaluation to set to {"top1", "loss", "examples"} (and "skipped", the damaged
          images left out, if there are any), or None when it was abandoned.
        """
        results = {}
        for name, source in self._sources.items():
            with pipeline.eval_batches(
                source,
                self._config.data,
                batch_size=self._config.batch_size,
                process_index=self._part,
                process_count=self._parts,
            ) as batches:
                scores = classification.evaluate(
                    self._step, params, batches, self._mesh, stop
                )
            if scores is None:
                return None
            for values in scores.values():
                if values["examples"] < len(source):
                    values["skipped"] = len(source) - values["examples"]
            results[name] = scores
        return results

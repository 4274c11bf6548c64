"""The evaluations that a config names, run together."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from vit_jax.config import fields
from vit_jax.data import sources
from vit_jax.data.config import DataConfig
from vit_jax.evaluation import kinds, opening, passes
from vit_jax.evaluation.readings import Reading, Readings
from vit_jax.models import Model
from vit_jax.parallel import mesh as meshes
from vit_jax.report.confusion import Confusion
from vit_jax.weights.pretrained import Preprocess

Scores = dict[str, dict[str, dict[str, float]]]

# Of an evaluation's keys, what is told by other means or does not change its numbers.
_UNTOLD = (
    *("kind", "every", "every_epochs", "name", "data_dir"),
    *("split", "train", "test"),
)


class Suite:
    """All evaluations of a config, over splits that are opened once.

    Evaluations of the same images share one pass over them.

    Args:
      model: network.
      evals: `config.evals`.
      data: `config.data`.
      batch_size: images a pass, over all devices.
      mesh: of all devices.
      shardings: of the parameters; whole copies everywhere if None.
      preprocess: how images are prepared where an evaluation does not say it; as in
        `data.eval_ops` if None.
      class_names: of the model, in the order of its outputs; empty if unknown.
      finite: whether a classifier whose outputs are not finite is refused, as features
        are in any case. In training that is the loop's to say, of the loss.
      order: of the splits to look for where an evaluation states none; in training
        `opening.VALIDATIONS`.

    Attributes:
      notes: a line for each thing that a user may want to know.
      confusions: evaluation to set of parameters to the confusion matrix, of the last
        `run`, where there is one.

    Raises:
      UserError: a split cannot be opened, or does not fit the model.
    """

    def __init__(
        self,
        model: Model,
        evals: Mapping[str, kinds.EvalConfig],
        data: DataConfig,
        batch_size: int,
        mesh: Mesh,
        shardings: dict | None = None,
        preprocess: Preprocess | None = None,
        class_names: Sequence[str] = (),
        *,
        finite: bool = False,
        order: Sequence[str] = opening.VALIDATIONS,
    ):
        self._model, self._data, self._mesh = model, data, mesh
        self._batch_size = batch_size
        self._shardings = shardings
        self._part, self._parts = meshes.share(mesh)
        self._steps: dict[frozenset[str], passes.Step] = {}
        self._finite = (passes.FEATURES,)
        if finite:
            self._finite = (passes.FEATURES, passes.CONFIDENCE, passes.LOSS)
        readings = Readings(data, preprocess, class_names, order)
        self._specs = dict(evals)
        self._evaluations = {
            name: spec.open(name, readings, data.classes)
            for name, spec in self._specs.items()
        }
        self.notes = readings.notes
        self.confusions: dict[str, dict[str, Confusion]] = {}

    def described(self) -> dict[str, dict]:
        """Says of each evaluation what it reads and how it is set, for JSON.

        Returns:
          Evaluation to kind, dataset, data_dir where there is one, splits in the order
          in which they are read, and every other key of its kind that is not empty.
        """
        return {
            name: _described(self._specs[name], evaluation.splits)
            for name, evaluation in self._evaluations.items()
        }

    def sources(self) -> dict[str, sources.Source]:
        """Returns the splits that are read, by evaluation and split."""
        return {
            f"{name} {reading.split}": reading.source
            for name, evaluation in self._evaluations.items()
            for reading in evaluation.splits
        }

    def due(self, step: int, every, *, total: int, epoch: float) -> list[str]:
        """Returns the evaluations whose time is a step.

        Args:
          step: steps taken.
          every: `config.every`, for evaluations without a cadence of their own.
          total: steps of the run; at its end all are due.
          epoch: steps an epoch.
        """
        due = []
        for name, spec in self._specs.items():
            steps, epochs = spec.every, spec.every_epochs
            if not steps and not epochs:
                steps, epochs = every.evaluate, every.evaluate_epochs
            intervals = steps, round(epochs * epoch)
            if step >= total or any(i and step % i == 0 for i in intervals):
                due.append(name)
        return due

    def run(
        self,
        params: dict[str, dict],
        stop: Callable[[], bool] = lambda: False,
        names: Sequence[str] | None = None,
    ) -> Scores | None:
        """Scores sets of parameters.

        Args:
          params: name of a set ("raw", "ema") to parameters.
          stop: asked before every batch and every solution; True abandons.
          names: of the evaluations; all if None.

        Returns:
          Evaluation to set to its metrics, see kinds.py, and to "skipped", the damaged
          images left out, if there are any; or None when it was abandoned.
        """
        names = list(self._evaluations if names is None else names)
        needs = {name: self._evaluations[name].needs() for name in names}
        results, held = {}, {}
        for place, name in enumerate(names):
            still = [need for later in names[place:] for need in needs[later].values()]
            for need in needs[name].values():
                if need.reading not in held:
                    held[need.reading] = self._pass(params, need.reading, still, stop)
                if held[need.reading] is None:
                    return None
            scored = self._score(name, params, needs[name], held, stop)
            if scored is None:
                return None
            results[name] = scored
            later = [n.reading for x in names[place + 1 :] for n in needs[x].values()]
            held = {reading: x for reading, x in held.items() if reading in later}
        return results

    def _pass(
        self,
        params: dict[str, dict],
        reading: Reading,
        needs: Sequence[kinds.Need],
        stop: Callable[[], bool],
    ) -> dict[str, passes.Outputs] | None:
        """Takes one pass over a split for all that is wanted of it."""
        needs = [need for need in needs if need.reading is reading]
        wants = frozenset().union(*(need.wants for need in needs))
        if wants not in self._steps:
            self._steps[wants] = passes.build(
                self._model,
                self._data,
                self._mesh,
                self._shardings,
                wants,
                allowed=kinds.ALLOWED,
            )
        rows = None
        if all(need.rows is not None for need in needs):
            rows = functools.reduce(np.union1d, (need.rows for need in needs))
        batches = reading.batches(rows, self._batch_size, self._part, self._parts)
        with batches:
            found = passes.collect(
                self._steps[wants], params, batches, self._mesh, stop
            )
        if found is None:
            return None
        passes.check_finite(found, self._finite, reading.title)
        if rows is None:
            return found
        return {
            kind: dataclasses.replace(outputs, records=rows[outputs.records])
            for kind, outputs in found.items()
        }

    def _score(self, name, params, needs, held, stop) -> dict | None:
        scores, self.confusions[name] = {}, {}
        for kind in params:
            outputs = {key: held[need.reading][kind] for key, need in needs.items()}
            found = self._evaluations[name].score(outputs, stop)
            if found is None:
                return None
            lost = sum(_lost(need, outputs[key]) for key, need in needs.items())
            scores[kind] = found.metrics | ({kinds.SKIPPED: lost} if lost else {})
            if found.confusion is not None:
                names = next(iter(needs.values())).reading.source.class_names
                self.confusions[name][kind] = Confusion(found.confusion, names)
        return scores


def _described(spec: kinds.EvalConfig, splits: Sequence[Reading]) -> dict[str, object]:
    first = splits[0]
    found = {"kind": spec.kind, "dataset": first.dataset}
    if first.data.data_dir:
        found["data_dir"] = first.data.data_dir
    found["splits"] = [reading.split for reading in splits]
    keys = fields.to_dict(spec).items()
    return found | {k: v for k, v in keys if k not in _UNTOLD and v != ""}


def _lost(need: kinds.Need, outputs: passes.Outputs) -> int:
    """Counts the damaged images that were left out."""
    rows = np.arange(len(need.reading.source)) if need.rows is None else need.rows
    return len(rows) - int(np.isin(rows, outputs.records).sum())

"""The evaluations of a config, run together in training or on a checkpoint."""

import collections
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import fields
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators import forward_passes
from vit_jax.evaluators.forward_passes import Outputs, Step, TrainedTask, Weights
from vit_jax.evaluators.local_devices import LocalDevices
from vit_jax.evaluators.protocol import SKIPPED, Confusion, Pass, Stop
from vit_jax.evaluators.splits import VALIDATIONS, EvalConfig, EvalSplits
from vit_jax.models import Model, layer_features

if TYPE_CHECKING:
    from vit_jax.data.preprocess import Preprocess
    from vit_jax.models.targets import Targets
    from vit_jax.models.text_tower import TextTower

# Metrics by evaluation and set of parameters.
Scores = dict[str, dict[str, dict[str, float]]]

PARAMS_NAME = "weights"  # The set of parameters that `evaluate` scores.
# Keys that `Suite.described` shows in another form, or that do not change the results.
_NOT_DESCRIBED = (
    *("kind", "every", "every_epochs", "name", "data_dir"),
    *("split", "train", "test"),
)


class Suite:
    """All evaluations of a config, with each split opened once.

    Evaluations of the same images share one pass over them.

    Args:
      model: network.
      evals: `config.evals`.
      data: `config.data`.
      batch_size: images per batch, over all devices.
      mesh: mesh of all devices.
      shardings: shardings of the parameters; replicated if None.
      preprocess: preprocessing of images without an `eval_transform`; if None,
        `data.eval_transform`.
      class_names: names of the model's outputs in order; empty if unknown.
      finite: whether infinite or NaN outputs of the classifier are an error; for
        features they always are. During training the loop checks the loss instead.
      order: default splits; the first that exists is read.
      trained: task of a run; its state, shardings and text tower replace those of the
        parameters.
      tower: text tower of the network.
      segment: function of the network's parameters and images that segments, see
        `tasks.task.Task`.
      targets: what the network's outputs mean if they are numbers, see
        `tasks.task.Task`.

    Attributes:
      notes: lines for the user.
      confusions: confusion matrices of the last `run`, by evaluation and set of
        parameters, for evaluations that have one.
      pictures: strips of the task's pictures, uint8 (B, Y, X, C), by evaluation and set
        of parameters.

    Raises:
      UserError: a split cannot be opened, or does not fit the model.
    """

    def __init__(
        self,
        model: Model,
        evals: Mapping[str, EvalConfig],
        data: DataConfig,
        batch_size: int,
        mesh: Mesh,
        shardings: dict | None = None,
        preprocess: "Preprocess | None" = None,
        class_names: Sequence[str] = (),
        *,
        finite: bool = False,
        order: Sequence[str] = VALIDATIONS,
        trained: TrainedTask | None = None,
        tower: "TextTower | None" = None,
        segment: Callable[[dict, jax.Array], jax.Array] | None = None,
        targets: "Targets | None" = None,
    ):
        self._trained = trained
        self._tower = trained.tower if trained else tower
        self._segment, self._devices = segment, LocalDevices(model)
        if trained and trained.segment:
            self._segment = lambda state, images: trained.segment(*state, images)
        self._model, self._data, self._mesh = model, data, mesh
        self._batch_size = batch_size
        self._shardings = shardings
        self._shard = meshes.data_shard(mesh)
        self._steps: dict[forward_passes.Wanted, Step] = {}
        self._picture_step: Step | None = None
        self._finite = finite
        splits = EvalSplits(data, preprocess, class_names, order)
        splits.targets = trained.targets if trained else targets
        self._configs = dict(evals)
        self._evaluators = {
            name: config.open(name, splits) for name, config in self._configs.items()
        }
        for name, evaluator in self._evaluators.items():
            for one in evaluator.passes:
                self._check(name, one)
            if evaluator.score_images and self._segment is None:
                raise UserError(
                    f"evals.{name} classifies pixels, for which a head is needed: "
                    "evaluate a run with task.name='segmentation'"
                )
        self.notes = splits.notes
        self.confusions: dict[str, dict[str, Confusion]] = {}
        self.pictures: dict[str, dict[str, np.ndarray]] = {}

    def _check(self, name: str, one: Pass) -> None:
        """Raises UserError if an evaluation needs outputs that do not exist."""
        if one.texts and self._tower is None:
            raise UserError(
                f"evals.{name} compares images with texts, which needs a text tower: "
                "evaluate weights of CLIP, SigLIP or LiT, or a run with "
                "task.name='contrastive'"
            )
        if one.wanted.task and self._trained is None:
            raise UserError(
                f"evals.{name} is an evaluation of a run's task, which exists during "
                f"training only: leave it out with --config.evals.{name}=None"
            )
        if one.wanted.task and not self._trained.metric_names(one.split.fields):
            raise UserError(
                f"evals.{name} is an evaluation of the task, which has no metrics on "
                "images that it is not trained on: leave it out, or use one of "
                "features, such as kind='knn'"
            )
        if one.split.makes_sequences and (
            why := "a task's metrics"
            if one.wanted.task
            else self._model.config.no_sequences
        ):
            raise UserError(
                f"evals.{name}: data.eval_transform makes images of any size, which "
                f"cannot be used for {why}: end it with resize or a crop"
            )
        for layer in one.wanted.layers:
            layer_features.check(self._model, layer)
        if one.wanted.features and not self._model.representations:
            raise UserError(
                f"evals.{name} is an evaluation of features, but the network of "
                f"model.variant={self._model.options['variant']!r} returns no "
                "'pre_logits': return them, or leave the evaluation out"
            )

    def described(self) -> dict[str, dict]:
        """Returns the data and settings of each evaluation, for JSON.

        They are kind, dataset, data_dir if there is one, the splits in the order in
        which they are read, and every other key that is not empty.
        """
        result = {}
        for name, evaluator in self._evaluators.items():
            config, first = self._configs[name], evaluator.passes[0].split
            result[name] = {"kind": config.kind, "dataset": first.dataset}
            if first.data.data_dir:
                result[name]["data_dir"] = first.data.data_dir
            result[name]["splits"] = [one.split.split for one in evaluator.passes]
            for key, value in fields.to_dict(config).items():
                if key not in _NOT_DESCRIBED and value not in ("", (), None):
                    result[name][key] = value
        return result

    def sources(self) -> dict[str, Source]:
        """Returns the sources of all splits, by evaluation and split."""
        return {
            f"{name} {one.split.split}": one.split.source
            for name, evaluator in self._evaluators.items()
            for one in evaluator.passes
        }

    def try_first(self) -> None:
        """Prepares each split's first record; UserError if it contradicts the config."""
        tries = {
            (one.split, evaluator.try_first): None
            for evaluator in self._evaluators.values()
            for one in evaluator.passes
        }
        for split, try_first in tries:
            if len(split.source):
                try_first(split)

    def run(
        self,
        params: dict[str, Weights],
        stop: Stop = lambda: False,
        names: Sequence[str] | None = None,
    ) -> Scores | None:
        """Scores sets of parameters.

        Args:
          params: sets of parameters by name ("params", "ema"); with `trained`, states of the
            task by the same names.
          stop: function that is called before every batch and every solution; returning
            True stops.
          names: names of the evaluations to run; None for all.

        Returns:
          Metrics by evaluation and set of parameters; "skipped" is the number of
          damaged images that were skipped, if any. None if stopped.
        """
        names = list(self._evaluators if names is None else names)
        waiting = collections.defaultdict(list)  # Passes not yet scored, by split.
        for name in names:
            if not self._evaluators[name].score_images:
                for one in self._evaluators[name].passes:
                    waiting[one.split].append(one)
        results, outputs = {}, {}
        for name in names:
            if self._evaluators[name].score_images:
                results[name] = self._score_images(name, params, stop)
                if results[name] is None:
                    return None
                continue
            passes = self._evaluators[name].passes
            for split in (one.split for one in passes):
                if split not in outputs:
                    outputs[split] = self._run_pass(params, waiting[split], stop)
                if outputs[split] is None:
                    return None
            results[name] = self._score(name, params, outputs, stop)
            if results[name] is None:
                return None
            for one in passes:
                if one.num_pictures:
                    self.pictures[name] = self._draw(one, params)
                waiting[one.split].remove(one)
                if not waiting[one.split]:
                    del outputs[one.split]
        return results

    def _score_images(
        self, name: str, params: dict[str, Weights], stop: Stop
    ) -> dict | None:
        """Returns the metrics of an evaluator that itself reads images of any size."""
        from vit_jax.weights.network_images import network_input

        scores, self.confusions[name] = {}, {}
        evaluator, size = self._evaluators[name], self._batch_size
        batch_size = max(1, size // jax.process_count())

        def of_pixels(weights, pixels):
            return self._segment(weights, network_input(pixels, self._data, "float32"))

        for params_name, weights in params.items():
            segment = lambda pixels, weights=weights: self._devices.run(
                name, of_pixels, weights, pixels, batch_size
            )
            scored = evaluator.score_images(segment, batch_size, stop)
            self._devices.release()
            if scored is None:
                return None
            scores[params_name] = dict(scored.metrics)
            self.confusions[name][params_name] = scored.confusion
        return scores

    def _run_pass(
        self, params: dict[str, Weights], passes: Sequence[Pass], stop: Stop
    ) -> dict[str, Outputs] | None:
        """Runs one forward pass over a split for all evaluators that need one."""
        split = passes[0].split
        wanted = functools.reduce(operator.or_, (one.wanted for one in passes))
        if wanted not in self._steps:
            self._steps[wanted] = forward_passes.make_eval_step(
                self._model,
                self._data,
                self._mesh,
                wanted,
                self._shardings,
                self._trained,
            )
        rows = None
        if all(one.rows is not None for one in passes):
            rows = functools.reduce(np.union1d, (one.rows for one in passes))
        with split.batches(rows, self._batch_size, *self._shard) as batches:
            results = forward_passes.collect_outputs(
                self._steps[wanted], params, batches, self._mesh, stop, split.title
            )
        if results is None:
            return None
        forward_passes.check_finite(results, split.title, classifier=self._finite)
        if rows is None:
            return results
        return {
            params_name: outputs.replace(records=rows[outputs.records])
            for params_name, outputs in results.items()
        }

    def _draw(self, one: Pass, trained: dict[str, tuple]) -> dict[str, np.ndarray]:
        """Returns the task's pictures of the first images of a split, side by side."""
        rows = np.arange(min(one.num_pictures, len(one.split.source)))
        if self._picture_step is None:
            self._picture_step = forward_passes.make_picture_step(
                self._trained, self._data, self._mesh
            )
        size = full_batch(len(rows), self._mesh)
        with one.split.batches(rows, size, *self._shard) as batches:
            (batch,) = batches
        batch = meshes.to_devices(
            {key: batch[key] for key in ("image", "index")}, self._mesh
        )
        strips = {}
        for params_name, state in trained.items():
            pictures = jax.device_get(self._picture_step(state, batch))
            if pictures is not None:
                strips[params_name] = np.concatenate(pictures, axis=2)[: len(rows)]
        return strips

    def _with_texts(self, outputs: Outputs, one: Pass, weights: Weights) -> Outputs:
        """Adds the embeddings of images and of the texts that they are compared with."""
        if one.texts is None:
            return outputs
        tower = self._tower
        if self._trained:
            tower = tower.with_params(weights[0])
        return outputs.replace(
            image_embeddings=tower.embed_images(outputs.features),
            text_embeddings=tower.embed(one.texts()),
        )

    def _score(self, name: str, params: dict, outputs: dict, stop: Stop) -> dict | None:
        scores, self.confusions[name] = {}, {}
        passes = self._evaluators[name].passes
        for params_name, weights in params.items():
            inputs = [outputs[one.split][params_name] for one in passes]
            inputs = [
                self._with_texts(x, one, weights) for x, one in zip(inputs, passes)
            ]
            scored = self._evaluators[name].score(inputs, stop)
            if scored is None:
                return None
            scores[params_name] = dict(scored.metrics)
            skipped = sum(map(_count_skipped, passes, inputs))
            if skipped:
                scores[params_name][SKIPPED] = skipped
            if scored.confusion is not None:
                self.confusions[name][params_name] = scored.confusion
        return scores


def _count_skipped(one: Pass, outputs: Outputs) -> int:
    """Returns the number of damaged images that were skipped."""
    if one.rows is None:
        return len(one.split.source) - len(outputs.records)
    return int((~np.isin(one.rows, outputs.records)).sum())


def full_batch(batch_size: int, mesh: Mesh) -> int:
    """Rounds a batch size up to a multiple of the mesh's devices."""
    devices = meshes.num_data_devices(mesh)
    return -(-batch_size // devices) * devices

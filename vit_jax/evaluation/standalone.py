"""Evaluating a checkpoint that is not in training."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from vit_jax.data.config import DataConfig, ReaderConfig
from vit_jax.data.sources import Source
from vit_jax.evaluation import network, opening
from vit_jax.evaluation.kinds import SKIPPED, EvalConfig
from vit_jax.evaluation.suite import Scores, Suite
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding
from vit_jax.report.confusion import Confusion
from vit_jax.weights.pretrained import Preprocess, Pretrained

KIND = "weights"  # The name of the one set of parameters.


class Evaluated(NamedTuple):
    """What the evaluations of a config gave.

    Attributes:
      scores: evaluation to {"weights": metrics}.
      confusions: evaluation to its confusion matrix, where there is one.
      evals: evaluation to what it has read and how it is set, see `Suite.described`.
    """

    scores: Scores
    confusions: dict[str, Confusion]
    evals: dict[str, dict]


def evaluate(
    pretrained: Pretrained,
    preprocess: Preprocess,
    config,
    tell: Callable[[str], None] = lambda line: None,
    check: Callable[[Mapping[str, Source]], None] = lambda sources: None,
) -> Evaluated:
    """Runs all evaluations of a config; every process of the job calls it.

    Args:
      pretrained: what `weights.open_pretrained` returns.
      preprocess: how images are prepared.
      config: an `EvaluationConfig`.
      tell: gets a line on each thing that a user may want to know.
      check: gets the splits that are read, by a name for messages, before anything is
        computed; may raise UserError.

    Raises:
      UserError: the data is not there, or does not fit the network, or what the network
        computes is not finite.
    """
    mesh = meshes.create(dataclasses.asdict(config.mesh))
    model, params = network.fit(pretrained, preprocess)
    shardings = sharding.parameters(
        jax.eval_shape(model.init, jax.random.key(0)),
        mesh,
        config.sharding.rules,
        config.sharding.smallest,
    )
    names = pretrained.class_names
    if len(names) != model.options["classes"]:
        names = ()
    suite = Suite(
        model,
        config.evals,
        _data(config.data, model.options, preprocess),
        _full_batch(config.batch_size, mesh),
        mesh,
        shardings,
        preprocess,
        names,
        finite=True,
        order=opening.TESTS,
    )
    check(suite.sources())
    for note in suite.notes:
        tell(note)
    scores = suite.run({KIND: jax.device_put(params, shardings)})
    confusions = {
        name: kinds[KIND] for name, kinds in suite.confusions.items() if kinds
    }
    return Evaluated(scores, confusions, suite.described())


def summary(evals: Mapping[str, EvalConfig], scores: Scores) -> dict[str, object]:
    """Arranges what `evaluate` gave as people ask for it, for JSON.

    Args:
      evals: `config.evals`.
      scores: of what `evaluate` returned.

    Returns:
      Evaluation to its metrics. Of few-shot evaluation: shots to mean and std, and to
      the same by each further strength ("l2") and to "short", the number of classes
      with fewer examples, where there are such. Of k-NN the accuracy alone. Where
      damaged images were left out (data.on_error="skip"), "skipped" beside them is
      evaluation to how many.
    """
    found = {
        name: _arranged(evals[name].kind, kinds[KIND]) for name, kinds in scores.items()
    }
    lost = {
        name: kinds[KIND][SKIPPED]
        for name, kinds in scores.items()
        if SKIPPED in kinds[KIND]
    }
    return found | ({SKIPPED: lost} if lost else {})


def _arranged(kind: str, metrics: dict[str, float]) -> object:
    if kind == "knn":
        return metrics["top1"]
    if kind != "fewshot":
        return metrics
    found = {}
    for name, value in metrics.items():
        match = re.fullmatch(r"(\d+)shot(?:_l2_(.+?))?(?:_(std|short))?", name)
        if not match:
            continue
        place = found.setdefault(match[1], {})
        if match[2]:
            place = place.setdefault("l2", {}).setdefault(match[2], {})
        place[match[3] or "mean"] = value
    return found


def _data(data: ReaderConfig, options: dict, preprocess: Preprocess) -> DataConfig:
    """Returns the config of the data with what the weights say of classes and images."""
    told = {
        "classes": options["classes"],
        "image_size": tuple(preprocess.image_size),
        "channels": options["channels"],
        "mean": tuple(preprocess.mean),
        "std": tuple(preprocess.std),
    }
    return DataConfig(**dataclasses.asdict(data) | told)


def _full_batch(batch_size: int, mesh: Mesh) -> int:
    """Returns the next size that the mesh divides; rows that fill it up do not count."""
    parts = math.prod(mesh.shape[axis] for axis in meshes.BATCH_AXES)
    return -(-batch_size // parts) * parts

"""Evaluates a checkpoint of any format by the evaluations of a config."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from vit_jax.data.config import DataConfig, ReaderConfig
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.evaluators.augmented import augment
from vit_jax.evaluators.protocol import SKIPPED, Confusion
from vit_jax.evaluators.splits import TESTS, EvalConfig
from vit_jax.evaluators.suite import PARAMS_NAME, Scores, Suite, full_batch
from vit_jax.models import Model, text
from vit_jax.weights import segmenter, surgery
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.text_tower import text_tower


class Evaluated(NamedTuple):
    """The results of `evaluate`.

    Attributes:
      scores: dict of evaluation names to {"weights": metrics}.
      confusions: dict of evaluation names to confusion matrices, for those that have
        one.
      evals: dict of evaluation names to their data and settings, see `Suite.described`.
    """

    scores: Scores
    confusions: dict[str, Confusion]
    evals: dict[str, dict]


def evaluate(
    pretrained: Pretrained,
    preprocess: Preprocess,
    config,
    tell: Callable[[str], None] = lambda line: None,
    check: Callable[[Mapping[str, Source]], None] = lambda _: None,
    *,
    views: str = "",
) -> Evaluated:
    """Evaluates a checkpoint; every process of the job calls it.

    The logits of a calibrated checkpoint are scaled by its temperature.

    Args:
      pretrained: result of `weights.open_pretrained`.
      preprocess: preprocessing of its images.
      config: an `EvaluationConfig`.
      tell: function that receives lines for the user.
      check: function that receives the sources of all splits, by a name for messages,
        before any computation; may raise UserError.
      views: views of each image, one of `augmented.VIEWS`; "" for the image itself.

    Raises:
      UserError: the data cannot be opened or do not fit the network, or the network's
        outputs are not finite.
    """
    mesh = meshes.create(config.mesh)
    model, params = surgery.fit_network(pretrained, preprocess)
    if pretrained.calibration:
        params = pretrained.calibration.in_params(params)
    sigmoid = None if pretrained.targets else pretrained.loss == "sigmoid"
    model, preprocess = augment(model, preprocess, views, sigmoid=sigmoid)
    axes, rules = model.config.model_axes, config.sharding.rules
    size = config.sharding.min_size
    shardings = sharding.parameters(model.shapes, mesh, axes, rules, size)
    has_tower = text.TEXT in pretrained.task_params
    tower = text_tower(pretrained) if has_tower else None
    segment = None
    if segmenter.has_segmenter(pretrained):
        segment = segmenter.segmenter_of(pretrained, model)
    named = len(pretrained.class_names) == pretrained.num_classes
    suite = Suite(
        model,
        config.evals,
        data_of(pretrained, preprocess, config.data, model),
        full_batch(config.batch_size, mesh),
        mesh,
        shardings,
        preprocess,
        pretrained.class_names if named else (),
        finite=True,
        order=TESTS,
        tower=tower,
        segment=segment,
        targets=pretrained.targets,
    )
    check(suite.sources())
    for note in suite.notes:
        tell(note)
    scores = suite.run({PARAMS_NAME: jax.device_put(params, shardings)})
    confusions = {
        name: tables[PARAMS_NAME] for name, tables in suite.confusions.items() if tables
    }
    return Evaluated(scores, confusions, suite.described())


def summary(evals: Mapping[str, EvalConfig], scores: Scores) -> dict[str, object]:
    """Returns the scores of `evaluate` for its last line of JSON.

    The scores are those of `EvalConfig.summarize`, by evaluation. If damaged images
    were skipped (data.on_error="skip"), "skipped" maps evaluations to their number.
    """
    metrics = {name: values[PARAMS_NAME] for name, values in scores.items()}
    summaries = {
        name: evals[name].summarize(values) for name, values in metrics.items()
    }
    skipped = {
        name: values[SKIPPED] for name, values in metrics.items() if SKIPPED in values
    }
    return summaries | ({SKIPPED: skipped} if skipped else {})


def data_of(
    pretrained: Pretrained, preprocess: Preprocess, data: ReaderConfig, model: Model
) -> DataConfig:
    """Returns a data config with the classes and image format of weights."""
    of_weights = {
        "num_classes": 0 if pretrained.targets else pretrained.num_classes,
        "image_size": tuple(preprocess.image_size),
        "channels": model.options["channels"],
        "exif": data.exif or bool(preprocess.exif),
        **preprocess.data_keys(),
    }
    return DataConfig(**dataclasses.asdict(data) | of_weights)

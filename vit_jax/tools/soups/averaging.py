"""Averages the parameters of networks that were fine-tuned from the same weights.

Source: Wortsman et al., "Model soups" (arXiv:2203.05482). The greedy soup goes through
the networks from the best to the worst, and keeps one if the average with it is not
worse.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from vit_jax.config import fields, loading
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint
from vit_jax.training.config import EvaluationConfig, complete
from vit_jax.weights import checkpoint_folders
from vit_jax.weights.preprocessing import preprocessing_of
from vit_jax.weights.pretrained import Pretrained

_METRICS = ("top1", "map", "r2")  # The first one that an evaluation has is used.


@dataclasses.dataclass(frozen=True)
class Soup:
    """An average of networks.

    Attributes:
      average: the averaged network.
      taken: sources of the networks in the average.
      scores: scores by source, best first, then that of "average"; empty for a plain
        average.
      metric: name of the metric of the scores.
    """

    average: Pretrained
    taken: tuple[str, ...]
    scores: Mapping[str, float]
    metric: str


def mean(models: Sequence[Pretrained]) -> Pretrained:
    """Returns the plain average of networks.

    Args:
      models: networks with the same options, classes or targets, and preprocessing.

    Raises:
      UserError: the networks differ in these.
    """
    models = [_without_margins(each) for each in models]
    first = models[0]
    for other in models[1:]:
        for what in ("options", "class_names", "preprocess", "targets"):
            one, another = getattr(first, what), getattr(other, what)
            if one != another:
                raise UserError(
                    f"{other.source} differs from {first.source} in "
                    f"{_what(one, another, what)}: average networks with equal configs"
                )
    # Summed in 64 bits, so that the order of the networks does not matter.
    params = jax.tree.map(
        lambda *leaves: (
            sum(np.asarray(leaf, np.float64) for leaf in leaves) / len(leaves)
        ).astype(leaves[0].dtype),
        *(model.params for model in models),
    )
    return dataclasses.replace(first, params=params, notes=(), calibration=None)


def _without_margins(model: Pretrained) -> Pretrained:
    """Returns weights without the intervals of their numbers, which averages lack."""
    if model.targets is None:
        return model
    targets = dataclasses.replace(model.targets, margins=())
    return dataclasses.replace(model, targets=targets)


def greedy(
    models: Sequence[Pretrained], score: Callable[[Pretrained], float]
) -> tuple[list[int], list[float], float]:
    """Chooses networks to average; a higher score is better.

    Returns:
      Indices of the chosen networks, best first; the score of each network; and the
      score of the average.
    """
    scores = [score(model) for model in models]
    order = sorted(range(len(models)), key=lambda i: -scores[i])
    chosen, best = [order[0]], scores[order[0]]
    for i in order[1:]:
        tried = score(mean([models[j] for j in (*chosen, i)]))
        if tried >= best:
            chosen, best = [*chosen, i], tried
    return chosen, scores, best


def average(
    models: Sequence[Pretrained],
    by: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Soup:
    """Averages all networks, or those that do not make the average worse.

    Args:
      models: runs of this project, fine-tuned from the same weights.
      by: evaluation of the first run whose images choose the networks; "" uses all.
      say: function called with a line about each evaluation.

    Raises:
      UserError: the networks differ, or the first run does not have the evaluation.
    """
    whole = mean(models)  # Rejects networks that differ before anything is evaluated.
    if not by:
        return Soup(whole, tuple(model.source for model in models), {}, "")
    config = evaluation_of(models[0].source, by)
    metric = ""

    def score(model: Pretrained) -> float:
        nonlocal metric
        preprocess = preprocessing_of(model)
        scores = checkpoint.evaluate(model, preprocess, config).scores[by]
        (metrics,) = scores.values()
        metric = next((name for name in _METRICS if name in metrics), "")
        if not metric:
            raise UserError(
                f"--by={by}: that evaluation has {', '.join(metrics)}, but none of "
                f"{', '.join(_METRICS)}: give another one"
            )
        say(f"{by} {metric} {metrics[metric]:.2%}")
        return metrics[metric]

    chosen, scores, best = greedy(models, score)
    order = sorted(range(len(models)), key=lambda i: -scores[i])
    named = {models[i].source: scores[i] for i in order} | {"average": best}
    taken = [models[i] for i in chosen]
    return Soup(mean(taken), tuple(model.source for model in taken), named, metric)


def evaluation_of(workdir: str, name: str) -> EvaluationConfig:
    """Returns the config of one evaluation of a run.

    Raises:
      UserError: the folder holds no run, or the run does not have the evaluation.
    """
    config = complete(checkpoint_folders.read_metadata(workdir)["config"])
    if name not in config.evals:
        known = ", ".join(config.evals) or "none"
        raise UserError(
            f"--by={name}: {workdir} has no such evaluation; it has {known}"
        )
    raw = fields.to_dict(config)
    kept = {key: raw[key] for key in fields.fields(EvaluationConfig)}
    kept["evals"] = {name: raw["evals"][name]}
    reader = fields.fields(EvaluationConfig)["data"].cls
    kept["data"] = {key: raw["data"][key] for key in fields.fields(reader)}
    return loading.complete(EvaluationConfig, kept)


def _what(one: object, other: object, name: str) -> str:
    """Returns the part in which two descriptions differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other}, key=str)
        key = next(k for k in keys if one.get(k) != other.get(k))
        return f"{name}.{key} ({other.get(key)!r}, not {one.get(key)!r})"
    return name

"""Evaluations of features, repeated for each layer of a network, and their figure."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.analysis import charts
from vit_jax.analysis.figures.figure import Picture
from vit_jax.errors import UserError
from vit_jax.evaluators.metric_names import is_fraction
from vit_jax.evaluators.protocol import FeaturesConfig
from vit_jax.evaluators.splits import EvalConfig
from vit_jax.evaluators.suite import PARAMS_NAME, Scores
from vit_jax.models import Model, layer_features

_MAX_TICKS = 25


def expand(
    evals: Mapping[str, EvalConfig], model: Model, layers: Sequence[int]
) -> tuple[dict[str, EvalConfig], dict[str, dict[int, str]]]:
    """Repeats evaluations of features for layers; all layers share one forward pass.

    Args:
      evals: `config.evals`.
      model: the network.
      layers: layer indices, see `Model.layer_features`; empty for all.

    Returns:
      The evaluations, with "knn" replaced by "knn_layer0" and so on; and for each
      replaced evaluation, the new names by layer.

    Raises:
      UserError: a layer does not exist, or the config has no evaluation of features.
    """
    layers = layers or range(model.num_layers)
    chosen = sorted(layer_features.check_all(model, layers))
    expanded, names = {}, {}
    for name, one in evals.items():
        if not isinstance(one, FeaturesConfig):
            expanded[name] = one
            continue
        names[name] = {layer: f"{name}_layer{layer}" for layer in chosen}
        for layer, of_layer in names[name].items():
            expanded[of_layer] = dataclasses.replace(one, layers=(layer,))
    if not names:
        raise UserError(
            "--layers: the config has no evaluation of features, such as kind='knn' or "
            "'probe': add one, or use configs/eval/layers.py"
        )
    return expanded, names


def check_drawing() -> None:
    """Raises UserError if figures cannot be drawn, before hours of evaluation."""
    charts.draw(charts.Chart("", "", "", "", ()))


def draw(title: str, names: Mapping[str, Mapping[int, str]], scores: Scores) -> Picture:
    """Draws accuracies by layer.

    Args:
      title: text above the chart.
      names: second result of `expand`.
      scores: scores of `checkpoint.evaluate`.
    """
    layers, series = tuple(next(iter(names.values()))), []
    data = {"layers": np.array(layers)}
    for name, by_layer in names.items():
        metrics = [scores[of_layer][PARAMS_NAME] for of_layer in by_layer.values()]
        for metric in metrics[0]:
            beside = metric.startswith("held_out") or metric.endswith("_std")
            if beside or not is_fraction(metric):
                continue
            label, look = f"{name} {metric}", len(series)
            values = [100 * of_layer[metric] for of_layer in metrics]
            data[label] = np.array(values)
            series.append(charts.Series(label, layers, tuple(values), look, look))
    ticks = layers[:: 1 + len(layers) // _MAX_TICKS]
    axes = "layer", "accuracy (%)"
    chart = charts.Chart("layers", title, *axes, tuple(series), ticks=ticks)
    return Picture(charts.draw(chart), data)

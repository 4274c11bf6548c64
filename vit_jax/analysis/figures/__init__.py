"""Figures of a model: each is a file here, named by --figure of `vit_jax.visualize`."""

import dataclasses
from collections.abc import Iterable, Mapping

from vit_jax.analysis.figures.figure import Figure
from vit_jax.config.fields import Registry

# Figures are listed and drawn in this order.
FIGURES = Registry(
    {
        "filters": "vit_jax.analysis.figures.filters:Filters",
        "posemb": "vit_jax.analysis.figures.posemb:Posemb",
        "distance": "vit_jax.analysis.figures.distance:Distance",
        "norms": "vit_jax.analysis.figures.norms:Norms",
        "cka": "vit_jax.analysis.figures.cka:CKA",
        "attention": "vit_jax.analysis.figures.attention:Attention",
        "rollout": "vit_jax.analysis.figures.rollout:Rollout",
        "relevance": "vit_jax.analysis.figures.relevance:Relevance",
        "windows": "vit_jax.analysis.figures.windows:Windows",
        "pca": "vit_jax.analysis.figures.pca:PCA",
        "reconstruction": "vit_jax.analysis.figures.reconstruction:Reconstruction",
    }
)


def options() -> dict[str, dataclasses.Field]:
    """Returns the options of all figures by name; figures may share one."""
    kinds = [FIGURES[name] for name in FIGURES]
    return {field.name: field for kind in kinds for field in dataclasses.fields(kind)}


def create(names: Iterable[str], values: Mapping[str, object]) -> dict[str, Figure]:
    """Returns figures by name, in the order of FIGURES.

    Args:
      names: keys of FIGURES.
      values: options by name, of these and other figures; missing ones have defaults.
    """
    return {
        name: FIGURES[name](
            **{
                field.name: values[field.name]
                for field in dataclasses.fields(FIGURES[name])
                if field.name in values
            }
        )
        for name in FIGURES
        if name in names
    }

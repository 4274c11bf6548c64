"""Evaluators; an import line here registers one.

Messages and the config reference list them in this order.
"""

# isort: off
from vit_jax.evaluators import classification
from vit_jax.evaluators import multi_label
from vit_jax.evaluators import label_sets
from vit_jax.evaluators import fewshot
from vit_jax.evaluators import knn
from vit_jax.evaluators import probe
from vit_jax.evaluators import zero_shot
from vit_jax.evaluators import retrieval
from vit_jax.evaluators import task_metrics
# isort: on

__all__ = [
    "classification",
    "fewshot",
    "knn",
    "label_sets",
    "multi_label",
    "probe",
    "retrieval",
    "task_metrics",
    "zero_shot",
]

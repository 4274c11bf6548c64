"""What is learnt: each task is a file here, named by `config.task.name`."""

from vit_jax.tasks.classification import ClassificationConfig
from vit_jax.tasks.distillation import DistillationConfig

TASKS = {
    "classification": ClassificationConfig,
    "distillation": DistillationConfig,
}

"""Experiment trackers: each is a module here, and `config.tracker` names one."""

from vit_jax.config.fields import Registry

TRACKERS = Registry(
    {
        "none": "vit_jax.training.trackers.tracker:TrackerConfig",
        "wandb": "vit_jax.training.trackers.wandb:WandbConfig",
        "mlflow": "vit_jax.training.trackers.mlflow:MlflowConfig",
    }
)

"""Where a run's metrics go too: each tracker is a file here, named by `config.tracker`."""

from vit_jax.config.fields import Registry

TRACKERS = Registry(
    {
        "none": "vit_jax.training.trackers.tracker:TrackerConfig",
        "wandb": "vit_jax.training.trackers.wandb:WandbConfig",
        "mlflow": "vit_jax.training.trackers.mlflow:MlflowConfig",
    }
)

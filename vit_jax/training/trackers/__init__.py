"""Where a run's metrics go too: each tracker is a file here, named by `config.tracker`."""

from vit_jax.training.trackers.mlflow import MlflowConfig
from vit_jax.training.trackers.tracker import TrackerConfig
from vit_jax.training.trackers.wandb import WandbConfig

TRACKERS = {"none": TrackerConfig, "wandb": WandbConfig, "mlflow": MlflowConfig}

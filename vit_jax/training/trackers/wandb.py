"""The tracker Weights & Biases (docs.wandb.ai), which needs the extra `wandb`."""

import dataclasses
import pathlib
from collections.abc import Mapping

from vit_jax.config import fields
from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.training import run_report
from vit_jax.training.callbacks import Callback, Run
from vit_jax.training.trackers import tracker
from vit_jax.training.trackers.tracker import TrackerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases; environment variables such as WANDB_API_KEY apply too."""

    name: str = key(
        "wandb",
        'Tracker that metrics are sent to in addition to the workdir: "none", "wandb", '
        '"mlflow" or "my_module:MyConfig".',
        reason="Weights & Biases",
    )
    project: str = key("vit_jax", "W&B project of the run.", reason="Weights & Biases")
    entity: str = key(
        "",
        'User or team that owns the run in W&B; "" is the default of the account.',
        reason="Weights & Biases",
    )
    mode: str = key(
        "",
        'Mode of W&B: "offline" keeps all records in the workdir, for `wandb sync`; '
        '"" uses the environment variable WANDB_MODE.',
        reason="clusters without access to the internet",
        choices=("", "online", "offline", "disabled"),
    )

    def callback(self) -> Callback:
        return Wandb(self)


class Wandb(Callback):
    """Sends metrics, scores and the report to W&B.

    A resumed run continues under the same id. Steps that are taken again are logged
    again; all charts have `step` as their axis.

    Raises:
      UserError: the extra is not installed.
    """

    def __init__(self, config: WandbConfig):
        self._config = config
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"tracker='wandb' needs the package wandb ({error}): "
                "pip install -e '.[wandb]' in the clone"
            ) from error
        self._wandb, self._run = wandb, None

    def begin(self, run: Run) -> None:
        config, known = self._config, tracker.remembered(run.workdir, "wandb")
        try:
            self._run = self._wandb.init(
                project=config.project,
                entity=config.entity or None,
                mode=config.mode or None,
                id=known or None,
                resume="allow" if known else None,
                reinit="finish_previous",
                name=pathlib.PurePath(run.workdir).name,
                dir=run.workdir,
                config=fields.to_json(run.config)
                | {"num_parameters": run.num_parameters},
            )
        except self._wandb.errors.Error as error:
            raise UserError(
                f"tracker='wandb': {error}: run `wandb login`, or set "
                "--config.tracker.mode=offline"
            ) from error
        self._run.define_metric("*", step_metric="step")
        tracker.remember(run.workdir, "wandb", self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def evaluate(self, step: int, scores: Mapping[str, float]) -> None:
        self._run.log({**scores, "step": step})

    def end(self, report: Mapping) -> None:
        self._run.summary.update(
            {
                "params_sha256": report["params_sha256"],
                "wall_seconds": report["wall_seconds"],
                **run_report.flatten_scores(report["final"]),
            }
        )
        self._run.finish()

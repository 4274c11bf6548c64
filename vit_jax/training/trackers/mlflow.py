"""The tracker MLflow (mlflow.org), which needs the extra `mlflow`."""

import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Mapping

from vit_jax.command_line.printing import print_error
from vit_jax.config import fields
from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.training.callbacks import Callback, Run
from vit_jax.training.trackers import tracker
from vit_jax.training.trackers.tracker import TrackerConfig

_MAX_PARAMS = 100  # Maximum number of parameters per request.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlflowConfig(TrackerConfig):
    """MLflow; environment variables such as MLFLOW_TRACKING_TOKEN apply too."""

    name: str = key(
        "mlflow",
        'Tracker that metrics are sent to in addition to the workdir: "none", "wandb", '
        '"mlflow" or "my_module:MyConfig".',
        reason="MLflow",
    )
    uri: str = key(
        "",
        'Address of the MLflow server, or file:FOLDER; "" uses the environment '
        "variable MLFLOW_TRACKING_URI.",
        reason="MLflow",
    )
    experiment: str = key(
        "vit_jax",
        "MLflow experiment of the run; it is created if it does not exist.",
        reason="MLflow",
    )

    def callback(self) -> Callback:
        return Mlflow(self)


class Mlflow(Callback):
    """Sends the config, metrics, scores and the report to MLflow.

    A resumed run continues under the same id. If the server cannot be reached, training
    continues, and missing metrics are sent with the next ones.

    Raises:
      UserError: the extra is not installed, or MLflow does not support the URI.
    """

    def __init__(self, config: MlflowConfig):
        try:
            from mlflow import exceptions, tracking
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise UserError(
                f"tracker='mlflow' needs the package mlflow-skinny ({error}): "
                "pip install -e '.[mlflow]' in the clone"
            ) from error
        self._config, self._metric, self._param = config, Metric, Param
        self._error = exceptions.MlflowException
        try:
            self._client = tracking.MlflowClient(config.uri or None)
        except (self._error, OSError) as error:
            raise self._refusal(error) from error
        self._id, self._workdir, self._unsent = "", "", []

    def _refusal(self, error: Exception) -> UserError:
        reason = re.split(r"\n|\. ", str(error).strip())[0]
        return UserError(
            f"tracker='mlflow', tracker.uri={self._config.uri!r}: {reason}: set "
            "tracker.uri or MLFLOW_TRACKING_URI to a server, or to file:FOLDER with "
            "MLFLOW_ALLOW_FILE_STORE=true in the environment"
        )

    def begin(self, run: Run) -> None:
        self._workdir = run.workdir
        self._id = tracker.remembered(run.workdir, "mlflow")
        try:
            if self._id:
                self._client.update_run(self._id, status="RUNNING")
                return
            name, client = self._config.experiment, self._client
            known = client.get_experiment_by_name(name)
            experiment = (
                known.experiment_id if known else client.create_experiment(name)
            )
            run_name = pathlib.PurePath(run.workdir).name
            self._id = client.create_run(experiment, run_name=run_name).info.run_id
            flat = fields.flatten(run.config) | {"num_parameters": run.num_parameters}
            params = [self._param(k, str(v)) for k, v in flat.items()]
            for i in range(0, len(params), _MAX_PARAMS):
                client.log_batch(self._id, params=params[i : i + _MAX_PARAMS])
        except (self._error, OSError) as error:
            raise self._refusal(error) from error
        tracker.remember(run.workdir, "mlflow", self._id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._unsent += [self._metric(k, v, now, step) for k, v in metrics.items()]
        try:
            self._client.log_batch(self._id, metrics=self._unsent[:1000])
            self._unsent = self._unsent[1000:]
        except Exception as error:  # noqa: BLE001 (stores raise bare Exceptions)
            print_error(
                f"error: MLflow: {error}; training continues, and missing metrics are sent "
                "with the next metrics"
            )

    def evaluate(self, step: int, scores: Mapping[str, float]) -> None:
        self.log(step, scores)

    def end(self, report: Mapping) -> None:
        try:
            self._client.log_artifact(
                self._id, os.path.join(self._workdir, "report.json")
            )
            self._client.set_terminated(self._id)
        except (self._error, OSError) as error:
            print_error(f"error: MLflow: {error}; the report is in {self._workdir}")

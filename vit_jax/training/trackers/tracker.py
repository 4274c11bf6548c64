"""Base of all trackers: config section, metric writers, ids of runs."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from etils import epath

from vit_jax.command_line.files import replace_text
from vit_jax.config.fields import key
from vit_jax.training.callbacks import Callback

_FILE = "tracker.json"
Arrays = Mapping[str, np.ndarray | jax.Array]


@runtime_checkable
class MetricWriter(Protocol):
    """The methods of `clu.metric_writers.MetricWriter`, whose module imports TensorFlow.

    Any object with these methods is a metric writer. A class that derives from this one
    needs to define only some of them, since the methods here do nothing. A run calls
    `write_hparams`, `write_texts`, `write_scalars`, `write_images`, `flush` and
    `close`.
    """

    def write_summaries(
        self, step: int, values: Arrays, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Writes tensors for plug-ins of TensorBoard."""

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes numbers with names like "train/loss", after `step` steps."""

    def write_images(self, step: int, images: Arrays) -> None:
        """Writes images, uint8 (N, Y, X, C) or (Y, X, C), of 1 or 3 channels."""

    def write_videos(self, step: int, videos: Arrays) -> None:
        """Writes videos, (N, T, Y, X, C)."""

    def write_audios(self, step: int, audios: Arrays, *, sample_rate: int) -> None:
        """Writes sounds, (N, T, C) in [-1, 1], with `sample_rate` in Hz."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts."""

    def write_histograms(
        self, step: int, arrays: Arrays, num_buckets: Mapping[str, int] | None = None
    ) -> None:
        """Writes histograms of arrays."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes the config, a dict by dotted keys; called once."""

    def flush(self) -> None:
        """Writes buffered data."""

    def close(self) -> None:
        """Writes buffered data and closes the writer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """No tracker; the base class of every config section `tracker`."""

    name: str = key(
        "none",
        'Tracker that metrics are sent to in addition to the workdir: "none", "wandb", '
        '"mlflow" or "my_module:MyConfig".',
        reason="Weights & Biases, MLflow and trackers in your code",
    )

    def callback(self) -> Callback:
        """Returns the callback of the tracker, which a run calls."""
        return Callback()

    def writers(self, workdir: str) -> Sequence[MetricWriter]:
        """Returns writers for metrics, images and texts of the run in a workdir."""
        return ()


def remembered(workdir: str | os.PathLike, tracker: str) -> str:
    """Returns a tracker's id of the run in a workdir; "" if it has not been written."""
    path = epath.Path(workdir) / _FILE
    return json.loads(path.read_text()).get(tracker, "") if path.exists() else ""


def remember(workdir: str | os.PathLike, tracker: str, identity: str) -> None:
    """Stores a tracker's id of the run in a workdir, for its next start."""
    replace_text(epath.Path(workdir) / _FILE, json.dumps({tracker: identity}) + "\n")

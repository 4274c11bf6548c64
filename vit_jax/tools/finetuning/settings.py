"""Trains with settings that a command chooses once for a user's images.

The chosen config is written to the workdir. The same command finds it there, and
resumes with it, also after the workdir or the images have been moved.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from etils import epath

from vit_jax.command_line.files import read_json, replace_text
from vit_jax.config import fields, loading
from vit_jax.data import fingerprint
from vit_jax.data.config import PLACE
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import runs
from vit_jax.training import loop
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import TrainConfig, complete
from vit_jax.training.timers import StartupTimer
from vit_jax.weights import checkpoint_folders

# Keys of `config.data` that describe how the images are arranged.
LAYOUT_KEYS = (*PLACE, "label_key", "multi_label", "label_separator", "group_key")
LAYOUT_KEYS += ("mask_key", "ignore_label", "reduce_zero_label", "mask_values")
LAYOUT_KEYS += ("target_key",)


class Found(Protocol):
    """Splits of a user's images; `data` has the keys of `config.data` about them."""

    @property
    def data(self) -> dict: ...


class Job(Protocol):
    """A command that chooses settings.

    Attributes:
      file: name of the file in the workdir that has the chosen config.
      place: the images, as the user gave them.
      overrides: values by dotted config key, which replace the chosen ones.
      say: function that receives lines for the user.
    """

    @property
    def file(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def overrides(self) -> Mapping[str, object]: ...
    @property
    def say(self) -> Callable[[str], None]: ...

    def command(self, images: str) -> dict:
        """Returns everything that determines the results, as a JSON value."""

    def find(self, workdir: str) -> Found:
        """Returns the splits of the images; may write their list to the workdir."""

    def moved(self, raw: Mapping, workdir: str) -> dict:
        """Returns a stored config that reads the lists in a workdir that was moved."""


Chosen = tuple[dict, dict[str, tuple[str, str]]]
# From a job and its workdir to the complete config as a dict, and choices and reasons
# by key.
Choose = Callable[[Any, str], Chosen]


def divided(overrides: Mapping[str, object]) -> tuple[dict, dict]:
    """Divides overrides by whether they are about the arrangement of images.

    Returns:
      Those that are, without the prefix "data.", and all others.
    """
    keys = {f"data.{name}": name for name in LAYOUT_KEYS}
    arranged = {keys[k]: value for k, value in overrides.items() if k in keys}
    return arranged, {k: value for k, value in overrides.items() if k not in keys}


def absolute_place(place: str) -> str:
    """Returns the absolute path of a file or folder; a name of a data set unchanged."""
    path = os.path.abspath(os.path.expanduser(place))
    return path if os.path.exists(path) else place


def train(
    job: Job, choose: Choose, workdir: str, callbacks: Iterable[Callback] = ()
) -> tuple[TrainConfig, dict]:
    """Trains with settings that `choose` gives, or that an earlier start chose.

    Returns:
      The config and the report of the run.

    Raises:
      UserError: the workdir holds another run, or an error of `choose` or `loop.train`.
    """
    path, say, overrides = epath.Path(workdir) / job.file, job.say, job.overrides
    raw, images = _begun(job, workdir)
    free = _free(raw) if raw else set()
    begun = raw is not None
    runs.check_command(workdir, job.command(images), begun=begun, free=free)
    if raw:
        say(f"resuming with the settings chosen before: {path}")
        again = {key: overrides[key] for key in free & overrides.keys()}
        loading.override(TrainConfig, raw, again)
    else:
        raw, choices = choose(job, workdir)
        width = max(map(len, choices))
        for key, (what, why) in choices.items():
            say(f"{key:<{width}}  {what}" + f" ({why})" * bool(why))
        replace_text(path, json.dumps(raw, indent=2) + "\n")
    config = loop.resolved(complete(raw))  # Pages of results need numbers too.
    timer = StartupTimer(say=say)
    return config, loop.train(config, workdir, timer, callbacks=callbacks)


def _free(raw: Mapping) -> set[str]:
    """Returns the keys of an earlier start's config that do not change results."""
    keys = fields.walk(complete(raw))
    free = {".".join(path) for path, about, _ in keys if not about.changes_result}
    return free - {f"data.{name}" for name in LAYOUT_KEYS}


def _begun(job: Job, workdir: str) -> tuple[dict | None, str]:
    """Returns the config of an earlier start that took a step, or None, and its images.

    The workdir and the images may have been moved: the config gets the paths of this
    start, and images are compared by content.
    """
    path, place = epath.Path(workdir) / job.file, job.place
    if not path.exists():
        return None, place
    raw, images = read_json(path), runs.recorded(workdir).get("images", place)
    loading.drop_former_keys(raw)
    if not runs.has_begun(workdir):
        return None, place
    data = raw["data"]
    if images == place:
        return job.moved(raw, workdir), images
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(UserError):
        moved = complete(raw | {"data": data | job.find(scratch).data}).data
        source = open_source(moved, moved.split)
        stored = checkpoint_folders.read_metadata(workdir)["data"]
        if not fingerprint.differences(stored, source):
            found = raw | {"data": data | job.find(workdir).data}
            return job.moved(found, workdir), images
    return raw, place

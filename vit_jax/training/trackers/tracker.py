"""What all trackers share: their section of the config, and how a run is found again."""

import dataclasses
import json
import os

from etils import epath

from vit_jax.config.fields import key
from vit_jax.files import replace_text
from vit_jax.training.callbacks import Callback

_FILE = "tracker.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """No tracker, and what `config.tracker` states of each."""

    name: str = key("none", "Where metrics go beside the workdir.")

    def callback(self) -> Callback:
        """Returns what sends metrics there."""
        return Callback()


def remembered(workdir: str | os.PathLike, tracker: str) -> str:
    """Returns the id under which a tracker knows the run of a workdir; "" if it does not."""
    path = epath.Path(workdir) / _FILE
    return json.loads(path.read_text()).get(tracker, "") if path.exists() else ""


def remember(workdir: str | os.PathLike, tracker: str, identity: str) -> None:
    """Writes down the id of a run, for its next start."""
    replace_text(epath.Path(workdir) / _FILE, json.dumps({tracker: identity}) + "\n")

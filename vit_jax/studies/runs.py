"""Training runs of a study, each in a folder of its own and none done twice."""

import json
import os

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as configuration
from vit_jax.errors import Diverged, UserError
from vit_jax.parallel import distributed
from vit_jax.report import result
from vit_jax.report.writer import replace_text
from vit_jax.studies import disk
from vit_jax.training import loop, same_run
from vit_jax.training.shared import Shared
from vit_jax.weights import workdir as layout

_COMMAND = "command.json"
_DIVERGED = "diverged.json"


def train(
    config: ConfigDict, folder: str | os.PathLike, shared: Shared, *, keep: bool
) -> dict:
    """Trains in a folder, or goes on, or returns what came out before.

    Args:
      config: complete config.
      folder: of the run.
      shared: of the study.
      keep: the last checkpoint stays when the run is done.

    Returns:
      The run's report; {"diverged": one line} if its numbers became infinite.

    Raises:
      UserError, Preempted: as `loop.train`; or the folder cannot be written.
    """
    done = _outcome(folder)
    if not done:
        try:
            done = loop.train(config, folder, shared=shared)
        except Diverged as error:
            done, path = {"diverged": str(error)}, epath.Path(folder) / _DIVERGED
            with disk.writing(path, "only this run"):
                _write(path, done)
    if not keep and jax.process_index() == 0:
        checkpoints = layout.absolute(folder) / layout.FOLDER
        with disk.writing(checkpoints):
            checkpoints.rmtree(missing_ok=True)
    return done


def check_command(workdir: str | os.PathLike, command: dict) -> None:
    """Notes the command of a study, or refuses another one in the same workdir.

    Args:
      workdir: of the study.
      command: all that decides what comes out, for JSON; flags by their names.

    Raises:
      UserError: with what differs.
    """
    path = epath.Path(workdir) / _COMMAND
    if path.exists():
        changed = configuration.differences(json.loads(path.read_text()), command)
        if changed:
            moved = ""
            if any(line.startswith("--data_dir:") for line in changed):
                moved = f"; if the same data was moved, state its new place in {path}"
            raise UserError(
                f"{workdir} holds a study by another command "
                f"({'; '.join(changed[:4])}): choose another --workdir, or repeat that "
                f"command{moved}"
            )
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, command)
    except OSError as error:
        raise UserError(
            f"--workdir={workdir} cannot be written ({error.strerror or error}): choose "
            "another --workdir"
        ) from error


def decisive(config: ConfigDict) -> dict[str, str]:
    """Returns the keys of a config that decide what its run gives, and their values."""
    lines = (line.split(": absent -> ", 1) for line in same_run.decisive(config))
    return dict(lines)


def scores(report: dict, evaluation: str) -> dict[str, float]:
    """Returns what a run scored, its averaged parameters if it has them."""
    return result.quoted_scores(report["final"][evaluation])[1]


def write_json(workdir: str | os.PathLike, name: str, content: dict) -> None:
    """Writes a result of a study, in the first process.

    Raises:
      UserError: the workdir is gone, full or read-only.
    """
    path = epath.Path(workdir) / name
    with disk.writing(path):
        _write(path, content)


def _outcome(folder: str | os.PathLike) -> dict | None:
    """Returns what an earlier start brought to its end, the same in all processes."""
    diverged = epath.Path(folder) / _DIVERGED
    found = result.read(folder)
    if not found and diverged.exists():
        found = json.loads(diverged.read_text())
    seen = distributed.gather(found=bool(found))["found"]
    if seen.any() != seen.all():
        raise UserError(
            f"{folder} is not the same on all hosts: --workdir must be a folder that "
            "they share"
        )
    return found


def _write(path: epath.Path, content: dict) -> None:
    if jax.process_index() == 0:
        replace_text(path, json.dumps(content, indent=2) + "\n")

"""The state that a start begins with: where the last one ended, given weights, or new."""

import jax

from vit_jax.parallel import agreement
from vit_jax.report import result
from vit_jax.training.checkpoint import Checkpointer
from vit_jax.training.config import TrainConfig
from vit_jax.training.nearby import Nearby
from vit_jax.training.program import Program
from vit_jax.training.resuming import Restored
from vit_jax.weights.load import load_initial


def begin(
    config: TrainConfig, program: Program, checkpoints: Checkpointer, near: Nearby
) -> Restored:
    """Restores or creates the state, each part on the devices that hold it.

    Args:
      config: complete config; its `init` names weights for a run that begins.
      program: of the run.
      checkpoints: in the workdir.
      near: on the hosts' own disks; the newer of the two is taken.

    Returns:
      The state, at step 0 for a run that begins.

    Raises:
      UserError: no checkpoint is intact, what is stored is of other data, or `init`
        cannot be read, does not fit, or is not the same on all hosts.
    """
    latest, notes = checkpoints.latest or 0, []
    found = near.restore(newer_than=latest)
    if found.state is None and latest:
        notes = checkpoints.verify()
        if checkpoints.latest < latest:  # What is near may be newer now.
            found = near.restore(newer_than=checkpoints.latest)
        if found.state is None:
            notes += found.notes
            found = checkpoints.restore(program.disk_shapes, program.disk_shardings)
            found = found._replace(state=program.from_disk(found.state))
    elif found.state is None and config.init:
        params, notes = load_initial(config, program.model, program.init)
        _check_weights(params)
        found = found._replace(state=program.start_from(params))
    elif found.state is None:
        _check_weights({})
        found = found._replace(state=program.start())
    return found._replace(notes=[*notes, *found.notes])


def _check_weights(params: dict) -> None:
    if jax.process_count() > 1:
        agreement.check(weights={"sha256": result.params_sha256(params)})

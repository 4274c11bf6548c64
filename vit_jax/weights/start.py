"""`config.init`: the parameters that a run starts from."""

from collections.abc import Callable

from ml_collections import ConfigDict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.weights import loading
from vit_jax.weights.pretrained import Preprocess


def load(
    config: ConfigDict, model: models.Model, init: Callable[[], dict]
) -> tuple[dict, list[str]]:
    """Loads a checkpoint of any kind and fits it to a run's model.

    Args:
      config: complete config; `init`, its companions, `data.mean` and `data.std` are
        read, and `model.head_bias`.
      model: of the run.
      init: gives the run's initial parameters, for those that may be missing.

    Returns:
      The parameters as they are on disk, blocks one by one, and a line for each thing
      that was loaded or changed.

    Raises:
      UserError: nothing to load there, or it does not fit the model.
    """
    try:
        loaded = loading.load(
            config.init,
            model,
            head=config.init_head,
            head_bias=config.model.head_bias,
            init_allow=config.init_allow,
            posemb_resize=config.init_posemb,
            average=config.init_average,
            init=init,
        )
    except UserError as error:
        told = config.init in str(error)
        key = "config.init" if told else f"config.init={config.init!r}"
        raise UserError(f"{key}: {error}") from error
    found = loaded.pretrained
    lines = loaded.table()
    if found.format == "workdir":  # Its first note says what of it was taken.
        lines[:2] = [f"{found.notes[0]} from {found.source}"]
    lines[0] = f"start: {lines[0]}"
    return stacking.unstack(loaded.params), lines + _normalisation(
        found.preprocess, config.data
    )


def _normalisation(preprocess: Preprocess | None, data: ConfigDict) -> list[str]:
    """Returns a line for each of mean and std in which the run differs."""
    lines = []
    for name in ("mean", "std") if preprocess else ():
        old, new = getattr(preprocess, name), getattr(data, name)
        # One number is for all channels.
        if set(old) != set(new) if 1 in (len(old), len(new)) else old != tuple(new):
            lines.append(f"differs: {name} {old} in the checkpoint, data.{name}={new}")
    return lines

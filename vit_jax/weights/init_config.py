"""The section `init` of a config; initial.py loads the weights that it names."""

import dataclasses

from vit_jax.config.fields import key
from vit_jax.models import resizing


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Weights that a run starts from, and how to fit them to its model."""

    checkpoint: str = key(
        "",
        'Workdir, weights or their address; "": none.',
        changes_result=False,
        of_host=True,
    )
    use_ema: bool = key(
        True,
        "Take averaged parameters if a workdir or a training checkpoint has them.",
    )
    head: str = key(
        "new",
        '"new": a classifier as `model.init` says, by default of zeros, "keep" (its '
        'classes in the order of the data\'s, by their names), or "drop".',
        choices=("new", "keep", "drop"),
    )
    posemb_resize: str = key(
        "",
        'Resizing of position embeddings, as `model.posemb_resize`; "": as it was '
        "trained.",
        choices=("", *resizing.RESIZE_METHODS),
    )
    channels: str = key(
        "repeat",
        "How the first kernel is made for images of other channels: repeated and scaled "
        'as by timm, their "mean", the "first" with zeros behind them, or a "new" one.',
        choices=("repeat", "mean", "first", "new"),
    )
    allow_mismatch: tuple[str, ...] = key(
        (), "Regular expressions: what may be missing or left over."
    )

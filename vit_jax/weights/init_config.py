"""The section `init` of a config; initial.py loads the weights that it names."""

import dataclasses

from vit_jax.config.fields import key
from vit_jax.models import resizing


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Initial weights of a run, and how to fit them to its model."""

    checkpoint: str = key(
        "",
        'Weights to start from: a workdir, a file or an address; "" starts from random '
        "parameters.",
        changes_result=False,
        of_host=True,
    )
    use_ema: bool = key(
        True,
        "Whether to load averaged parameters if the workdir or training checkpoint has "
        "them.",
        reason="comparing with parameters that are not averaged",
    )
    head: str = key(
        "new",
        'What happens to the classifier: "new" initialises it with `model.init`, by '
        'default with zeros; "keep" loads it, with its classes sorted into the order of '
        'the data by their names; "drop" is for models without classes.',
        choices=("new", "keep", "drop"),
    )
    posemb_resize: str = key(
        "",
        'Method that resizes position embeddings, as in `model.posemb_resize`; "" is the '
        "method used when the weights were trained.",
        reason="comparing methods",
        choices=("", *resizing.RESIZE_METHODS),
    )
    channels: str = key(
        "repeat",
        "How the first kernel is adapted to images with another number of channels: "
        '"repeat" repeats and rescales it, as in timm; "mean" copies its mean to all '
        'channels; "first" keeps its first channels and adds zeros; "new" initialises '
        "the kernel.",
        reason="grey or multispectral images with weights for RGB",
        choices=("repeat", "mean", "first", "new"),
    )
    allow_mismatch: tuple[str, ...] = key(
        (),
        "Regular expressions of names of parameters that may be missing in the "
        "checkpoint, or in the model.",
    )

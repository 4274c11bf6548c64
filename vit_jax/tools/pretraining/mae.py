"""Settings of MAE (arXiv:2111.06377) for a user's images and weights.

Mask ratio, targets, crops and weight decay are those of configs/mae.py; the decoder is
small, since on CIFAR-10 a second block took 1.4 times as long and gave no better
features (docs/benchmarks/self_supervised.md).
"""

import dataclasses
from collections.abc import Mapping

from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.tasks.mae import MaeConfig
from vit_jax.tools.pretraining.method import Given, Length, from_scratch, optimizer

_RATE = 1.5e-4  # For batches of 256, from table 8 of the paper; in proportion.
_OF_DECODER = (
    *("decoder_width", "decoder_depth", "decoder_num_heads", "decoder_mlp_dim"),
    "normalize_targets",
)


@dataclasses.dataclass(frozen=True)
class MaeMethod:
    """Pixels of hidden patches, predicted from the visible ones; see `Method`."""

    name: str = "mae"
    what: str = "the pixels of hidden patches are predicted from the visible ones"
    images: int = 1_000_000
    forwards: float = 1.5  # A quarter of the patches, three passes, and the decoder.
    best: str = "val/loss"

    def check(self, given: Given) -> None:
        if not given.network.config.has_encoder:
            variant = given.network.options["variant"]
            raise UserError(
                f"method='mae' with the network {variant!r}, which has no patches to "
                "hide: choose weights of a Vision Transformer, such as deit:Ti/16"
            )

    def sections(self, given: Given, length: Length) -> Mapping[str, dict]:
        width = given.network.options["width"]
        task = {
            "decoder_width": width,
            "decoder_depth": 1,
            "decoder_num_heads": given.network.options["num_heads"],
        }
        model = {}
        if given.pretrained is None:
            # No loss reads the class token: the mean of the patches has more.
            model = {"pool": "gap", "class_token": True, "posemb": "sincos2d_mae"}
            optim = from_scratch(weight_decay=0.05)
        else:
            optim = optimizer(_RATE * length.batch / 256, b2=0.95, weight_decay=0.05)
            if "decoder" in given.pretrained.task_params:
                stored, known = given.pretrained.objective, fields.fields(MaeConfig)
                task |= {
                    k: stored[k] for k in _OF_DECODER if k in stored and k in known
                }
        transform = (
            "random_resized_crop(area=(0.2, 1.0), interpolation='bicubic') | flip"
        )
        return {
            "task": {"name": self.name, **task},
            "optim": optim,
            "data": {"train_transform": transform},
            "model": model,
        }


METHOD = MaeMethod()

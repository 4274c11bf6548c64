"""Settings of DINOv2's loss (arXiv:2304.07193) for a user's images and weights.

Transforms, loss weights and weight decay are those of configs/dinov2.py. Numbers of
outputs, rates and lengths are for few images and one machine; docs/decisions.md has
what they gave.
"""

import dataclasses
from collections.abc import Mapping

from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.tasks.dinov2 import Dinov2Config
from vit_jax.tools.pretraining.method import Given, Length, from_scratch, optimizer

_JITTER = "flip | color_jitter(0.4, 0.4, 0.2, 0.1, p=0.8) | grayscale(0.2)"
_SMALL_CROPS = 4
_SMALL_SIDE = 96 / 224  # Side of small crops divided by that of large crops.
_FROZEN = 0.1  # Fraction of the run in which only new heads are trained.
_HEADS = {"num_outputs": 2_048, "hidden_dim": 512, "bottleneck_dim": 128}
_RATE = 1e-3  # For weights, in batches of 32; with the square root of the batch.
# Keys that weights with heads determine.
_OF_HEADS = (
    *("num_outputs", "hidden_dim", "bottleneck_dim", "free_gain", "weight_norm"),
    *("separate_heads", "patch_num_outputs", "patch_hidden_dim"),
    *("patch_bottleneck_dim", "small_norm"),
)


@dataclasses.dataclass(frozen=True)
class Dinov2Method:
    """DINO's and iBOT's losses on crops, with masked patches; see `Method`."""

    name: str = "dinov2"
    what: str = "crops and masked patches get the features of their moving average"
    images: int = 300_000
    # Student: two large and four small crops, three passes each; teacher: two.
    forwards: float = 10.0
    best: str = "rank/rankme"

    def check(self, given: Given) -> None:
        config = given.network.config
        if not config.has_encoder or "class token" not in config.prefix_tokens:
            variant = given.network.options["variant"]
            raise UserError(
                f"method='dinov2' with the network {variant!r}, which has no class token "
                "beside its patches: choose weights of a Vision Transformer with one, "
                "such as deit:Ti/16, give a teacher, or set method='mae', which needs "
                "patches only"
            )

    def sections(self, given: Given, length: Length) -> Mapping[str, dict]:
        heads = _heads(given)
        small = max(1, round(_SMALL_SIDE * length.side / given.patch)) * given.patch
        crops = (
            f"multi_crop({length.side}, small_size={small}, num_small={_SMALL_CROPS}, "
            "area=(0.32, 1.0), small_area=(0.05, 0.32))"
        )
        task = {
            "name": self.name,
            **(heads or _HEADS),
            "koleo_group": 0,
            "teacher_momentum": 0.994,
            "teacher_temperature": 0.07,
            "teacher_temperature_start": 0.04,
            "teacher_temperature_steps": length.steps // 3,
            "large_transforms": (
                _JITTER,
                f"{_JITTER} | gaussian_blur(0.9) | solarize(0.2)",
            ),
            "small_transform": f"{_JITTER} | gaussian_blur(0.5)",
        }
        if given.pretrained is None:
            optim = from_scratch(grad_clip_norm_per_part=3.0)
            return {"task": task, "optim": optim, "data": {"train_transform": crops}}
        optim = optimizer(_RATE * (length.batch / 32) ** 0.5, layer_decay=0.9)
        optim["grad_clip_norm_per_part"] = 3.0
        if not heads:  # New heads would spoil the network.
            optim |= {"freeze": ("network/",), "freeze_fraction": _FROZEN}
        return {"task": task, "optim": optim, "data": {"train_transform": crops}}


def _heads(given: Given) -> dict:
    """Returns the keys of `task` that describe the heads of weights, if they have any."""
    if given.pretrained is None or "teacher" not in given.pretrained.task_params:
        return {}
    task = given.pretrained.objective
    if task.get("name") != Dinov2Config.name:
        return {}
    known = fields.fields(Dinov2Config)
    return {name: task[name] for name in _OF_HEADS if name in known and name in task}


METHOD = Dinov2Method()

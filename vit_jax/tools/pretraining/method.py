"""The interface of a method of pretraining without labels, and the list of them.

A method turns what is known of a user's images and weights into sections of a config.
Adding one is a file with a class, and its line in `METHODS`.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from vit_jax.config.fields import Registry
from vit_jax.data.preprocess import Preprocess
from vit_jax.models import Model
from vit_jax.tools.finetuning import rule
from vit_jax.tools.pretraining.photos import Photos
from vit_jax.weights.pretrained import Pretrained

METHODS = Registry(
    {
        "dinov2": "vit_jax.tools.pretraining.dinov2:METHOD",
        "mae": "vit_jax.tools.pretraining.mae:METHOD",
        "distillation": "vit_jax.tools.pretraining.distillation:METHOD",
    }
)
_SCRATCH_RATE = 3e-3  # Muon, as measured on CIFAR-10.


@dataclasses.dataclass(frozen=True)
class Given:
    """The images and weights that settings are chosen for.

    Attributes:
      photos: splits of the images.
      images: properties of the training images.
      validated: number of held-out images.
      network: the network that is trained, at the size of its weights, or of the images
        without weights.
      preprocess: preprocessing of the network's images.
      pretrained: weights to start from; None for random ones.
      teachers: weights whose features are learnt.
    """

    photos: Photos
    images: rule.Images
    validated: int
    network: Model
    preprocess: Preprocess
    pretrained: Pretrained | None = None
    teachers: tuple[str, ...] = ()

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return self.network.config.patch_size


class Length(NamedTuple):
    """Side of the images in pixels, images per batch, and steps."""

    side: int
    batch: int
    steps: int


class Method(Protocol):
    """A method of pretraining without labels.

    Attributes:
      name: name for `--method`.
      what: what is learnt, for the log.
      images: number of images that a run without a time limit trains on.
      forwards: time of a training step on an image, in forward passes on an image of
        the training size; decides how long evaluations take.
      best: metric that chooses the checkpoint without labels, as EVALUATION/METRIC.
    """

    name: str
    what: str
    images: int
    forwards: float
    best: str

    def check(self, given: Given) -> None:
        """Raises UserError if the method does not suit the network."""

    def sections(self, given: Given, length: Length) -> Mapping[str, dict]:
        """Returns keys of the sections "task", "optim", "data" and "model"."""


def suits(pretrained: Pretrained | None, teachers: tuple[str, ...]) -> tuple[str, str]:
    """Returns the name of the method for weights and teachers, and the reason."""
    if teachers:
        return "distillation", "a teacher is given"
    if pretrained is None:
        return "mae", "there are no weights to start from"
    trained = pretrained.objective.get("name", "")
    if "mae" in (trained, pretrained.format):
        return "mae", "the weights are of MAE"
    kind = trained or pretrained.format
    if kind.startswith("dino"):
        return "dinov2", f"the weights are of {kind}"
    return "dinov2", "adapts weights of any training"


def from_scratch(**keys: object) -> dict:
    """Returns `config.optim` of methods that start from random parameters."""
    return optimizer(_SCRATCH_RATE, **{"name": "muon"} | keys)


def optimizer(rate: float, **keys: object) -> dict:
    """Returns `config.optim` of all methods; `keys` replace its values or add some."""
    return {
        "name": "adamw",
        "learning_rate": rate,
        "weight_decay": 0.04,
        "schedule": "cosine",
        "warmup_fraction": 0.1,
        **keys,
    }

"""What a model that is judged was pretrained on."""

import dataclasses
import re

from vit_jax.report.pages.blocks import Number
from vit_jax.report.pages.runs import training_of

JFT, I21K, I1K = "JFT-300M", "ImageNet-21k", "ImageNet"
# Images of each (paper, section 4.1).
IMAGES = {I1K: 1_300_000, I21K: 14_000_000, JFT: 303_000_000}

# Data sets by their names here (those of TFDS, or of an evaluation) as the paper's
# tables call them.
DATASETS = {
    "imagenet2012": "ImageNet",
    "imagenet2012_real": "ImageNet",
    "imagenet": "ImageNet",
    "real": "ReaL",
    "imagenet_real": "ReaL",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "oxford_iiit_pet": "Pets",
    "oxford_flowers102": "Flowers",
}
# What a data set that a run was pretrained on is called.
_PRETRAINING = {"imagenet2012": I1K, "imagenet21k": I21K, "jft300m": JFT}
# Sources that say in their names what they were pretrained on (weights/places).
_NAMED = (
    (r"augreg-i1k:|deit:|sam:|big_vision:", I1K),
    (r"paper:|augreg:|bit:|.*(imagenet21k|i21k|in21k)", I21K),
    (r".*imagenet2012", I1K),
)
# Names with a variant behind the colon, as "augreg:B/16-i1k-384".
_VARIANT = r"[a-z0-9_-]+:(?!//)([^-]+)"


@dataclasses.dataclass(frozen=True)
class Model:
    """A pretrained model that was judged.

    Attributes:
      name: where it came from, as it was stated.
      variant: as "B/16"; "" if unknown.
      pretraining: JFT, I21K, I1K, another data set, or "" if unknown.
      images: size of the training split, or None if unknown.
      compute: of the pretraining, as `report.json` has it, or {}.
    """

    name: str
    variant: str
    pretraining: str = ""
    images: int | None = None
    compute: dict = dataclasses.field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """Names it in the head of a column."""
        return f"{self.variant or 'model'} ({short(self.name)})"

    @property
    def epochs(self) -> Number | None:
        """Passes over the pretraining split."""
        seen = self.compute.get("images_seen")
        return seen / self.images if seen and self.images else None


def model_of(source: str, variant: str) -> Model:
    """Finds out what a source of weights was pretrained on, and with what compute.

    Args:
      source: a workdir, or the name of published weights, as `--model` takes them.
      variant: of the model; "" is looked up.

    Returns:
      The model; what is not stated anywhere stays unknown.
    """
    name, seen = source, []
    # A fine-tuned model leads to the one that it began with.
    while (told := training_of(name)) and told.get("init") and name not in seen:
        seen.append(name)
        name = told["init"]
    if told is None:
        data = next((d for pattern, d in _NAMED if re.match(pattern, name)), "")
        named = re.match(_VARIANT, source)
        variant = variant or (named[1] if data and named else "")
        return Model(source, variant, data, IMAGES.get(data))
    data = told.get("dataset", "")
    return Model(
        source,
        variant or told.get("variant", ""),
        _PRETRAINING.get(data.partition(":")[0], dataset_name(data)),
        told.get("examples"),
        told.get("compute", {}),
    )


def short(source: str) -> str:
    """Returns a source of weights, a folder by the end of its path."""
    return source if ":" in source else "/".join(source.split("/")[-2:])


def dataset_name(name: str) -> str:
    """Returns what the paper calls a data set, or its own name."""
    return DATASETS.get(name.partition(":")[0], name)

"""A checkpoint of any format, in this project's names and options."""

import dataclasses

from vit_jax.data import imagenet
from vit_jax.data.preprocess import Preprocess
from vit_jax.models import segmenter
from vit_jax.models.targets import Targets
from vit_jax.weights.calibration import Calibration

IMAGENET = {"mean": imagenet.MEAN, "std": imagenet.STD}

# `task.loss` -> `Pretrained.loss`, for losses with another name than their probabilities.
LINKS = {"asymmetric": "sigmoid", "focal": "sigmoid"}

# Name of the learned position embeddings.
POSITIONS = "Transformer/posembed_input/pos_embedding"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint with the names and options of this project.

    Attributes:
      params: nested dict of NumPy arrays, which may be read-only views of a mapped file.
      options: arguments of `models.create` that build the network of the parameters:
        variant, num_classes, image_size, channels, pool, activation, ...
      format: "google", "big_vision", "bit", "timm", "hugging_face", "mae", "dino",
        "dinov2", "workdir" or "vit_jax".
      source: path or address of the checkpoint, for messages.
      preprocess: preprocessing of images; None if unknown.
      class_names: class names in label order; empty if unknown.
      loss: "softmax", or "sigmoid" if every class has an independent probability.
      notes: a line for each thing that reading changed or dropped.
      task: `config.task` of the training; empty if unknown.
      task_params: parameters of the task outside the network, such as {"decoder": ...},
        a nested dict of NumPy arrays; empty if the task has none or they were not
        requested.
      tokenizer: path or address of the text tower's tokenizer; empty if unknown.
      start: checkpoint that the training started from; empty if it started from random
        parameters or if this is unknown.
      multi_label: whether an image may have several classes.
      targets: what the outputs of the classifier mean if they are numbers; None for
        classes.
      architecture: timm's name of the network; empty if unknown.
      token_merging: number of tokens that each block merges, see models/merging.py; not
        read from the checkpoint.
      calibration: decisions fitted on validation images; None without them.
    """

    params: dict
    options: dict
    format: str
    source: str
    preprocess: Preprocess | None = None
    class_names: tuple[str, ...] = ()
    loss: str = "softmax"
    notes: tuple[str, ...] = ()
    task: dict = dataclasses.field(default_factory=dict)
    task_params: dict = dataclasses.field(default_factory=dict)
    tokenizer: str = ""
    start: str = ""
    multi_label: bool = False
    targets: Targets | None = None
    architecture: str = ""
    token_merging: int = 0
    calibration: Calibration | None = None

    @property
    def objective(self) -> dict:
        """Config of the task that `task_params` belong to.

        It is `task`, or the task in it if `task` trains another one by adapters.
        """
        wrapped = self.task.get("of")
        return wrapped if isinstance(wrapped, dict) else self.task

    @property
    def num_classes(self) -> int:
        """Number of classes of the classifier or segmentation head."""
        head = self.task_params.get(segmenter.PARAMS)
        return head["head"]["bias"].size if head else self.options["num_classes"]

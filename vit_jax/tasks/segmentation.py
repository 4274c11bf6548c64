"""Semantic segmentation: the class of every pixel.

A head predicts classes from features of some layers of a network (models/segmenter.py),
which is trained too or frozen. The loss is the cross-entropy of the pixels that have a
class, at the size of the images, optionally with the Dice loss (arXiv:1606.04797).
Letters: B images, Y by X pixels, C channels, L classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.data.masks import IGNORED
from vit_jax.data.transforms import device as device_transforms
from vit_jax.errors import UserError
from vit_jax.models import Model, cost, segmenter, stacking
from vit_jax.tasks.task import ImageTask, Ratio, TaskConfig

SEGMENTER, MEANS = segmenter.NAMES
LABEL_MAP = "label_map"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationConfig(TaskConfig):
    """Semantic segmentation: the class of every pixel."""

    has_classifier = False
    needs_all_patches = True

    name: str = key("segmentation", "Task to train.")
    head: str = key(
        "linear",
        'Head that predicts classes from features: "linear", a BatchNorm and a linear '
        'layer, or "pyramid", convolutions at several scales.',
        choices=tuple(segmenter.HEADS),
    )
    layers: tuple[int, ...] = key(
        (-1,),
        "Layers whose features are concatenated for the head, such as (-4, -3, -2, "
        "-1), numbered as in `Model.layer_features`.",
        at_least=None,
        distinct=True,
    )
    width: int = key(256, "Number of features of the pyramid head.", at_least=1)
    frozen: bool = key(False, "Freeze the network and train only the head.")
    dice: float = key(
        0.0,
        "Weight of a Dice loss that is added to the cross-entropy; 0 is off.",
        reason="masks with small objects (arXiv:1606.04797)",
    )
    dice_of: str = key(
        "batch",
        'Pixels over which a Dice coefficient is computed: "batch", all pixels of the '
        'batch, or "image", the pixels of each image, with squared terms as in '
        "mmsegmentation.",
        reason="recipes of mmsegmentation",
        choices=("batch", "image"),
    )

    @property
    def averages_network(self) -> bool:
        return not self.frozen

    def build(self, model, data, run, saved=None) -> "Segmentation":
        return Segmentation(self, model, data)

    def segmenter(self, model: Model, num_classes: int) -> segmenter.Segmenter:
        """Builds the network with its head."""
        return segmenter.build(model, self.head, self.layers, self.width, num_classes)


class Segmentation(ImageTask):
    """The segmentation task; the parameters are "network" and "segmenter".

    `extra` holds the running means of the head, and the network if it is frozen.

    Raises:
      UserError: the data have no masks, or the network does not have the layers.
    """

    statistics = (MEANS,)

    def __init__(self, config: SegmentationConfig, model: Model, data: DataConfig):
        if not (data.mask_key and data.num_classes):
            raise UserError(
                f"task.name={config.name!r} learns from masks: set data.mask_key to their "
                "feature, column or folder, and data.num_classes to the number of classes"
            )
        super().__init__(model, data)
        self.config = config
        self._segmenter = config.segmenter(model, data.num_classes)

    @property
    def coupled(self):
        norm = ("BatchNorm",) if self.config.head == "linear" else ()
        by_batch = self.config.dice and self.config.dice_of == "batch"
        return norm + (("the Dice loss",) if by_batch else ())

    def batch_spec(self, batch_size):
        shape = (batch_size, *self.data.image_size)
        return super().batch_spec(batch_size) | {
            LABEL_MAP: jax.ShapeDtypeStruct(shape, np.int16)
        }

    def prepare(self, batch, rng):
        """Returns image (B, Y, X, C), normalised, label_map (B, Y, X), and weight (B,).

        The weights are those of `pixel_weights`.
        """
        maps = device_transforms.apply_to_maps(
            self._ops, batch[LABEL_MAP], batch["index"], rng
        )
        prepared = super().prepare(batch, rng)
        return prepared | {LABEL_MAP: maps, "weight": pixel_weights(maps)}

    def init(self, rng):
        network_key, head_key = jax.random.split(rng)
        network = self.model.init(network_key)
        head, means = self._segmenter.init(head_key)
        if self.config.frozen:
            return {SEGMENTER: head}, {MEANS: means, "network": network}
        return {"network": network, SEGMENTER: head}, {MEANS: means}

    def backbone(self, params, extra):
        return (extra if self.config.frozen else params)["network"]

    def loss(self, params, extra, batch, rng):
        network, key = self.backbone(params, extra), rng
        if self.config.frozen:
            network, key = jax.lax.stop_gradient(network), None
        logits, means = self._segmenter.logits_and_means(
            network, params[SEGMENTER], extra[MEANS], batch["image"], key
        )
        labels = batch[LABEL_MAP].astype(jnp.int32)
        logits = segmenter.resize(logits, labels.shape[1:])
        loss, metrics = cross_entropy(logits, labels, batch["weight"]), {}
        if self.config.dice:
            of = dice_of_images if self.config.dice_of == "image" else dice
            metrics["dice_loss"] = of(logits, labels)
            loss += self.config.dice * metrics["dice_loss"]
        right = (logits.argmax(-1) == labels).sum(dtype=jnp.float32)
        count = (labels != IGNORED).sum(dtype=jnp.float32)
        metrics["pixel_accuracy"] = Ratio(right, count)
        return loss, ({"loss": loss, **metrics}, {MEANS: means})

    def update(self, extra, params, stats, step):
        return {**extra, **stats}

    def with_task_params(self, params, extra, task_params):
        difference = stacking.difference(task_params[SEGMENTER], params[SEGMENTER])
        if difference:
            raise UserError(
                "init.head='keep': the checkpoint's head for masks has other classes, "
                f"layers or widths than task and data.num_classes say ({difference}): make "
                "them equal, or train a new head with init.head='new'"
            )
        params = {**params, SEGMENTER: task_params[SEGMENTER]}
        return params, {**extra, MEANS: task_params[MEANS]}

    def segment(
        self, params: dict, extra: dict, images: Float[Array, "B Y X C"]
    ) -> Float[Array, "B y x L"]:
        """Returns the logits for a grid of cells, see `Segmenter.logits`."""
        return self._segmenter.logits(
            self.backbone(params, extra), params[SEGMENTER], extra[MEANS], images
        )

    def training_flops(self):
        """Returns the operations per image; a frozen network has no backward pass."""
        config, classes = self.config, self.data.num_classes
        shapes = (
            self.model.shapes,
            *jax.eval_shape(self._segmenter.init, jax.random.key(0)),
        )
        zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        images = jnp.zeros((1, *self.model.image_shape))

        def with_head(model):
            return config.segmenter(model, classes).logits(*zeros(), images)

        def alone(model):
            return model.layer_features(zeros()[0], images, config.layers)

        total, network = (cost.flops(f, self.model) for f in (with_head, alone))
        return None if total is None else 3 * total - 2 * network * config.frozen


def pixel_weights(labels: Int[Array, "B Y X"]) -> Float[Array, " B"]:
    """Returns a weight per image: 1 divided by the mean number of labelled pixels.

    All weights are equal; there is one per image so that they split into microbatches.
    """
    B, count = len(labels), (labels != IGNORED).sum()
    return jnp.full(B, B / jnp.maximum(count, 1))


def cross_entropy(
    logits: Float[Array, "B Y X L"],
    labels: Int[Array, "B Y X"],
    weights: Float[Array, " B"],
) -> Float[Array, ""]:
    """Returns the mean cross-entropy of the pixels that have a class.

    Args:
      logits, labels: logits and class of each pixel.
      weights: weight of a pixel in the sum over an image, see `pixel_weights`.
    """
    terms = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, labels.clip(0)
    )
    sums = jnp.where(labels == IGNORED, 0, terms).sum((1, 2))
    return (sums * weights).mean()


def dice(
    logits: Float[Array, "B Y X L"], labels: Int[Array, "B Y X"]
) -> Float[Array, ""]:
    """Returns 1 minus the mean soft Dice coefficient of the classes of the batch.

    The coefficient of a class is twice the sum of its probabilities in its pixels,
    divided by the sum of its probabilities in all pixels plus the number of its pixels
    (arXiv:1606.04797, without squares).
    """
    classes, pixels = logits.shape[-1], (0, 1, 2)
    true = jax.nn.one_hot(labels, classes)  # An ignored pixel has no class.
    counted = (labels != IGNORED)[..., None]
    probabilities = jnp.where(counted, jax.nn.softmax(logits), 0)
    present = true.sum(pixels)
    both = (probabilities * true).sum(pixels)
    score = 2 * both / jnp.maximum(probabilities.sum(pixels) + present, 1e-6)
    occurs = present > 0
    return 1 - jnp.where(occurs, score, 0).sum() / jnp.maximum(occurs.sum(), 1)


def dice_of_images(
    logits: Float[Array, "B Y X L"], labels: Int[Array, "B Y X"]
) -> Float[Array, ""]:
    """Returns 1 minus the mean Dice coefficient of all classes in each image.

    A coefficient is (2 sum of p t + 1) / (sum of p^2 + sum of t + 1), with
    probabilities p, and t = 1 in pixels of the class and 0 elsewhere, as in
    mmsegmentation's DiceLoss with exponent=2 and smooth=1 (0c87f7a,
    mmseg/models/losses/dice_loss.py; later versions have another formula). Classes that
    an image lacks count. As in that code, a pixel that has no class adds nothing to the
    first sum, and counts for the last class in the others.
    """
    classes, pixels = logits.shape[-1], (1, 2)
    ignored = labels == IGNORED
    true = jax.nn.one_hot(jnp.where(ignored, classes - 1, labels), classes)
    probabilities = jax.nn.softmax(logits)
    both = (probabilities * true * ~ignored[..., None]).sum(pixels)
    each = (jnp.square(probabilities) + true).sum(pixels)
    return 1 - ((2 * both + 1) / (each + 1)).mean()

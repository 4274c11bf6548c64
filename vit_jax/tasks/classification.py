"""Classification with labels: softmax or sigmoid cross-entropy, and variants of it.

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
from vit_jax.data.order import SHARES, class_weights
from vit_jax.data.sources.base import Source, check_label, read_labels
from vit_jax.errors import UserError
from vit_jax.models import STATE, Model
from vit_jax.tasks.task import Batch, ImageTask, Ratio, TaskConfig, Tree, transform

_EQUAL_WEIGHTS = (1.0,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    """Classification: images and their labels."""

    loss: str = key(
        "softmax",
        'Cross-entropy of the classes: "softmax"; "sigmoid", of each class separately; '
        'and with sigmoids "focal" (arXiv:1708.02002) and "asymmetric" '
        "(arXiv:2009.14119), in which classes that are already right count less.",
        choices=("softmax", "sigmoid", "focal", "asymmetric"),
    )
    focal_gamma: float = key(
        2.0,
        "Exponent of 1 - p in the focal loss, where p is the probability of the right "
        "answer for a class.",
        reason="how much less easy classes count",
        only_if={"loss": ("focal",)},
    )
    focal_alpha: float = key(
        0.25,
        "Weight of the classes that an image has in the focal loss; the others have the "
        "weight 1 - `task.focal_alpha`.",
        reason="the balance of present and absent classes",
        at_most=1,
        only_if={"loss": ("focal",)},
    )
    gamma_pos: float = key(
        0.0,
        "Exponent of 1 - p for the classes that an image has, in the asymmetric loss.",
        reason="how much less easy present classes count",
        only_if={"loss": ("asymmetric",)},
    )
    gamma_neg: float = key(
        4.0,
        "Exponent of p for the classes that an image does not have, in the asymmetric "
        "loss.",
        reason="how much less easy absent classes count",
        only_if={"loss": ("asymmetric",)},
    )
    clip: float = key(
        0.05,
        "Number that is subtracted from the probabilities of the classes that an image "
        "does not have, in the asymmetric loss; probabilities below it have no loss.",
        reason="labels that are missing for some images",
        below=1,
        only_if={"loss": ("asymmetric",)},
    )
    label_smoothing: float = key(
        0.0,
        "Fraction of each label's weight that is spread evenly over all classes.",
        below=1,
    )
    target_threshold: float | None = key(
        None,
        "With a loss of sigmoids, labels above this value become 1 and others 0, so "
        "that an image mixed by mixup has two classes. None keeps the labels of mixup.",
        below=1,
        optional=True,
        like=0.0,
    )
    class_weights: tuple[float, ...] | str = key(
        _EQUAL_WEIGHTS,
        "Weight of each class: a factor of the losses of its images with "
        '`task.loss="softmax"`, of its term in each other loss. (1.0,) gives '
        'all classes equal weights; "inverse", "sqrt" and "effective" are computed '
        "from the numbers of training images, as in `data.class_balance`.",
        reason="classes of very different sizes",
        names=tuple(SHARES),
    )

    def of_records(self, data: DataConfig, source: Source) -> "ClassificationConfig":
        if not isinstance(self.class_weights, str):
            return self
        self.check(data)
        labels = read_labels(source)
        largest = int(labels.argmax())
        check_label(int(labels[largest]), data.num_classes, source.record_id(largest))
        weights = class_weights(self.class_weights, labels, data.num_classes)
        return dataclasses.replace(self, class_weights=weights)

    def check_without_records(self) -> None:
        if isinstance(self.class_weights, str):
            raise UserError(
                f"task.class_weights={self.class_weights!r} is computed from numbers of "
                "images, which are not known here: give one weight per class"
            )

    def build(self, model, data, run, saved=None) -> "Classification":
        return Classification(self, model, data)

    def check(self, data: DataConfig) -> None:
        """Raises UserError if the loss or the class weights do not suit the labels."""
        if data.multi_label and self.loss == "softmax":
            raise UserError(
                f"task.loss={self.loss!r} with data.multi_label=True: set "
                "task.loss='sigmoid', which learns each class separately"
            )
        weights = self.class_weights
        if isinstance(weights, str):
            if data.multi_label:
                raise UserError(
                    f"task.class_weights={weights!r} needs one class per image, but "
                    "data.multi_label=True: give one weight per class"
                )
        elif weights != _EQUAL_WEIGHTS and len(weights) != data.num_classes:
            raise UserError(
                f"task.class_weights has {len(weights)} numbers: give one for "
                f"each of data.num_classes={data.num_classes}"
            )


class Classification(ImageTask):
    """The classification task, see `task.Task`.

    `extra` holds the network's running means, if it has any.

    Args:
      config: `config.task`.
      model: network with a classifier.
      data: `config.data`.

    Raises:
      UserError: the loss or the class weights do not suit the labels.
    """

    takes_sequences = True

    def __init__(self, config: ClassificationConfig, model: Model, data: DataConfig):
        config.check(data)
        super().__init__(model, data)
        self.config = config

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns image (B, Y, X, C), label (B,) and index (B,).

        With `data.multi_label` the label is (B, L).
        """
        classes = (self.data.num_classes,) if self.data.multi_label else ()
        label = jax.ShapeDtypeStruct((batch_size, *classes), np.int32)
        return super().batch_spec(batch_size) | {"label": label}

    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        params = self.model.init(rng)
        if not self.model.stateful:
            return params, None
        state = params.pop(STATE)
        return params, {STATE: state}

    def backbone(self, params: dict, extra: Tree) -> dict:
        return {**params, STATE: extra[STATE]} if self.model.stateful else params

    def outputs(
        self, params: dict, extra: Tree, batch: Batch, rng: jax.Array
    ) -> tuple[dict[str, jax.Array], Tree]:
        """Returns the network's outputs in training, and statistics for `update`."""
        images = batch["image"].astype(self.model.options["dtype"])
        # A subclass may override `backbone`: LoRA's returns the merged network.
        network = Classification.backbone(self, params, extra)
        outputs, state = self.model.apply_and_update(network, images, rng)
        return outputs, {STATE: state} if self.model.stateful else None

    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Returns image (B, Y, X, C), normalised, and label (B, L).

        Without `data.multi_label` the labels of an image sum to 1. With class weights
        and softmax there is also weight (B,), whose mean is 1.
        """
        labels = batch["label"].astype(jnp.float32)
        if not self.data.multi_label:
            labels = one_hot(batch["label"], self.data.num_classes)
        images, labels = transform(self._ops, self.data, batch, rng, labels)
        prepared = {"image": images, "label": labels}
        if self._weights is not None and self.config.loss == "softmax":
            prepared["weight"] = self.image_weights(labels)
        return prepared

    def image_weights(self, labels: Float[Array, "B L"]) -> Float[Array, " B"]:
        """Returns the class weights of images, divided by their mean over the batch.

        Mixed labels get a mixture of weights.
        """
        weights = labels @ self._weights
        return weights / weights.mean()

    def loss(self, params, extra, batch, rng):
        outputs, stats = self.outputs(params, extra, batch, rng)
        logits = outputs["logits"]
        loss = self.base_loss(logits, batch)
        if self.data.multi_label:
            return loss, ({"loss": loss, "f1": f1(logits, batch["label"])}, stats)
        return loss, ({"loss": loss, "top1": top1(logits, batch["label"])}, stats)

    def update(self, extra: Tree, params: dict, stats: Tree, step: jax.Array) -> Tree:
        return {**extra, **stats} if self.model.stateful else extra

    def base_loss(self, logits: Float[Array, "B L"], batch: Batch) -> Float[Array, ""]:
        """Returns the mean loss, with threshold, label smoothing and class weights.

        Args:
          logits: logits of a microbatch.
          batch: output of `prepare`, or a microbatch of it.
        """
        labels, threshold = batch["label"], self.config.target_threshold
        if threshold is not None and self.config.loss != "softmax":
            labels = (labels > threshold).astype(labels.dtype)
        targets = smooth(labels, self.config.label_smoothing)
        if self.config.loss == "softmax":
            losses = softmax(logits, targets)
            return (losses * batch.get("weight", 1.0)).mean()
        terms = SIGMOID_LOSSES[self.config.loss](logits, targets, self.config)
        if self._weights is None:
            return terms.sum(-1).mean()
        return (terms @ self._weights).mean()

    @property
    def _weights(self) -> Float[Array, " L"] | None:
        """Class weights, None if they are equal."""
        weights = self.config.class_weights
        # Still a name if a step is compiled without training records.
        if weights == _EQUAL_WEIGHTS or isinstance(weights, str):
            return None
        return jnp.asarray(weights)


def require_classifier(model: Model, task: str) -> None:
    """Raises UserError if the network has no classifier: the task needs one."""
    if not model.options["num_classes"]:
        raise UserError(
            f"data.num_classes=0 with task.name={task!r}, which learns from labels: set "
            "data.num_classes to the number of classes"
        )


def softmax(
    logits: Float[Array, "B L"], labels: Float[Array, "B L"]
) -> Float[Array, " B"]:
    """Returns the cross-entropy of one distribution over the classes."""
    return optax.losses.softmax_cross_entropy(logits, labels)


def sigmoid(
    logits: Float[Array, "B L"],
    labels: Float[Array, "B L"],
    config: ClassificationConfig | None = None,
) -> Float[Array, "B L"]:
    """Returns the binary cross-entropy of each class (arXiv:1912.11370); no `config`."""
    return optax.losses.sigmoid_binary_cross_entropy(logits, labels)


def focal(
    logits: Float[Array, "B L"],
    labels: Float[Array, "B L"],
    config: ClassificationConfig,
) -> Float[Array, "B L"]:
    """Returns the focal loss of each class (arXiv:1708.02002, equation 5)."""
    return optax.losses.sigmoid_focal_loss(
        logits, labels, alpha=config.focal_alpha, gamma=config.focal_gamma
    )


def asymmetric(
    logits: Float[Array, "B L"],
    labels: Float[Array, "B L"],
    config: ClassificationConfig,
) -> Float[Array, "B L"]:
    """Returns the asymmetric loss of each class (arXiv:2009.14119, equation 7)."""
    p = jax.nn.sigmoid(logits)
    shifted = jnp.maximum(p - config.clip, 0)
    absent = -jnp.log1p(-shifted)
    if not config.clip:  # The same, but finite for large logits.
        absent = jax.nn.softplus(logits)
    present = _power(1 - p, config.gamma_pos) * jax.nn.softplus(-logits)
    absent *= _power(shifted, config.gamma_neg)
    return labels * present + (1 - labels) * absent


def _power(base: Float[Array, "B L"], exponent: float) -> Float[Array, "B L"]:
    """Returns a power of numbers in [0, 1] whose slope at 0 is finite."""
    tiny = jnp.finfo(base.dtype).tiny
    return jnp.maximum(base, tiny) ** exponent if exponent else jnp.ones_like(base)


SIGMOID_LOSSES = {"sigmoid": sigmoid, "focal": focal, "asymmetric": asymmetric}


def smooth(labels: Float[Array, "B L"], smoothing: float) -> Float[Array, "B L"]:
    """Moves `smoothing` of each label's weight to all classes evenly."""
    return optax.losses.smooth_labels(labels, smoothing) if smoothing else labels


def one_hot(labels: Int[Array, " B"], num_classes: int) -> Float[Array, "B L"]:
    """Converts class numbers to rows with a single 1."""
    return jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)


def top1(logits: Float[Array, "B L"], labels: Float[Array, "B L"]) -> Float[Array, ""]:
    """Returns the fraction of images whose largest logit is the label's."""
    return (logits.argmax(-1) == labels.argmax(-1)).mean()


def f1(logits: Float[Array, "B L"], labels: Float[Array, "B L"]) -> Ratio:
    """Returns micro F1 over all labels of the images, with a threshold of one half."""
    predicted, positive = logits > 0, labels > 0.5
    right = (predicted & positive).sum(dtype=jnp.float32)
    return Ratio(2 * right, predicted.sum() + positive.sum(dtype=jnp.float32))

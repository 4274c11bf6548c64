"""Classification with labels: softmax or sigmoid cross-entropy.

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
        'Cross-entropy of the classes: "softmax" or "sigmoid".',
        choices=("softmax", "sigmoid"),
    )
    label_smoothing: float = key(
        0.0,
        "Fraction of each label's weight that is spread evenly over all classes.",
        below=1,
    )
    target_threshold: float | None = key(
        None,
        'With `task.loss="sigmoid"`, labels above this value become 1 and others 0, so '
        "that an image mixed by mixup has two classes. None keeps the labels of mixup.",
        below=1,
        optional=True,
        like=0.0,
    )
    class_weights: tuple[float, ...] | str = key(
        _EQUAL_WEIGHTS,
        "Weight of each class: a factor of the losses of its images with "
        '`task.loss="softmax"`, of its term in each loss with "sigmoid". (1.0,) gives '
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
        if data.multi_label and self.loss != "sigmoid":
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
        if threshold is not None and self.config.loss == "sigmoid":
            labels = (labels > threshold).astype(labels.dtype)
        targets = smooth(labels, self.config.label_smoothing)
        if self._weights is None:
            return LOSSES[self.config.loss](logits, targets).mean()
        if self.config.loss == "sigmoid":
            terms = optax.losses.sigmoid_binary_cross_entropy(logits, targets)
            return (terms @ self._weights).mean()
        return (softmax(logits, targets) * batch["weight"]).mean()

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
    logits: Float[Array, "B L"], labels: Float[Array, "B L"]
) -> Float[Array, " B"]:
    """Returns the sum of the binary cross-entropies of all classes (arXiv:1912.11370)."""
    return jnp.sum(optax.losses.sigmoid_binary_cross_entropy(logits, labels), axis=-1)


LOSSES = {"softmax": softmax, "sigmoid": sigmoid}


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

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
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.data.order import SHARES, class_weights
from vit_jax.data.sources.base import Source, check_label, read_labels
from vit_jax.data.transforms import device as transforms
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.models import STATE, Model
from vit_jax.tasks.task import Batch, Task, TaskConfig, Tree

_ALIKE = (1.0,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    """Images and their labels."""

    loss: str = key(
        "softmax",
        '"softmax" or "sigmoid" cross-entropy.',
        choices=("softmax", "sigmoid"),
    )
    label_smoothing: float = key(
        0.0, "Part of a label's weight that all classes share.", below=1
    )
    class_weights: tuple[float, ...] | str = key(
        _ALIKE,
        "Weight of each class in the loss, of its images (softmax, whose mean is by "
        'weight) or of its own term (sigmoid); (1.0,): all alike. "inverse", "sqrt" '
        'or "effective": by the numbers of the training images, as `data.class_balance` '
        "draws them.",
        names=tuple(SHARES),
    )

    def of_records(self, data: DataConfig, source: Source) -> "ClassificationConfig":
        how = self.class_weights
        if not isinstance(how, str):
            return self
        self.check(data)
        labels = read_labels(source)
        last = int(labels.argmax())
        check_label(int(labels[last]), data.num_classes, source.record_id(last))
        weights = class_weights(how, labels, data.num_classes)
        return dataclasses.replace(self, class_weights=weights)

    def check_without_records(self) -> None:
        if isinstance(self.class_weights, str):
            raise UserError(
                f"task.class_weights={self.class_weights!r} is by numbers of images, which "
                "are not known here: state a number for each class"
            )

    def build(
        self,
        model: Model,
        data: DataConfig,
        run: RunLength,
        saved: dict | None = None,
    ) -> "Classification":
        return Classification(self, model, data)

    def check(self, data: DataConfig) -> None:
        """Raises UserError if the loss does not fit the labels."""
        if data.multi_label and self.loss != "sigmoid":
            raise UserError(
                f"data.multi_label=True needs task.loss='sigmoid', in which each class is "
                f"learnt by itself; it is {self.loss!r}"
            )
        weights = self.class_weights
        if isinstance(weights, str):
            if data.multi_label:
                raise UserError(
                    f"task.class_weights={weights!r} needs one class an image, but "
                    "data.multi_label=True: state a number for each class"
                )
        elif weights != _ALIKE and len(weights) != data.num_classes:
            raise UserError(
                f"task.class_weights has {len(weights)} numbers: give one for "
                f"each of data.num_classes={data.num_classes}"
            )


class Classification(Task):
    """See `task.Task`; the state beside the parameters is that of the network, if any.

    Args:
      config: `config.task`.
      model: network.
      data: `config.data`.

    Raises:
      UserError: the loss does not fit the labels.
    """

    def __init__(self, config: ClassificationConfig, model: Model, data: DataConfig):
        config.check(data)
        self.model, self.config, self._data = model, config, data
        self._ops = parse.parse_train(data.train_transform, data.image_size).device

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns image (B, Y, X, C), label (B,) and index (B,), of its transforms.

        With `data.multi_label` the labels are (B, L).
        """
        classes = (self._data.num_classes,) if self._data.multi_label else ()
        shape = (batch_size, *self._data.image_size, self._data.channels)
        return {
            "image": jax.ShapeDtypeStruct(shape, np.uint8),
            "label": jax.ShapeDtypeStruct((batch_size, *classes), np.int32),
            "index": jax.ShapeDtypeStruct((batch_size,), np.uint32),
        }

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
        """Returns what the network answers in training, and the statistics of a step."""
        images = batch["image"].astype(self.model.options["dtype"])
        # A task may hand on another network than it trains, such as a merged one.
        network = Classification.backbone(self, params, extra)
        outputs, state = self.model.apply_and_update(network, images, rng)
        return outputs, {STATE: state} if self.model.stateful else None

    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Returns image (B, Y, X, C), normalised, and label (B, L).

        Labels of one class sum to 1.
        """
        labels = batch["label"].astype(jnp.float32)
        if not self._data.multi_label:
            labels = one_hot(batch["label"], self._data.num_classes)
        images, labels = transforms.apply(
            self._ops, batch["image"], labels, batch["index"], rng
        )
        images = transforms.normalize(images, self._data.mean, self._data.std)
        return {"image": images, "label": labels}

    def loss(self, params, extra, batch, rng):
        outputs, stats = self.outputs(params, extra, batch, rng)
        logits = outputs["logits"]
        loss = self.base_loss(logits, batch["label"])
        if self._data.multi_label:
            return loss, ({"loss": loss, "f1": f1(logits, batch["label"])}, stats)
        return loss, ({"loss": loss, "top1": top1(logits, batch["label"])}, stats)

    def update(self, extra: Tree, params: dict, stats: Tree, step: jax.Array) -> Tree:
        return {**extra, **stats} if self.model.stateful else extra

    def base_loss(
        self, logits: Float[Array, "B L"], labels: Float[Array, "B L"]
    ) -> Float[Array, ""]:
        """Returns the mean loss of logits, smoothed and weighted as the config says."""
        targets = smooth(labels, self.config.label_smoothing)
        weights = self.config.class_weights
        # A program is planned without records, from which the weights follow.
        if weights == _ALIKE or isinstance(weights, str):
            return LOSSES[self.config.loss](logits, targets).mean()
        weights = jnp.asarray(weights)
        if self.config.loss == "sigmoid":
            terms = optax.losses.sigmoid_binary_cross_entropy(logits, targets)
            return (terms @ weights).mean()
        of_images = labels @ weights  # Of mixed labels the mixture.
        return (softmax(logits, targets) * of_images).sum() / of_images.sum()


def require_classifier(model: Model, task: str) -> None:
    """Raises UserError if the network of a task that learns from labels has no classifier."""
    if not model.options["num_classes"]:
        raise UserError(
            f"data.num_classes=0 with task.name={task!r}, which learns from labels: set "
            "data.num_classes to the number of classes"
        )


def softmax(
    logits: Float[Array, "B L"], labels: Float[Array, "B L"]
) -> Float[Array, " B"]:
    """Cross-entropy of one distribution over the classes."""
    return optax.losses.softmax_cross_entropy(logits, labels)


def sigmoid(
    logits: Float[Array, "B L"], labels: Float[Array, "B L"]
) -> Float[Array, " B"]:
    """Sum over the classes of the binary cross-entropies (BiT, arXiv:1912.11370)."""
    return jnp.sum(optax.losses.sigmoid_binary_cross_entropy(logits, labels), axis=-1)


LOSSES = {"softmax": softmax, "sigmoid": sigmoid}


def smooth(labels: Float[Array, "B L"], smoothing: float) -> Float[Array, "B L"]:
    """Moves `smoothing` of each label's weight to all classes evenly."""
    return optax.losses.smooth_labels(labels, smoothing) if smoothing else labels


def one_hot(labels: Int[Array, " B"], num_classes: int) -> Float[Array, "B L"]:
    """Turns class numbers into rows with a single 1."""
    return jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)


def top1(logits: Float[Array, "B L"], labels: Float[Array, "B L"]) -> Float[Array, ""]:
    """Returns the part of the images whose largest logit is that of the label."""
    return (logits.argmax(-1) == labels.argmax(-1)).mean()


def f1(logits: Float[Array, "B L"], labels: Float[Array, "B L"]) -> Float[Array, ""]:
    """Returns F1 over all labels of the images, at a probability of one half."""
    found, there = logits > 0, labels > 0.5
    right = (found & there).sum()
    return 2 * right / jnp.maximum(found.sum() + there.sum(), 1)

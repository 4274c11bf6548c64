"""Distillation from a frozen teacher (DeiT, arXiv:2012.12877, section 4).

A student with a distillation token has two classifiers: one learns from the labels, the
other from the teacher, and at test time their logits are averaged. A student without
the token learns from both with one classifier. Letters: B images, L classes.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import models
from vit_jax.command_line.printing import masked
from vit_jax.config.fields import key
from vit_jax.data.config import MATCHERS, DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.models import Model, cost
from vit_jax.tasks.classification import (
    Classification,
    ClassificationConfig,
    softmax,
    top1,
)
from vit_jax.tasks.task import Tree

if TYPE_CHECKING:
    from vit_jax.weights.pretrained import Pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(ClassificationConfig):
    """Distillation: images, their labels, and a teacher's predictions."""

    name: str = key("distillation", "Task to train.")
    teacher: str = key(
        "",
        "Weights of the teacher, in any form that `init.checkpoint` accepts. They are "
        "read when a run begins; the checkpoints of the run contain a copy.",
    )
    kind: str = key(
        "hard",
        'Target from the teacher: "hard", its most likely class, or "soft", its '
        "probabilities.",
        choices=("hard", "soft"),
    )
    alpha: float = key(
        0.5,
        "Weight of the distillation loss; the loss of the labels has the weight "
        "1 - `task.alpha`.",
        at_most=1,
    )
    temperature: float = key(
        1.0,
        "Divisor of the logits of student and teacher (softmax temperature).",
        above=0,
        only_if={"kind": ("soft",)},
    )
    mean_over_classes: bool = key(
        False,
        "Divide the distillation loss by the number of classes, as DeiT's code does "
        "and its paper does not.",
        only_if={"kind": ("soft",)},
    )

    match_classes: str = key(
        "names",
        "How the classes of the teacher are matched with those of the data: by their "
        '"names", or class by class ("position"); see docs/labels.md.',
        reason="teachers whose class names differ from those of the data",
        choices=tuple(MATCHERS),
    )
    # Class names of the training records, set by `of_records`; None if unknown.
    class_names: tuple[str, ...] | None = None

    def of_records(self, data: DataConfig, source: Source) -> "DistillationConfig":
        config = super().of_records(data, source)
        return dataclasses.replace(config, class_names=tuple(source.class_names))

    def build(self, model, data, run, saved=None) -> "Distillation":
        return Distillation(self, model, data, saved)


class Distillation(Classification):
    """The distillation task; `extra` holds the teacher and the student's running means.

    If `saved` is given, see `TaskConfig.build`, the teacher's file is not read.

    Raises:
      UserError: the loss does not suit the labels, the teacher is not set, or its
        classes, loss, image size or channels do not suit the student.
    """

    takes_sequences = False  # The teacher's images may be normalised in another way.

    def __init__(
        self,
        config: DistillationConfig,
        model: Model,
        data: DataConfig,
        saved: dict | None = None,
    ):
        super().__init__(config, model, data)
        if not config.teacher:
            raise UserError(
                "task.teacher='': give a checkpoint, in any form for init.checkpoint"
            )
        self._teacher = saved["teacher"] if saved else _describe(self._pretrained)
        _check_teacher(self._teacher, config, data)
        known = config.class_names is not None and not saved
        notes = self._match_classes() if known else []
        # The student's platform, which vit_jax.compile sets to that of another machine.
        platform = {"platform": model.options.get("platform")}
        self._network = models.create(**self._teacher["options"] | platform)
        if not self._teacher["normalization"]:
            notes.append(
                f"task.teacher={masked(config.teacher)!r} does not record its "
                f"normalisation: data.mean={data.mean} and data.std={data.std} are used"
            )
        self.notes = tuple(notes)

    @functools.cached_property
    def _pretrained(self) -> "Pretrained":
        # Imported here because it is large, and a resumed run does not need it.
        from vit_jax.weights import open_pretrained

        return open_pretrained(self.config.teacher)

    def _match_classes(self) -> list[str]:
        """Matches the teacher's classes with those of the data; returns notes."""
        config = self.config
        where = f"the training data for task.teacher={masked(config.teacher)!r}"
        matched = MATCHERS[config.match_classes](
            config.class_names,
            self._pretrained.class_names,
            self.data.num_classes,
            where=where,
            hint=", or match them class by class: task.match_classes=position",
        )
        if (matched.indices != np.arange(self.data.num_classes)).any():
            self._teacher["classes"] = matched.indices.tolist()
        return [f"{where}: {matched.line}"] if matched.line else []

    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        params, extra = super().init(rng)
        return params, {**(extra or {}), "teacher": self._network.init(rng)}

    def load(self) -> Tree:
        return {"teacher": self._pretrained.params}

    def metadata(self) -> dict:
        return {"teacher": self._teacher}

    def loss(self, params, extra, batch, rng):
        outputs, stats = self.outputs(params, extra, batch, rng)
        # A student with one classifier has only "logits", which both losses then use.
        class_logits = outputs.get("class_logits", outputs["logits"])
        distillation_logits = outputs.get("distillation_logits", outputs["logits"])
        teacher = jax.lax.stop_gradient(extra["teacher"])
        images = self._of_teacher(batch["image"])
        teacher_logits = self._in_order(self._network.apply(teacher, images)["logits"])
        class_loss = self.base_loss(class_logits, batch)
        distillation_loss = self.teacher_loss(
            distillation_logits, jax.lax.stop_gradient(teacher_logits)
        )
        alpha = self.config.alpha
        loss = (1 - alpha) * class_loss + alpha * distillation_loss
        metrics = {
            "loss": loss,
            "class_loss": class_loss,
            "distillation_loss": distillation_loss,
            "top1": top1(outputs["logits"], batch["label"]),
            "teacher_top1": top1(teacher_logits, batch["label"]),
        }
        return loss, (metrics, stats)

    def _in_order(self, logits: Float[Array, "B L"]) -> Float[Array, "B L"]:
        """Returns the teacher's logits in the order of the data's classes."""
        order = self._teacher.get("classes")
        return logits if order is None else logits[:, np.array(order)]

    def _of_teacher(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """Converts images from the student's normalisation to the teacher's."""
        wanted, data = self._teacher["normalization"], self.data
        if wanted is None:
            return images
        # Mean and deviation are a number, or a number per channel.
        mean, std = np.asarray(data.mean), np.asarray(data.std)
        scale = (std / wanted["std"]).astype(np.float32).reshape(1, 1, 1, -1)
        shift = (mean - wanted["mean"]) / wanted["std"]
        shift = shift.astype(np.float32).reshape(1, 1, 1, -1)
        return images * scale + shift

    def teacher_loss(
        self, logits: Float[Array, "B L"], answers: Float[Array, "B L"]
    ) -> Float[Array, ""]:
        """Returns the distillation loss.

        Args:
          logits: logits of the student's classifier that learns from the teacher.
          answers: logits of the teacher.
        """
        config = self.config
        if config.kind == "hard":
            chosen = jax.nn.one_hot(answers.argmax(-1), answers.shape[-1])
            return softmax(logits, chosen).mean()
        tau = config.temperature
        predicted = jax.nn.log_softmax(logits / tau)
        wanted = jax.nn.log_softmax(answers / tau)
        kl = jnp.sum(jnp.exp(wanted) * (wanted - predicted), axis=-1).mean() * tau**2
        return kl / logits.shape[-1] if config.mean_over_classes else kl

    def training_flops(self) -> int | None:
        """Returns the operations per image; the teacher has no backward pass."""
        flops = super().training_flops(), cost.forward_flops(self._network)
        return None if None in flops else sum(flops)


def _describe(pretrained: "Pretrained") -> dict:
    """Describes a teacher, so that a resumed run can build its network."""
    how = pretrained.preprocess
    return {
        "options": pretrained.options,
        "normalization": how and {"mean": how.mean, "std": how.std},
        "loss": pretrained.loss,
    }


def _check_teacher(teacher: dict, config: DistillationConfig, data: DataConfig) -> None:
    """Raises UserError if a teacher has other classes or images than the student."""
    options, who = teacher["options"], f"task.teacher={config.teacher!r}"
    num_classes, size = options["num_classes"], tuple(options["image_size"])
    fine_tune = "fine-tune it on these classes first, or choose another teacher"
    if not num_classes or options.get("pool") == "none":
        raise UserError(f"{who} has no classifier: {fine_tune}")
    if num_classes != data.num_classes:
        raise UserError(
            f"{who} has num_classes={num_classes}, but "
            f"data.num_classes={data.num_classes}: {fine_tune}"
        )
    if options["channels"] != data.channels:
        raise UserError(
            f"{who} has channels={options['channels']}, but "
            f"data.channels={data.channels}: choose another teacher"
        )
    if size != tuple(data.image_size):
        raise UserError(
            f"{who} is for images of {size}, but data.image_size="
            f"{tuple(data.image_size)}: fine-tune it at that size first, or choose "
            "another teacher"
        )
    if config.kind == "soft" and teacher["loss"] == "sigmoid":
        raise UserError(
            f"{who} was trained with sigmoid loss, but task.kind='soft' needs a "
            "distribution over the classes: set task.kind='hard', or choose a teacher "
            "that was trained with softmax loss"
        )

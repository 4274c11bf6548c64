"""Distillation from a frozen teacher (DeiT, arXiv:2012.12877, section 4).

A student with a distillation token has two classifiers: one learns from the labels, the
other from the teacher, and at test time their logits are averaged. A student without
the token learns from both with one classifier. Letters: B images, L classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

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
from vit_jax.tasks.teacher import Teacher


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
        self._teacher = Teacher(
            "task.teacher", config.teacher, model, data, saved and saved["teacher"]
        )
        _check_teacher(self._teacher, config, data)
        known = config.class_names is not None and not saved
        notes = self._match_classes() if known else []
        self.notes = (*notes, *self._teacher.notes)

    def _match_classes(self) -> list[str]:
        """Matches the teacher's classes with those of the data; returns notes."""
        config = self.config
        where = f"the training data for {self._teacher.where}"
        matched = MATCHERS[config.match_classes](
            config.class_names,
            self._teacher.pretrained.class_names,
            self.data.num_classes,
            where=where,
            hint=", or match them class by class: task.match_classes=position",
        )
        if (matched.indices != np.arange(self.data.num_classes)).any():
            self._teacher.about["classes"] = matched.indices.tolist()
        return [f"{where}: {matched.line}"] if matched.line else []

    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        params, extra = super().init(rng)
        return params, {**(extra or {}), "teacher": self._teacher.init(rng)}

    def load(self) -> Tree:
        return {"teacher": self._teacher.load()}

    def metadata(self) -> dict:
        return {"teacher": self._teacher.about}

    def loss(self, params, extra, batch, rng):
        outputs, stats = self.outputs(params, extra, batch, rng)
        # A student with one classifier has only "logits", which both losses then use.
        class_logits = outputs.get("class_logits", outputs["logits"])
        distillation_logits = outputs.get("distillation_logits", outputs["logits"])
        teacher = jax.lax.stop_gradient(extra["teacher"])
        images = self._teacher.images(batch["image"])
        outputs_of_teacher = self._teacher.network.apply(teacher, images)
        teacher_logits = self._in_order(outputs_of_teacher["logits"])
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
        order = self._teacher.about.get("classes")
        return logits if order is None else logits[:, np.array(order)]

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
        flops = super().training_flops(), cost.forward_flops(self._teacher.network)
        return None if None in flops else sum(flops)


def _check_teacher(
    teacher: Teacher, config: DistillationConfig, data: DataConfig
) -> None:
    """Raises UserError if a teacher has other classes or images than the student."""
    options, who = teacher.about["options"], teacher.where
    num_classes, size = options["num_classes"], tuple(options["image_size"])
    fine_tune = "fine-tune it on these classes first, or choose another teacher"
    if not num_classes or options.get("pool") == "none":
        raise UserError(f"{who} has no classifier: {fine_tune}")
    if num_classes != data.num_classes:
        raise UserError(
            f"{who} has num_classes={num_classes}, but "
            f"data.num_classes={data.num_classes}: {fine_tune}"
        )
    if size != tuple(data.image_size):
        raise UserError(
            f"{who} is for images of {size}, but data.image_size="
            f"{tuple(data.image_size)}: fine-tune it at that size first, or choose "
            "another teacher"
        )
    if config.kind == "soft" and teacher.about["loss"] == "sigmoid":
        raise UserError(
            f"{who} was trained with sigmoid loss, but task.kind='soft' needs a "
            "distribution over the classes: set task.kind='hard', or choose a teacher "
            "that was trained with softmax loss"
        )

"""Distillation from a frozen teacher (DeiT, arXiv:2012.12877, section 4).

A student with a distillation token has two classifiers: one learns from the labels, the
other from the teacher, and at test time their logits are averaged. One without learns
from both with its single classifier. Letters: B images, L classes.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import models
from vit_jax.config.fields import key
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model, cost
from vit_jax.printing import masked
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
    """Images, their labels, and a teacher's answers."""

    name: str = key("distillation", "What is learnt.")
    teacher: str = key(
        "",
        "Workdir, weights or their address, as `init` takes. Read when a run begins; its "
        "checkpoints hold the teacher.",
    )
    kind: str = key(
        "hard",
        '"hard": the class that the teacher finds likeliest; "soft": all it answers.',
        choices=("hard", "soft"),
    )
    alpha: float = key(
        0.5, "Weight of the teacher's part; the labels have the rest.", at_most=1
    )
    temperature: float = key(
        1.0,
        "Logits are divided by it.",
        above=0,
        only_if={"kind": ("soft",)},
    )
    mean_over_classes: bool = key(
        False,
        "Divide the teacher's part by the classes too, as DeiT's code does (its paper "
        "does not): with 1,000 of them it is a thousandth.",
        only_if={"kind": ("soft",)},
    )

    def build(
        self,
        model: Model,
        data: DataConfig,
        run: RunLength,
        saved: dict | None = None,
    ) -> "Distillation":
        return Distillation(self, model, data, saved)


class Distillation(Classification):
    """See `task.Task`; beside the parameters are the teacher, and a state of the student's.

    Args:
      config: `config.task`.
      model: the student.
      data: `config.data`.
      saved: of the checkpoint of a run that resumes, which holds the teacher's weights
        too: its file is not read.

    Raises:
      UserError: the loss does not fit the labels, or there is no teacher, or it has no
        classifier of these classes, answers that cannot be softened, or another kind of
        image.
    """

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
                "task.teacher is empty: name a workdir, a file or folder with weights, or "
                "an address, as `init` takes"
            )
        self._teacher = saved["teacher"] if saved else _describe(self._pretrained)
        _check_teacher(self._teacher, config, data)
        # Where the student computes, which may be planned for another machine.
        platform = {"platform": model.options.get("platform")}
        self._network = models.create(**self._teacher["options"] | platform)
        if not self._teacher["normalization"]:
            note = (
                f"task.teacher={masked(config.teacher)!r} does not say how its images "
                f"are normalised: as the student's, by data.mean={data.mean} and "
                f"data.std={data.std}"
            )
            self.notes = (note,)

    @functools.cached_property
    def _pretrained(self) -> "Pretrained":
        # Here, because it reads all formats and most tasks need none.
        from vit_jax.weights import open_pretrained

        return open_pretrained(self.config.teacher)

    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        params, extra = super().init(rng)
        return params, {**(extra or {}), "teacher": self._network.init(rng)}

    def load(self) -> Tree:
        return {"teacher": self._pretrained.params}

    def metadata(self) -> dict:
        return {"teacher": self._teacher}

    def loss(self, params, extra, batch, rng):
        outputs, stats = self.outputs(params, extra, batch, rng)
        # Without the second classifier both parts are of the one there is.
        own = outputs.get("class_logits", outputs["logits"])
        other = outputs.get("distillation_logits", outputs["logits"])
        teacher = jax.lax.stop_gradient(extra["teacher"])
        answers = self._network.apply(teacher, self._of_teacher(batch["image"]))
        answers = answers["logits"]
        base = self.base_loss(own, batch["label"])
        part = self.teacher_loss(other, jax.lax.stop_gradient(answers))
        alpha = self.config.alpha
        loss = (1 - alpha) * base + alpha * part
        metrics = {
            "loss": loss,
            "class_loss": base,
            "distillation_loss": part,
            "top1": top1(outputs["logits"], batch["label"]),
            "teacher_top1": top1(answers, batch["label"]),
        }
        return loss, (metrics, stats)

    def _of_teacher(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """Normalises images as the teacher was trained on; they are as the student's."""
        wanted, data = self._teacher["normalization"], self._data
        if wanted is None:
            return images
        # One number, or one per channel.
        mean, std = np.asarray(data.mean), np.asarray(data.std)
        scale = (std / wanted["std"]).astype(np.float32).reshape(1, 1, 1, -1)
        shift = (mean - wanted["mean"]) / wanted["std"]
        shift = shift.astype(np.float32).reshape(1, 1, 1, -1)
        return images * scale + shift

    def teacher_loss(
        self, logits: Float[Array, "B L"], answers: Float[Array, "B L"]
    ) -> Float[Array, ""]:
        """Returns the teacher's part of the loss.

        Args:
          logits: of the classifier that learns from the teacher.
          answers: the teacher's logits.
        """
        config = self.config
        if config.kind == "hard":
            chosen = jax.nn.one_hot(answers.argmax(-1), answers.shape[-1])
            return softmax(logits, chosen).mean()
        heat = config.temperature
        own = jax.nn.log_softmax(logits / heat)
        wanted = jax.nn.log_softmax(answers / heat)
        apart = jnp.sum(jnp.exp(wanted) * (wanted - own), axis=-1).mean() * heat**2
        return apart / logits.shape[-1] if config.mean_over_classes else apart

    def training_flops(self) -> int | None:
        """See `Task`; the teacher has no backward pass."""
        parts = super().training_flops(), cost.forward_flops(self._network)
        return None if None in parts else sum(parts)


def _describe(pretrained: "Pretrained") -> dict:
    """Returns what the task needs of a teacher beside its weights, for JSON."""
    found = pretrained.preprocess
    return {
        "options": pretrained.options,
        "normalization": found and {"mean": found.mean, "std": found.std},
        "loss": pretrained.loss,
    }


def _check_teacher(teacher: dict, config: DistillationConfig, data: DataConfig) -> None:
    """Checks that a teacher can answer for the images and the classes.

    Raises:
      UserError: it cannot.
    """
    options, who = teacher["options"], f"task.teacher={config.teacher!r}"
    num_classes, size = options["num_classes"], tuple(options["image_size"])
    fine_tune = "fine-tune it on these classes first, or take another teacher"
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
            f"data.channels={data.channels}: take another teacher"
        )
    if size != tuple(data.image_size):
        raise UserError(
            f"{who} is for images of {size}, but data.image_size="
            f"{tuple(data.image_size)}: fine-tune it at that size first, or take another "
            "teacher"
        )
    if config.kind == "soft" and teacher["loss"] == "sigmoid":
        raise UserError(
            f"{who} was trained with sigmoid loss, so its answers are no distribution "
            "over the classes, which task.kind='soft' needs: set task.kind='hard', or "
            "take a teacher that was trained with softmax loss"
        )

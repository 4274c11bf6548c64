"""Distillation from a frozen teacher (DeiT, arXiv:2012.12877, section 4).

A student with a distillation token has two classifiers: one learns from the labels, the
other from the teacher, and at test time their logits are averaged. One without learns
from both with its single classifier. Letters: B images, L classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import models
from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.tasks.classification import (
    Classification,
    ClassificationConfig,
    softmax,
    top1,
)
from vit_jax.tasks.task import Tree
from vit_jax.weights import open_pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(ClassificationConfig):
    """Images, their labels, and a teacher's answers."""

    name: str = key("distillation", "What is learnt.")
    teacher: str = key(
        "",
        "Workdir, weights or their address, as `init` takes; read at every start.",
        changes_result=False,
        of_host=True,
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

    def build(self, model: Model, data: DataConfig) -> "Distillation":
        return Distillation(self, model, data)


class Distillation(Classification):
    """See `task.Task`; the state beside the parameters is the teacher.

    Raises:
      UserError: there is no teacher, or it has other classes or another kind of image.
    """

    def __init__(self, config: DistillationConfig, model: Model, data: DataConfig):
        super().__init__(config, model, data)
        if not config.teacher:
            raise UserError(
                "task.teacher is empty: name a workdir, a file or folder with weights, or "
                "an address, as `init` takes"
            )
        self._teacher = open_pretrained(config.teacher)
        options = self._teacher.options
        for name, own in (
            ("num_classes", data.num_classes),
            ("channels", data.channels),
        ):
            if options[name] != own:
                raise UserError(
                    f"task.teacher={config.teacher!r} has {name}={options[name]}, but "
                    f"data.{name}={own}: take another teacher"
                )
        size = tuple(data.image_size)
        if tuple(options["image_size"]) != size:
            raise UserError(
                f"task.teacher={config.teacher!r} is for images of "
                f"{tuple(options['image_size'])}, but data.image_size={size}: fine-tune "
                "it at that size first, or take another teacher"
            )
        # Where the student computes, which may be planned for another machine.
        options = options | {"platform": model.options.get("platform")}
        self._network = models.create(**options)

    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        params, _ = super().init(rng)
        return params, {"teacher": self._network.init(rng)}

    def load(self) -> Tree:
        return {"teacher": self._teacher.params}

    def loss(self, params, extra, batch, rng):
        images = batch["image"].astype(self.model.options["dtype"])
        outputs = self.model.apply(params, images, train=True, key=rng)
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
        return loss, (metrics, None)

    def _of_teacher(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """Normalises images as the teacher was trained on; they are as the student's."""
        preprocess, data = self._teacher.preprocess, self._data
        if preprocess is None:
            return images
        # One number, or one a channel.
        mean, std = np.asarray(data.mean), np.asarray(data.std)
        scale = (std / preprocess.std).astype(np.float32).reshape(1, 1, 1, -1)
        shift = (mean - preprocess.mean) / preprocess.std
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

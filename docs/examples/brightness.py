"""Regression of the mean brightness of an image, a task without labels."""

import dataclasses

import jax.numpy as jnp

from vit_jax.tasks.task import ImageTask, TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrightnessConfig(TaskConfig):
    """The mean of all pixels, from the mean feature."""

    def build(self, model, data, run, saved=None):
        return Brightness(model, data)


class Brightness(ImageTask):
    def init(self, rng):
        return self.model.init(rng), None

    def loss(self, params, extra, batch, rng):
        outputs = self.model.apply(params, batch["image"], train=True, key=rng)
        error = outputs["pre_logits"].mean(-1) - batch["image"].mean((1, 2, 3))
        loss = jnp.square(error).mean()
        return loss, ({"loss": loss}, None)

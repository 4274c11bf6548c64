"""Regression of the mean brightness of an image, a task without labels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.transforms import device as transforms
from vit_jax.data.transforms import parse
from vit_jax.tasks.task import Task, TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrightnessConfig(TaskConfig):
    """The mean of all pixels, from the mean feature."""

    def build(self, model, data, run, saved=None):
        return Brightness(model, data)


class Brightness(Task):
    def __init__(self, model, data):
        self.model, self.data = model, data
        self.ops = parse.parse_train(data.train_transform, data.image_size).device

    def batch_spec(self, batch_size):
        shape = batch_size, *self.data.image_size, self.data.channels
        return {
            "image": jax.ShapeDtypeStruct(shape, np.uint8),
            "index": jax.ShapeDtypeStruct((batch_size,), np.uint32),
        }

    def init(self, rng):
        return self.model.init(rng), None

    def prepare(self, batch, rng):
        images, no_labels = batch["image"], jnp.zeros((len(batch["image"]), 1))
        images, _ = transforms.apply(self.ops, images, no_labels, batch["index"], rng)
        return {"image": transforms.normalize(images, self.data.mean, self.data.std)}

    def loss(self, params, extra, batch, rng):
        outputs = self.model.apply(params, batch["image"], train=True, key=rng)
        error = outputs["pre_logits"].mean(-1) - batch["image"].mean((1, 2, 3))
        loss = jnp.square(error).mean()
        return loss, ({"loss": loss}, None)

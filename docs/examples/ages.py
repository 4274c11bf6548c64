"""The age of whoever is on an image: a data set, a field and a task that learns it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.decode import DamagedImage
from vit_jax.data.fields.base import Field
from vit_jax.data.sources.base import Source
from vit_jax.tasks.task import ImageTask, TaskConfig


class People(Source):
    """Made images; the older, the darker."""

    class_names, images, labels = (), None, None

    def __len__(self):
        return 40

    def __getitem__(self, i):
        pixels = np.random.default_rng(i).integers(0, 256 - 3 * i, (8, 8, 1), np.uint8)
        return {"image": pixels, "age": 20 + i}

    def describe(self, i):
        return f"person {i}"

    def record_id(self, i):
        return f"people/{i}"


def open_source(data, split):
    return People()


@dataclasses.dataclass(frozen=True)
class Age(Field):
    """Age in years, float32."""

    name = "age"
    in_eval = True  # For metrics of held-out images.

    @classmethod
    def of(cls, data, source):
        return cls()

    def spec(self, size):
        return (), "float32"

    def read(self, record, size):
        if "age" not in record:
            raise DamagedImage("has no age")
        return record["age"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgeConfig(TaskConfig):
    """The squared error of the age in decades, from the mean feature."""

    def build(self, model, data, run, saved=None):
        return AgeTask(model, data)


class AgeTask(ImageTask):
    def batch_spec(self, batch_size):
        age = jax.ShapeDtypeStruct((batch_size,), jnp.float32)
        return super().batch_spec(batch_size) | {"age": age}

    def prepare(self, batch, rng):
        return super().prepare(batch, rng) | {"age": batch["age"]}

    def init(self, rng):
        return self.model.init(rng), None

    def loss(self, params, extra, batch, rng):
        outputs = self.model.apply(params, batch["image"], train=True, key=rng)
        loss = jnp.square(decades_off(outputs, batch["age"])).mean()
        return loss, ({"loss": loss}, None)

    def held_out_metrics(self, params, extra, batch, rng):
        outputs = self.model.apply(params, batch["image"])
        return {"years_off": jnp.abs(10 * decades_off(outputs, batch["age"]))}


def decades_off(outputs, age):
    """Returns the error of each age, (B,)."""
    return outputs["pre_logits"].mean(-1) - age / 10

"""Shows predictions of the pretraining task, if a file of weights includes the task."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.config import loading
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.data.preprocess import Preprocess
from vit_jax.models import Model
from vit_jax.tasks import TASKS
from vit_jax.tasks.task import Pictures
from vit_jax.weights.pretrained import Pretrained

Draw = Callable[[dict, jax.Array], Pictures]  # Parameters and images to `Pictures`.


def pictures(
    pretrained: Pretrained, model: Model, preprocess: Preprocess
) -> Draw | None:
    """Builds the function that shows predictions of the pretraining task.

    Args:
      pretrained: weights, opened with `with_task=True`.
      model: network of the weights, at the size of the images.
      preprocess: preprocessing of the images.

    Returns:
      Function from the network's parameters and normalised images (B, Y, X, C) to
      `Task.pictures`; the mask of an image depends only on its index in the batch. None
      if the weights do not include the task, or the task predicts no images.
    """
    kind = TASKS.get(pretrained.objective.get("name", ""))
    if kind is None or not kind.has_pictures or not pretrained.task_params:
        return None
    data = DataConfig(
        image_size=tuple(preprocess.image_size),
        channels=model.image_shape[-1],
        **preprocess.data_keys(),
    )
    config = loading.complete(kind, pretrained.objective, "task.")
    task = config.build(model, data, RunLength(1, 1.0))
    others = jax.device_put(pretrained.task_params)

    def draw(network, images):
        params = {"network": network, **others}
        index = jnp.arange(len(images), dtype=jnp.uint32)
        batch = {"image": images, "index": index}
        return task.pictures(params, None, batch, jax.random.key(0))

    return draw

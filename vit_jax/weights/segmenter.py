"""The segmentation head of a checkpoint."""

from collections.abc import Callable

import jax

from vit_jax.errors import UserError
from vit_jax.models import Model, segmenter
from vit_jax.weights.pretrained import Pretrained


def has_segmenter(pretrained: Pretrained) -> bool:
    """Returns whether a checkpoint that was read `with_task` classifies pixels."""
    return segmenter.PARAMS in pretrained.task_params


def segmenter_of(
    pretrained: Pretrained, model: Model
) -> Callable[[dict, jax.Array], jax.Array]:
    """Returns the segmentation head as a function of parameters and normalised images.

    Args:
      pretrained: checkpoint that was read `with_task`.
      model: network of the checkpoint, perhaps for another image size.

    Raises:
      UserError: the checkpoint has no segmentation head.
    """
    if not has_segmenter(pretrained):
        raise UserError(
            f"{pretrained.source} has no segmentation head: give a run with "
            "task.name='segmentation'"
        )
    params, task = pretrained.task_params, pretrained.task
    keys = task["head"], task["layers"], task["width"], pretrained.num_classes
    built = segmenter.build(model, *keys)
    head = jax.device_put(params[segmenter.PARAMS])
    means = jax.device_put(params[segmenter.MEANS])
    return lambda network, images: built.logits(network, head, means, images)

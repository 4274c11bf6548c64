"""The head for masks of a checkpoint."""

from collections.abc import Callable

import jax

from vit_jax.errors import UserError
from vit_jax.models import Model, segmenter
from vit_jax.weights.pretrained import Pretrained


def has_segmenter(pretrained: Pretrained) -> bool:
    """Returns whether a checkpoint, read `with_task`, classifies pixels."""
    return segmenter.PARAMS in pretrained.task_params


def segmenter_of(
    pretrained: Pretrained, model: Model
) -> Callable[[dict, jax.Array], jax.Array]:
    """Returns a function of the network's parameters and normalised images, see `Segmenter`.

    Args:
      pretrained: checkpoint that was read `with_task`.
      model: its network, perhaps for images of another size.

    Raises:
      UserError: the checkpoint has no head for masks.
    """
    if not has_segmenter(pretrained):
        raise UserError(
            f"{pretrained.source} has no head for masks: give a run with "
            "task.name='segmentation'"
        )
    params, task = pretrained.task_params, pretrained.task
    keys = task["head"], task["layers"], task["width"], pretrained.num_classes
    built = segmenter.build(model, *keys)
    head = jax.device_put(params[segmenter.PARAMS])
    means = jax.device_put(params[segmenter.MEANS])
    return lambda network, images: built.logits(network, head, means, images)

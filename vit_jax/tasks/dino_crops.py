"""Crops of images for DINO, cut by the loader and transformed on the device.

Letters: B images, G large and S small crops of each, Y by X and y by x pixels, C channels.
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import device as transforms
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.tasks.masking import no_labels
from vit_jax.tasks.task import Batch

NUM_LARGE = 2  # Large crops per image, the only ones that the teacher gets.


class Crops:
    """Large and small crops of images, with separate transforms.

    Args:
      large_transforms: transforms of the first and of the second large crop.
      small_transform: transforms of the small crops.
      data: `config.data`; its `train_transform` ends with `multi_crop`.

    Attributes:
      shapes: "image": (G, Y, X, C) and, if there are small crops, "small_crops":
        (S, y, x, C).
      num_small: number of small crops per image.

    Raises:
      UserError: the data has no crops, or a transform mixes or resizes them.
    """

    def __init__(
        self, large_transforms: tuple[str, ...], small_transform: str, data: DataConfig
    ):
        host, device = parse.parse_train(data.train_transform, data.image_size)
        self.shapes = {}
        if host and host[-1].output_shapes:
            self.shapes = host[-1].output_shapes(data.channels)
        if device or self.shapes.get("image", ())[:1] != (NUM_LARGE,):
            raise UserError(
                f"data.train_transform={data.train_transform!r} with task.name='dino' "
                "must end with multi_crop: move the transforms after it to "
                "task.large_transforms and task.small_transform"
            )
        self.num_small = self.shapes.get("small_crops", (0,))[0]
        lines = [(line, "task.large_transforms") for line in large_transforms]
        lines.append((small_transform, "task.small_transform"))
        self._data = data
        self._ops = [_device_ops(line, where, data) for line, where in lines]

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns image (B, G, Y, X, C), small_crops (B, S, y, x, C) and index (B,)."""
        return {
            name: jax.ShapeDtypeStruct((batch_size, *shape), np.uint8)
            for name, shape in self.shapes.items()
        } | {"index": jax.ShapeDtypeStruct((batch_size,), np.uint32)}

    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Returns image and small_crops, transformed and normalised."""
        crops = {
            "image": [batch["image"][:, i] for i in range(NUM_LARGE)],
            "small_crops": [batch["small_crops"][:, i] for i in range(self.num_small)],
        }
        prepared = {}
        for name, views in crops.items():
            for i, view in enumerate(views):
                number = i if name == "image" else NUM_LARGE + i
                view, _ = transforms.apply(
                    self._ops[min(number, NUM_LARGE)],
                    view,
                    no_labels(batch),
                    batch["index"],
                    jax.random.fold_in(rng, number),
                )
                view = transforms.normalize(view, self._data.mean, self._data.std)
                prepared.setdefault(name, []).append(view)
        return {name: jnp.stack(views, axis=1) for name, views in prepared.items()}


def _device_ops(line: str, where: str, data: DataConfig) -> tuple:
    """Parses transforms that run on the device, keep the size and mix no examples."""
    host, device = parse.parse_train(line, data.image_size)
    wrong = [*host, *(op for op in device if op.output_size or op.mixes_examples)]
    if wrong:
        raise UserError(
            f"{where}={line!r}: {type(wrong[0]).__name__} runs in the loader, resizes "
            "crops or mixes images: remove it"
        )
    return device

"""Large and small crops of images, which DINO, DINOv2 and DINOv3 learn from.

The loader cuts the crops (`multi_crop`); everything after that runs on the device.
Letters: B images, G large crops of Y by X pixels and S small crops of y by x pixels per
image, C channels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.data.config import DataConfig
from vit_jax.data.fields.image import check_colors
from vit_jax.data.transforms import device as device_transforms
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.models import resizing
from vit_jax.tasks.task import Batch, transform

NUM_LARGE = 2  # Large crops per image, the only ones that the teacher gets.

Sides = tuple[int, int]


class CropSizes(NamedTuple):
    """Height and width of the crops of a batch, in pixels.

    Attributes:
      share: fraction of the batches that have these sizes.
      loaded: size of large crops as the loader cuts them, and as an anchor gets them.
      large: size of large crops as the student and its teacher get them.
      small: size of small crops; None without small crops.
    """

    share: float
    loaded: Sides
    large: Sides
    small: Sides | None


class Crops:
    """Large and small crops of images, with separate transforms.

    Args:
      task: name of the task, for messages.
      large_transforms: transforms of the first and of the second large crop.
      small_transform: transforms of the small crops.
      data: `config.data`; its `train_transform` ends with `multi_crop`.

    Attributes:
      sizes: possible sizes of the crops; each batch has one of them.
      num_small: number of small crops per image.
      ops: transforms of the first large crop, of the second one, and of small crops.

    Raises:
      UserError: the data has no crops, or none of `data.image_size`; or a transform
        mixes or resizes crops.
    """

    scale = 1.0  # Side of loaded large crops divided by that of the student's.

    def __init__(
        self,
        task: str,
        large_transforms: tuple[str, ...],
        small_transform: str,
        data: DataConfig,
    ):
        device, views = data.transforms.device, data.transforms.views
        self._shapes = views.output_shapes(data.channels) if views else {}
        if device or self._shapes.get("image", ())[:1] != (NUM_LARGE,):
            raise UserError(
                f"data.train_transform={data.train_transform!r} with task.name={task!r} "
                "must end with multi_crop: move the transforms after it to "
                "task.large_transforms and task.small_transform"
            )
        self.num_small = self._shapes.get("small_crops", (0,))[0]
        lines = [(line, "task.large_transforms") for line in large_transforms]
        lines.append((small_transform, "task.small_transform"))
        self._data = data
        self.ops = [_device_ops(line, where, data) for line, where in lines]
        made = views.alternatives()
        total = sum(weight for _, weight in made)
        self.sizes = [
            self._sizes(op.output_shapes(data.channels), weight / total)
            for op, weight in made
        ]
        if tuple(data.image_size) not in [sizes.large for sizes in self.sizes]:
            sides = tuple(round(self.scale * side) for side in data.image_size)
            name = "size" if made[0][0] == views else "one of the sizes"
            raise UserError(
                f"data.train_transform={data.train_transform!r} with task.name={task!r} "
                f"must cut large crops of {sides}, data.image_size times "
                f"{self.scale:g}: set {name} of multi_crop, or data.image_size"
            )

    def _sizes(self, shapes: dict[str, tuple[int, ...]], share: float) -> CropSizes:
        loaded = tuple(shapes["image"][1:3])
        large = tuple(round(side / self.scale) for side in loaded)
        exact = [side * self.scale for side in large]  # Such as 440.00000000000006.
        if not np.allclose(exact, loaded, rtol=1e-6):
            raise UserError(
                f"task.gram_scale={self.scale:g}: large crops of {loaded} that "
                f"data.train_transform={self._data.train_transform!r} cuts, divided by "
                "it, are not whole pixels: change one of them"
            )
        small = tuple(shapes["small_crops"][1:3]) if self.num_small else None
        return CropSizes(share, loaded, large, small)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns image (B, G, Y, X, C), small_crops (B, S, y, x, C) and index (B,).

        If the crops of batches have several sizes, these are the largest.
        """
        return {
            name: jax.ShapeDtypeStruct((batch_size, *shape), self._data.pixels)
            for name, shape in self._shapes.items()
        } | {"index": jax.ShapeDtypeStruct((batch_size,), np.uint32)}

    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Returns image and small_crops, transformed and normalised."""

        def view(number, ops, images):
            key = jax.random.fold_in(rng, number)
            one = {"image": images, "index": batch["index"]}
            return transform(ops, self._data, one, key)[0]

        large = [view(i, self.ops[i], batch["image"][:, i]) for i in range(NUM_LARGE)]
        prepared = {"image": jnp.stack(large, axis=1)}
        if self.num_small:
            # One program for all crops: separate ones would take minutes to compile.
            numbers = NUM_LARGE + jnp.arange(self.num_small)
            each = lambda number, images: view(number, self.ops[NUM_LARGE], images)
            crops = batch["small_crops"]
            prepared["small_crops"] = jax.vmap(each, (0, 1), 1)(numbers, crops)
        return prepared


class AnchoredCrops(Crops):
    """Crops that include the large ones for an anchor: larger and not distorted.

    Args:
      *args: arguments of `Crops`.
      scale: side of the loaded crops, which the anchor gets, divided by the side of the
        student's crops, which are resized from them.

    Raises:
      UserError: `Crops` raised it; loaded crops divided by `scale` are not whole
        pixels; or transforms of large crops move pixels.
    """

    def __init__(self, *args, scale: float):
        self.scale = scale
        super().__init__(*args)
        for op in (*self.ops[0], *self.ops[1]):
            if op.moves_pixels:
                raise UserError(
                    f"task.gram_weight with {type(op).__name__} in task.large_transforms: "
                    "the anchor's crops are not transformed, so its patches would "
                    "differ: remove it"
                )

    def prepare(self, batch, rng):
        """Returns image, small_crops and anchor (B, G, Y, X, C), normalised."""
        large = batch["image"]
        flat = large.reshape(-1, *large.shape[2:])
        anchor = device_transforms.normalize(flat, self._data.mean, self._data.std)
        sides = next(s.large for s in self.sizes if s.loaded == large.shape[2:4])
        image = _resize(flat, sides).reshape(*large.shape[:2], *sides, -1)
        prepared = super().prepare(batch | {"image": image}, rng)
        return prepared | {"anchor": anchor.reshape(large.shape)}


def corner_crops(images: Float[Array, "B Y X C"]) -> Float[Array, "B G Y X C"]:
    """Returns the upper left and the lower right part of images, at the images' size.

    A part has three quarters of each side, rounded up, so that the middle of the image
    is in both.

    Args:
      images: images, normalised.
    """
    size = images.shape[1:3]
    y, x = (-(-3 * side // 4) for side in size)
    parts = images[:, :y, :x], images[:, -y:, -x:]
    resize = jax.vmap(lambda part: resizing.resize_grid(part, size, "bicubic"))
    return jnp.stack([resize(part.astype(jnp.float32)) for part in parts], axis=1)


def _resize(images: Array, size: tuple[int, int]) -> Array:
    """Resizes images (B, Y, X, C) as Pillow's bicubic filter does; keeps the dtype."""
    if images.shape[1:3] == tuple(size):
        return images
    resized = jax.vmap(lambda x: resizing.resize_grid(x, size, "bicubic"))(
        images.astype(jnp.float32)
    )
    most = jnp.iinfo(images.dtype).max
    return jnp.round(resized).clip(0, most).astype(images.dtype)


def _device_ops(line: str, where: str, data: DataConfig) -> tuple:
    """Parses device transforms, which must keep the size and not mix examples."""
    host, device = parse.parse_train(line, data.image_size)
    wrong = [*host, *(op for op in device if op.output_size or op.mixes_examples)]
    if wrong:
        raise UserError(
            f"{where}={line!r}: {type(wrong[0]).__name__} runs in the loader, resizes "
            "crops or mixes images: remove it"
        )
    check_colors(device, data, where)
    return device

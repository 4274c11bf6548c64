"""The preprocessing of weights as a function of images, without the network."""

import dataclasses
import os
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array, Float, Num

from vit_jax import models, weights
from vit_jax.api import images as given_images
from vit_jax.api.images import Images
from vit_jax.api.models import check_names, sides
from vit_jax.api.open_network import WeightsArguments, at_step
from vit_jax.config import arguments
from vit_jax.data.preprocess import FIELDS, Preprocess, checked_fields
from vit_jax.data.transforms import device
from vit_jax.errors import UserError
from vit_jax.models import patches
from vit_jax.models.patches import PatchSequences
from vit_jax.weights.network_images import prepare_pixels

_checked = arguments.checked(WeightsArguments)


@dataclasses.dataclass(frozen=True)
class ImagePreprocess:
    """Prepares images for a network on the host, in NumPy; instances can be pickled.

    An image is a path, the content of a file, an array of uint8 (height, width,
    channels) or grey (height, width), or a PIL image; several are a list or an array
    with one more dimension. So an instance is a function for `map` of Grain, and in
    `tf.numpy_function` for tf.data.

    Attributes:
      how: sizes, crop, mean and standard deviation.
      channels: number of channels of the network's images, C.

    Example:
      >>> import numpy as np, vit_jax
      >>> preprocess = vit_jax.load_preprocess("runs/digits", tell=lambda line: None)
      >>> image = np.zeros((9, 8, 1), np.uint8)
      >>> preprocess(image).shape, preprocess([image, image]).shape
      ((8, 8, 1), (2, 8, 8, 1))
      >>> pixels = np.stack([preprocess.resize(image)] * 2)
      >>> pixels.dtype, preprocess.normalize(pixels).shape
      (dtype('uint8'), (2, 8, 8, 1))
    """

    how: Preprocess
    channels: int

    def __call__(
        self, images: Images
    ) -> Float[np.ndarray, "*B h w C"] | PatchSequences:
        """Resizes, crops and normalises one image or several; float32.

        Raises:
          UserError: an image cannot be read.
        """
        return self.normalize(self.resize(images))

    def resize(self, images: Images) -> Num[np.ndarray, "*B h w C"] | PatchSequences:
        """Resizes and crops one image or several, whose pixels stay integers.

        Raises:
          UserError: an image cannot be read.
        """
        each = [
            given_images.prepare(one, self.how, self.channels, prepare_pixels)
            for one in given_images.listed(images, self.channels)
        ]
        return (
            each[0]
            if given_images.is_single(images, self.channels)
            else patches.stack(each)
        )

    def normalize(
        self, pixels: Num[np.ndarray | Array, "*B h w C"] | PatchSequences
    ) -> Float[np.ndarray | Array, "*B h w C"] | PatchSequences:
        """Normalises results of `resize`, also within a jitted function; float32.

        Integers are a quarter of the bytes to send to a device.
        """
        how = self.how

        def normalize(x):
            if x.ndim == 3:
                return device.normalize(x[None], how.mean, how.std)[0]
            return device.normalize(x, how.mean, how.std)

        return patches.map_pixels(normalize, pixels)


@_checked
def load_preprocess(
    source: str | os.PathLike,
    *,
    image_size: int | Sequence[int] | None = None,
    step: int | None = None,
    num_heads: int = 0,
    architecture: str = "",
    tell: Callable[[str], None] = print,
    **fields,
) -> ImagePreprocess:
    """Opens the preprocessing of weights, see `ImagePreprocess`.

    Args:
      source, image_size, step, num_heads, architecture, tell: see `load_model`.
      **fields: fields of `vit_jax.weights.Preprocess` that replace those stored with
        the weights, such as `crop_fraction=1.0`.

    Raises:
      UserError: the weights cannot be opened, or an argument does not fit them.

    Example:
      >>> import numpy as np, vit_jax
      >>> preprocess = vit_jax.load_preprocess("runs/digits", tell=lambda line: None)
      >>> preprocess(np.zeros((8, 8, 1), np.uint8)).dtype
      dtype('float32')
    """
    check_names(fields)
    taken = checked_fields(fields)
    if unknown := sorted(fields.keys() - taken.keys()):
        raise UserError(
            f"{unknown[0]}={fields[unknown[0]]!r}: not one of {', '.join(sorted(FIELDS))}"
        )
    if image_size is not None:
        taken |= {"image_size": sides(image_size), "cut": (0, 0)}
    pretrained, how = weights.open_weights(
        at_step(source, step),
        taken,
        use_ema=True,
        num_heads=num_heads,
        architecture=architecture,
        tell=tell,
    )
    channels = models.create(**pretrained.options).image_shape[-1]
    how.check(channels)
    return ImagePreprocess(how.upright(), channels)

"""Images in a network's input format: prepared one by one, normalised in batches."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from vit_jax.data.config import DataConfig
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.transforms import device
from vit_jax.models import patches
from vit_jax.models.patches import PatchSequences


def prepare_image(
    data: bytes | Num[np.ndarray, "..."],
    preprocess: Preprocess,
    channels: int = 3,
    name: str = "",
) -> Num[np.ndarray, "h w c"] | PatchSequences:
    """Decodes, resizes and crops one image.

    Args:
      data: content of an image file, or an array of its pixels, see `bands.read`.
      preprocess: bands, depth, size, interpolation and crop.
      channels: number of channels of the model.
      name: name of the image for warnings.

    Returns:
      The image in the input format of the network, as from `prepare_pixels`.

    Raises:
      DamagedImage: the data are not a readable image, or it is too thin to resize.
    """
    return prepare_pixels(preprocess.read(data, channels, name), preprocess)


def prepare_pixels(
    image: Num[np.ndarray, "H W C"], preprocess: Preprocess
) -> Num[np.ndarray, "h w C"] | PatchSequences:
    """Resizes and crops one image, which is given at its original size.

    Returns:
      Pixels with the size and type of `preprocess.image_size` and `preprocess.pixels`;
      with `max_tokens`, patches and their grid, as NumPy arrays with one row.

    Raises:
      DamagedImage: the image is too thin to resize or too small to crop.
    """
    prepared = preprocess.prepare(image)
    if isinstance(prepared, dict):
        return patches.of_batch(prepared, prepared["image"])
    return prepared


def network_input(
    images: Num[Array | np.ndarray, "B h w c"] | PatchSequences,
    preprocess: Preprocess | DataConfig,
    dtype: str,
) -> Float[Array, "B h w c"] | PatchSequences:
    """Normalises a batch of prepared images for the network.

    Args:
      images: outputs of `prepare_image`; they may be JAX tracers.
      preprocess: preprocessing, or `config.data`, with mean and standard deviation.
      dtype: dtype of the network's computation.
    """

    def normalize(pixels):
        pixels = jnp.asarray(pixels)
        return device.normalize(pixels, preprocess.mean, preprocess.std).astype(dtype)

    return patches.map_pixels(normalize, images)

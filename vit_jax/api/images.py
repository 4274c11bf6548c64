"""Images as arguments: paths, folders, bytes, arrays and PIL images."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from PIL import Image

from vit_jax.config import fields
from vit_jax.data import decode, image_files
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models.patches import PatchSequences

Images = (
    str
    | os.PathLike
    | bytes
    | bytearray
    | memoryview
    | np.ndarray
    | jax.Array
    | Image.Image
    | Sequence["str | os.PathLike | bytes | np.ndarray | jax.Array | Image.Image"]
)


def _plain(image: object) -> object:
    """Converts views of bytes to bytes, and arrays of other libraries to NumPy."""
    if isinstance(image, bytearray | memoryview) and memoryview(image).ndim == 1:
        return bytes(image)
    is_array = isinstance(image, memoryview) or hasattr(image, "__array__")
    return np.asarray(image) if is_array else image


def is_single(images: Images, channels: int) -> bool:
    """Returns whether `images` is a single image for a network of C channels."""
    images = _plain(images)
    if isinstance(images, np.ndarray):
        if images.ndim == 3 and channels not in (1, 3) and channels == len(images):
            return True  # Bands come first; this network reads no grey images.
        # Three dimensions without channels are a batch of grey images, as in `train`.
        return images.ndim < 3 or (
            images.ndim == 3 and images.shape[-1] in (1, 3, 4, channels)
        )
    path = isinstance(images, str | os.PathLike)
    return isinstance(images, bytes | Image.Image) or (
        path and not os.path.isdir(images)
    )


def listed(images: Images, channels: int) -> list:
    """Returns a list of images, with each folder replaced by the images in it.

    Raises:
      UserError: the list is empty, or an element is not an image.
    """
    images = _plain(images)
    if is_single(images, channels):
        return [images]
    if isinstance(images, str | os.PathLike):
        images = [images]
    kinds = str | os.PathLike | bytes | np.ndarray | Image.Image
    given = list(images) if isinstance(images, np.ndarray | Iterable) else [images]
    if not given:
        raise UserError("images=[]: give at least one")
    single = []
    for one in map(_plain, given):
        if not isinstance(one, kinds) or isinstance(images, Mapping):
            raise UserError(
                f"images={fields.shown(images)}: give a path, a folder, bytes, an array of uint8, a "
                "PIL image, or a list of these"
            )
        if isinstance(one, str | os.PathLike) and os.path.isdir(one):
            single += [path for _, path in image_files.find_some([os.fspath(one)])]
        else:
            single.append(one)
    return single


def prepare(
    image,
    preprocess: Preprocess,
    channels: int,
    convert: Callable = lambda pixels, preprocess: pixels,
) -> np.ndarray | PatchSequences:
    """Reads one image, and returns what `convert` makes of it.

    Args:
      image: one element of what `listed` returns.
      preprocess: how the network's images are prepared.
      channels: number of channels of the network's images.
      convert: function of the pixels, at their original size, and `preprocess`; the
        default returns the pixels.

    Raises:
      UserError: the image cannot be read.
    """
    name, data = "the image", image
    is_photograph = preprocess.form(channels).is_photograph
    if isinstance(image, str | os.PathLike):
        name = os.fspath(image)
        try:
            with open(name, "rb") as file:
                data = file.read()
        except OSError as error:
            raise UserError(f"{name} cannot be read ({error.strerror})") from error
    elif isinstance(image, Image.Image):
        name = f"the image of mode {image.mode}"
        with _readable(name):
            data = (
                decode.to_pixels(image, channels) if is_photograph else np.array(image)
            )
    if is_photograph and isinstance(data, np.ndarray):
        data = data[..., None] if data.ndim == 2 else data
        if data.dtype != np.uint8 or data.ndim != 3 or not data.size:
            raise UserError(
                f"image of {data.dtype} {data.shape}: give uint8 (height, width, channels)"
            )
    with _readable(name):
        return convert(preprocess.read(data, channels, name), preprocess)


@contextlib.contextmanager
def _readable(name: str):
    try:
        yield
    except (decode.DamagedImage, OSError) as error:
        raise UserError(f"{name} {error}: give another image") from error

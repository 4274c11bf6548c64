"""Predicts the class of every pixel with a checkpoint that has a segmentation head.

Letters: H by W pixels, C channels, L classes.
"""

import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image

from vit_jax.command_line.files import replace_image, unique_stem, writing_out
from vit_jax.data import display, image_files, masks
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.evaluators.local_devices import LocalDevices
from vit_jax.evaluators.sliding_window import LabelMap, Sliding, T
from vit_jax.evaluators.whole_images import WholeImages
from vit_jax.models.segmenter import check_sequences
from vit_jax.weights import segmenter, surgery
from vit_jax.weights.network_images import network_input
from vit_jax.weights.pretrained import Pretrained

_OPACITY = 0.55  # Opacity of the colours over an image.


class PixelClassifier:
    """A checkpoint, ready to classify the pixels of images.

    Args:
      pretrained: checkpoint that was opened `with_task`.
      preprocess: preprocessing; bands, depth, normalisation, interpolation and the
        window size, or `max_tokens` and `patch`, are used.
      class_names: class names in label order; if empty those of the checkpoint, or else
        numbers.

    Attributes:
      class_names: one name per class.

    Raises:
      UserError: the checkpoint has no segmentation head or a different number of
        classes, or does not accept images of any size.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        preprocess: Preprocess,
        class_names: Sequence[str] = (),
    ):
        model, self._params = surgery.fit_network(pretrained, preprocess)
        self._segment = segmenter.segmenter_of(pretrained, model)
        if preprocess.max_tokens:
            check_sequences(pretrained.task["head"])
        classes = pretrained.num_classes
        names = tuple(class_names) or pretrained.class_names
        if names and len(names) != classes:
            raise UserError(
                f"there are {len(names)} class names, but {pretrained.source} has "
                f"{classes} classes of pixels: give --labels with one line per class"
            )
        self.class_names = names or tuple(f"class {k}" for k in range(classes))
        self._preprocess, self._channels = preprocess, model.image_shape[-1]
        self._devices = LocalDevices(model)

    def read(
        self, data: bytes | np.ndarray, name: str = ""
    ) -> Num[np.ndarray, "H W C"]:
        """Decodes an image at its original size.

        Raises:
          DamagedImage: the image cannot be read.
        """
        return self._preprocess.read(data, self._channels, name)

    def label_maps(
        self,
        images: Iterable[tuple[T, Num[np.ndarray, "H W C"] | None]],
        batch_size: int = 32,
        resize: str = "cover",
        overlap: float = 1 / 3,
    ) -> Iterator[tuple[T, LabelMap | None]]:
        """Yields the class of each pixel of each image, see `Sliding.label_maps`.

        With `max_tokens` each image is one sequence of patches, see `WholeImages`.

        Args:
          images: pairs of a name, which is returned, and an image of any size, see
            `read`.
          batch_size: number of windows per batch.
          resize, overlap: attributes of `Sliding`.

        Raises:
          UserError: the network does not accept images of any size, or `resize` or
            `overlap` is given with `max_tokens`, which uses no windows.
        """
        how = self._preprocess

        def of_pixels(params, pixels):
            # The segmenter rounds to the network's precision.
            return self._segment(params, network_input(pixels, how, "float32"))

        def logits_of(windows):
            return self._devices.run("", of_pixels, self._params, windows, batch_size)

        size = tuple(how.image_size)
        cutting = Sliding(size, resize, overlap, how.interpolation, tuple(how.mean))
        if how.max_tokens:
            cutting = WholeImages.of(how, cutting)
        return cutting.label_maps(images, logits_of, batch_size)


def predict(
    classifier: PixelClassifier,
    images: Iterable[image_files.Named],
    *,
    batch_size: int = 32,
    resize: str = "cover",
    threads: int | None = None,
) -> Iterator[tuple[str, tuple[np.ndarray, LabelMap] | str]]:
    """Classifies the pixels of any number of images, in their order.

    Args:
      classifier: classifier of the pixels.
      images: images from `image_files.find`.
      batch_size: number of windows per batch.
      resize: resizing of an image, see `Sliding`.
      threads: decoding threads; one per core, at most 8, if None.

    Yields:
      The name of an image, and the image with its classes, or why it cannot be read.
    """

    def load(image):
        return image[0], image_files.attempt(image, classifier.read)

    threads = threads or min(8, os.cpu_count() or 1)
    read = image_files.ahead(images, load, threads=threads, limit=threads)
    items = ((one, None if isinstance(one[1], str) else one[1]) for one in read)
    for (name, result), label_map in classifier.label_maps(items, batch_size, resize):
        yield name, result if label_map is None else (result, label_map)


def shares(label_map: LabelMap, num_classes: int) -> list[float]:
    """Returns the fraction of each class among the pixels that have a class."""
    counts = np.bincount(label_map[label_map >= 0], minlength=num_classes)
    return (counts / max(1, counts.sum())).tolist()


class Writer:
    """Writes masks and overlays to a folder.

    Args:
      folder: folder, which is created if it does not exist.
      num_classes: number of classes.

    Raises:
      UserError: the folder cannot be created.
    """

    def __init__(self, folder: str, num_classes: int):
        self._folder, self._colors = pathlib.Path(folder), masks.palette(num_classes)
        self._taken = {}
        with writing_out(folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def write(
        self, name: str, image: Num[np.ndarray, "H W C"], label_map: LabelMap
    ) -> dict[str, str]:
        """Writes the mask and the overlay of an image; returns their paths.

        Raises:
          UserError: a file cannot be written.
        """
        # Photographs in different folders may have the same name.
        stem = unique_stem(pathlib.PurePath(name).stem, self._taken)
        mask, over = (
            self._folder / f"{stem}_{end}" for end in ("mask.png", "overlay.jpg")
        )
        shown = Image.fromarray(overlay(image, label_map, self._colors))
        with writing_out(self._folder):
            replace_image(mask, picture(label_map, self._colors), "PNG")
            replace_image(over, shown, "JPEG", quality=90)
        return {"mask": str(mask), "overlay": str(over)}


def picture(label_map: LabelMap, colors: UInt8[np.ndarray, "L 3"]) -> Image.Image:
    """Returns a picture whose pixels are class numbers, with a palette of colours.

    More than 256 classes give a picture of 16 bits without colours.
    """
    if len(colors) > 256:
        return Image.fromarray(label_map.astype(np.uint16))
    image = Image.fromarray(label_map.astype(np.uint8), "P")
    image.putpalette(colors.tobytes())
    return image


def overlay(
    image: Num[np.ndarray, "H W C"],
    label_map: LabelMap,
    colors: UInt8[np.ndarray, "L 3"],
) -> UInt8[np.ndarray, "H W 3"]:
    """Returns an image with the colours of its classes drawn over it.

    Nothing is drawn at -1, nor of classes whose colour is black, which would darken the
    image: it is the colour of class 0, in many data sets the background.
    """
    shown = display.to_rgb(image)
    mixed = shown + _OPACITY * (colors[label_map].astype(np.float32) - shown)
    drawn = (label_map >= 0) & colors.any(1)[label_map]
    mixed = np.where(drawn[..., None], mixed, shown)
    return mixed.round().astype(np.uint8)

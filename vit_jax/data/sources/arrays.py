"""Data sets that are one array in memory, from which batches are gathered.

There are three: the user's arrays; the 1,797 handwritten digits in scikit-learn, real
images without a download (https://archive.ics.uci.edu/dataset/80, test part, 8x8 pixels
of 0..16); and synthetic images, for runs on a machine without the data set.
"""

import dataclasses
import importlib.util
import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Integer, UInt8

from vit_jax.config import fields
from vit_jax.data import bands, decode, splits
from vit_jax.data import groups as grouping
from vit_jax.data.config import MAX_CHANNELS, SYNTHETIC_CLASSES, DataConfig
from vit_jax.data.fields.target import check_precision
from vit_jax.data.fingerprint import Entries, in_memory
from vit_jax.data.sources.base import Numbered, SourceType, read_all
from vit_jax.data.splits import Numbering
from vit_jax.errors import UserError

DEFAULT_EXAMPLES = 64  # In each split of the synthetic set.
DIGIT_NAMES = tuple("0123456789")
_USUAL_CHANNELS = (1, 3)
_SHAPE = "not (N, H, W) or (N, H, W, channels); change the shape"
_SYNTHETIC_SPLITS = ("train", "val", "validation", "test")
_CELLS = 8  # The class pattern is a grid with this number of cells per side.
# Sets of small images up to this size are decoded once, when opened.
_MEMORY = 2**29  # Bytes.
_SMALL_IMAGE = 64  # Pixels per side.
IN_MEMORY = "in_memory"  # `data.name` of arrays from Python code.


@dataclasses.dataclass(frozen=True)
class ArraySource(Numbered):
    """Images, and labels or targets, in memory.

    `labels` and `targets`, (N, T), are None if they are not read; without a `numbering`
    records count from 0.
    """

    name: str
    images: UInt8[np.ndarray, "N H W C"]
    labels: Integer[np.ndarray, " N"] | None
    class_names: tuple[str, ...] = ()
    numbering: Numbering | None = None
    targets: Float[np.ndarray, "N T"] | None = None

    def __post_init__(self):
        if self.numbering is None:
            whole = Numbering(
                {self.name: len(self.images)}, [(self.name, range(len(self.images)))]
            )
            object.__setattr__(self, "numbering", whole)

    def __getitem__(self, i: int) -> dict:
        record = {"image": self.images[i]}
        if self.labels is not None:
            record["label"] = int(self.labels[i])
        if self.targets is not None:
            record["targets"] = self.targets[i]
        return record

    def entries(self) -> Entries:
        parts = self.numbering.parts
        names = [f"{name}/{number}" for name, part in parts for number in part]
        entries = in_memory(names, self.labels, self.images)
        if self.targets is None:
            return entries
        return entries._replace(more={"targets": zlib.crc32(self.targets.tobytes())})

    def without_images(self) -> "ArraySource":
        blank = np.broadcast_to(np.uint8(0), self.images.shape)
        return dataclasses.replace(self, images=blank)


def open_arrays(
    arrays: Mapping[str, tuple[np.ndarray, np.ndarray]],
    split: str,
    name: str,
    class_names: Sequence[str] = (),
    groups: Sequence[str] | None = None,
    *,
    num_targets: int = 0,
) -> ArraySource:
    """Returns a source of arrays, for use in a custom source (see custom.py).

    Args:
      arrays: split name -> images, (N, H, W, C) or grey (N, H, W), and labels,
        integers (N,). Images are uint8 or uint16, or other integers from 0 to 255,
        which are converted to uint8. If the number of bands is neither 1 nor 3, they
        may also be floats, with white at 1 as in files. For splits that are not
        selected only the length is checked: labels may be None or placeholders.
      split: split expression.
      name: name of the data set, for messages.
      class_names: names in label order; may be empty.
      num_targets: number of targets of an image (`data.targets`); if it is not 0, the
        arrays have numbers, (N,) or (N, num_targets), in place of labels, NaN where one
        is missing.
      groups: group of each image of the split "train", for "grouped_splits".

    Raises:
      UserError: the split does not exist or selects no record, or arrays have another
        type or shape.
    """
    sizes = {}
    for key, (images, labels) in arrays.items():
        sizes[key] = _length(f"{name} {key}: ", images, labels)
    parts_of = None
    if groups is not None:
        labels = np.asarray(arrays["train"][1])
        labels = np.zeros(len(labels), int) if num_targets else labels
        train = list(groups), labels.tolist()
        parts_of = grouping.parts_of({"train": train}, "group")
    numbering = Numbering.of(split, sizes, name, parts_of)
    for key in dict(numbering.parts):
        check_pair(
            f"{name} {key}: ", *arrays[key], class_names, num_targets=num_targets
        )

    image_parts, label_parts = [], []
    for key, part in numbering.parts:
        if isinstance(part, range):  # Without copies of the images.
            part = slice(part.start, part.stop, part.step)
        images, labels = (np.asarray(array)[part] for array in arrays[key])
        images = images if images.ndim == 4 else images[..., None]
        image_parts.append(images.astype(depth_of(images), copy=False))
        label_parts.append(labels)
    shapes = sorted({images.shape[1:] for images in image_parts})
    if len(shapes) > 1:
        raise UserError(
            f"{name} {split}: images of the shapes {' and '.join(map(str, shapes))}; "
            "make them equal, or open the splits one by one"
        )
    images, labels = np.concatenate(image_parts), np.concatenate(label_parts)
    if num_targets:
        targets = labels.astype(np.float32).reshape(len(labels), num_targets)
        return ArraySource(f"{name} {split}", images, None, (), numbering, targets)
    return ArraySource(f"{name} {split}", images, labels, tuple(class_names), numbering)


def open_digits(data: DataConfig, split: str) -> ArraySource:
    """Reads the digits into memory: 8x8 images, grey values 0..16 scaled to 0..255.

    Every fifth image of each class is in the split "test", the others in "train", so
    that the splits depend on no random stream.
    """
    # Read without importing scikit-learn, which would add 0.7 s to every start.
    (package,) = importlib.util.find_spec("sklearn").submodule_search_locations
    path = f"{package}/datasets/data/digits.csv.gz"
    table = np.loadtxt(path, np.int32, delimiter=",")
    pixels, labels = table[:, :64].reshape(-1, 8, 8), table[:, 64]
    test = np.zeros(len(labels), bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    images = np.round(pixels * (255 / 16)).astype(np.uint8)
    images = np.repeat(images[..., None], data.channels, axis=-1)
    parts = {"train": ~test, "test": test}
    arrays = {name: (images[part], labels[part]) for name, part in parts.items()}
    return open_arrays(arrays, split, "digits", DIGIT_NAMES)


def open_synthetic(
    split: str,
    image_size: Sequence[int],
    channels: int,
    num_classes: int,
    examples: int,
) -> ArraySource:
    """Generates labelled images that can be learnt: noise plus a class pattern.

    Images depend only on the split name, the record number and their shape. Record i
    has label i modulo `num_classes`. A split has `examples` images, or 64 if that is 0.
    """
    numbering = _synthetic_numbering(split, examples)
    records = [(name, number) for name, part in numbering.parts for number in part]
    shape = (*image_size, channels)
    images = [synthetic_image(*record, num_classes, shape) for record in records]
    labels = np.array([number % num_classes for _, number in records], np.int32)
    names = tuple(f"class {i}" for i in range(num_classes))
    return ArraySource(f"made {split}", np.stack(images), labels, names, numbering)


@dataclasses.dataclass(frozen=True)
class SyntheticMasks(Numbered):
    """Synthetic images of a grid of cells: a random class per cell, a colour per class.

    Masks, (H, W) uint16, have the class of each pixel. Images of `shape`, (H, W, C),
    are computed when they are read, with noise.
    """

    name: str
    numbering: Numbering
    num_classes: int
    shape: tuple[int, int, int]
    images = labels = None  # Not in memory.

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(f"class {i}" for i in range(self.num_classes))

    def __getitem__(self, i: int) -> dict:
        split, number = self.record_id(i).rsplit("/", 1)
        height, width, channels = self.shape
        key = zlib.crc32(f"masks of {split}".encode())
        cells = _random_bytes(key, int(number), 2 * _CELLS * _CELLS).view("<u2")
        mask = _spread(cells.reshape(_CELLS, _CELLS) % self.num_classes, height, width)
        colors = _random_bytes(0, 0, self.num_classes * channels).reshape(-1, channels)
        noise = _random_bytes(zlib.crc32(split.encode()), int(number), mask.size)
        noise = np.broadcast_to(noise.reshape(height, width, 1), self.shape)
        return {"image": noise // 4 + colors[mask] // 4 * 3, "mask": mask}

    def entries(self) -> Entries:
        sizes = np.full(len(self), math.prod(self.shape))
        more = {"masks": [(f"{self.num_classes} classes", 0)]}
        return super().entries()._replace(sizes=sizes, more=more)


def synthetic_image(
    split: str, number: int, num_classes: int, shape: tuple[int, int, int]
) -> UInt8[np.ndarray, "H W C"]:
    """Returns one image of shape (H, W, C) as a pure function of its arguments."""
    height, width, channels = shape
    noise = _random_bytes(zlib.crc32(split.encode()), number, height * width * channels)
    cells = _random_bytes(0, number % num_classes, _CELLS * _CELLS * channels)
    cells = _spread(cells.reshape(_CELLS, _CELLS, channels), height, width)
    # Halved, so that the sum stays within a byte.
    return noise.reshape(shape) // 2 + cells // 2


def _spread(cells: np.ndarray, height: int, width: int) -> np.ndarray:
    """Enlarges a square grid of cells."""
    rows, columns = (np.arange(size) * len(cells) // size for size in (height, width))
    return cells[rows][:, columns]


def _synthetic_numbering(split: str, examples: int) -> Numbering:
    sizes = dict.fromkeys(_SYNTHETIC_SPLITS, examples or DEFAULT_EXAMPLES)
    for name in splits.names(split):  # Recipes use splits of their data sets.
        sizes.setdefault(name, examples or DEFAULT_EXAMPLES)
    return Numbering.of(split, sizes, "synthetic")


def _random_bytes(key: int, counter: int, count: int) -> np.ndarray:
    bits = np.random.Philox(key=key, counter=[0, 0, 0, counter])
    return bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def small_in_memory(source, data: DataConfig):
    """Decodes a small set such as CIFAR into memory, so that batches are gathered.

    `source` is returned unchanged if the set is too large, has captions, masks or
    several labels per image or targets, has images of different sizes, or has a damaged
    image, which is left to `data.on_error`.
    """
    form = bands.PixelFormat.of(data)
    # For other images, bands would be chosen and values scaled a second time.
    several = data.has_labels and data.multi_label
    others = several or data.caption_key or data.mask_key or data.target_key
    if others or not form.is_photograph:
        return source
    try:
        shape = bands.read(source[0]["image"], form, exif=data.exif).shape
        if max(shape[:2]) > _SMALL_IMAGE or math.prod(shape) * len(source) > _MEMORY:
            return source
        images, labels = np.empty((len(source), *shape), np.uint8), []
        for i, record in enumerate(read_all(source)):
            image = bands.read(record["image"], form, exif=data.exif)
            if image.shape != shape:
                return source
            images[i] = image
            labels += [record["label"]] if "label" in record else []
    except decode.DamagedImage:
        return source
    labels = np.array(labels, np.int64) if labels else None
    return ArraySource(
        source.name, images, labels, source.class_names, source.numbering
    )


def check_pair(
    where: str,
    images: object,
    labels: object,
    class_names: Sequence[str],
    *,
    num_targets: int = 0,
) -> None:
    """Raises UserError, beginning with `where`, for arrays of a wrong kind.

    With `num_targets` the labels are numbers, see `open_arrays`.
    """
    _length(where, images, labels)
    images, labels = _array(where, "images", images), _array(where, "labels", labels)
    if problem := _problem(images):
        raise UserError(f"{where}images={describe(images)}: {problem}")
    if num_targets:
        _check_targets(where, labels, num_targets)
    else:
        check_labels(where, labels, class_names)


def _length(where: str, images: object, labels: object) -> int:
    """Returns the number of images, and checks that there are as many labels."""
    images = _array(where, "images", images)
    if not images.ndim:
        raise UserError(f"{where}images={describe(images)}: {_SHAPE}")
    if np.ndim(labels) and len(labels) != len(images):
        raise UserError(
            f"{where}{len(images)} images, but {len(labels)} labels; give one label per "
            "image"
        )
    return len(images)


def _array(where: str, name: str, values: object) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:  # Lists of different lengths.
        raise UserError(
            f"{where}{name}={fields.shown(values)}: not an array; give rows of equal "
            "lengths"
        ) from error


def check_labels(where: str, labels: np.ndarray, class_names: Sequence[str]) -> None:
    """Raises UserError unless labels are one class number per image."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{where}labels={describe(labels)}: not one whole number per image; "
            "take labels.argmax(1) of one-hot rows, labels.astype(int) of other numbers"
        )
    most = len(class_names) - 1 if class_names else np.inf
    for i in np.flatnonzero((labels < 0) | (labels > most))[:1]:
        more = f" to {most}, the number of class_names less 1" if class_names else ""
        raise UserError(
            f"{where}record {i} has label {labels[i]}; give labels from 0{more}"
        )


def _check_targets(where: str, targets: np.ndarray, count: int) -> None:
    """Raises UserError unless there are `count` finite numbers or NaN per image."""
    shape = (len(targets), count)
    shapes = (shape, shape[:1]) if count == 1 else (shape,)
    if targets.dtype.kind not in "uif" or targets.shape not in shapes:
        raise UserError(
            f"{where}targets={describe(targets)}: not {count} number(s) per image, as "
            f"data.target_key says; give an array of floats of the shape {shape}"
        )
    for i in np.flatnonzero(np.isinf(targets).reshape(len(targets), -1).any(1))[:1]:
        raise UserError(
            f"{where}record {i} has the targets {targets[i]}; give finite numbers, or NaN "
            "where one is missing"
        )
    for t, column in enumerate(targets.astype(np.float64).reshape(-1, count).T):
        known = column[~np.isnan(column)]
        if len(known):
            check_precision(known, f"{where}targets[:, {t}]")


def _problem(images: np.ndarray) -> str:
    """Returns the problem of images and its remedy; "" if they are valid."""
    shape, kind = images.shape, images.dtype.kind
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[-1] > MAX_CHANNELS):
        return _SHAPE
    if len(shape) == 4 and shape[1] in _USUAL_CHANNELS and shape[-1] > 3:
        return "channels are not last; take np.moveaxis(images, 1, -1)"
    # The range cannot be wrong, so a memmap need not be read.
    if images.dtype.name in bands.WHITE:
        return ""
    if kind == "f" and len(shape) == 4 and shape[-1] not in _USUAL_CHANNELS:
        return "" if np.isfinite(images).all() else "NaN or infinite; replace them"
    if kind not in "buif":
        return "not whole numbers from 0 to 255; make them one array of uint8"
    low, high = (images.min(), images.max()) if images.size else (0, 0)
    if kind in "ui" and 0 <= low <= high <= 255:
        return ""
    # Only the user knows whether white is 1 or 255 in floats.
    remedy = "scale them to 0..255 and take .round().astype('uint8')"
    if kind not in "ui" and 0 <= low <= high <= 1:
        remedy = "take (images * 255).round().astype('uint8')"
    return f"not whole numbers from 0 to 255; {remedy}"


def depth_of(images: np.ndarray) -> str:
    """Returns the smallest `data.pixels` for images that `check_pair` accepts."""
    if images.dtype.kind == "f":
        return "float32"
    is_wide = images.dtype.name == "uint16" and images.size and images.max() > 255
    return "uint16" if is_wide else "uint8"


def describe(values: np.ndarray) -> str:
    """Describes the dtype, shape and range of an array, for a message."""
    text = f"{values.dtype} {values.shape}"
    if values.size and np.issubdtype(values.dtype, np.number):
        text += f" from {values.min():g} to {values.max():g}"
    return text


def _synthetic(data: DataConfig, split: str) -> ArraySource | SyntheticMasks:
    classes = data.num_classes or SYNTHETIC_CLASSES
    size = data.image_size
    if data.mask_key:
        numbering = _synthetic_numbering(split, data.num_examples)
        shape = *size, data.channels
        return SyntheticMasks(f"made {split}", numbering, classes, shape)
    return open_synthetic(split, size, data.channels, classes, data.num_examples)


def _in_memory(data: DataConfig, split: str) -> ArraySource:
    raise UserError(
        f"data.name={data.name!r}: images that were given in Python are not stored: "
        "give them to vit_jax.train again, or name a data set"
    )


ARRAYS = SourceType(
    open=_in_memory,
    help="Arrays that `vit_jax.train` is given in Python.",
    needs_files=False,
)
DIGITS = SourceType(
    open=open_digits,
    help="8x8 handwritten digits, which come with scikit-learn.",
    needs_files=False,
)
SYNTHETIC = SourceType(
    open=_synthetic,
    help="Synthetic images of `data.image_size`, with labels or masks.",
    needs_files=False,
    generated=True,
    has_masks=True,
)

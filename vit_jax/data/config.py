"""Config of the data: which images are read, and how they are prepared."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from vit_jax.config.fields import Registry, key
from vit_jax.errors import UserError

# Default of `data.max_megapixels`: larger images are not decoded.
MAX_MEGAPIXELS = 100.0
# Largest size of the images that reach a model.
MAX_PIXELS = 100_000_000
ESTIMATE = "estimate"
# Values of `data.pixels`.
DEPTHS = ("uint8", "uint16", "float32")
MAX_CHANNELS = 512
SYNTHETIC_CLASSES = 10  # Classes of the synthetic set if `data.num_classes` is 0.
IGNORED = -1  # Label of a pixel without a class.
# Key -> function that checks it against other keys, imported if the key is set.
CHECKS = Registry(
    {
        "mask_key": "vit_jax.data.masks:check_config",
        "target_key": "vit_jax.data.fields.target:check_config",
        "bands": "vit_jax.data.bands:check_config",
    }
)
# Value of `match_classes` of an evaluation or a teacher -> function that matches the
# classes of data with a model's.
MATCHERS = Registry(
    {
        "names": "vit_jax.data.class_names:match",
        "position": "vit_jax.data.class_names:match_by_position",
    }
)
# Rules of keys that say where and how fast a host reads, but do not change the data.
OF_HOST = {"changes_result": False, "of_host": True}
# Keys for the location of a data set's images.
PLACE = ("data_dir", "image_key", "image_dir", "image_suffix")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Keys for reading data, which evaluations of weights need too."""

    name: str = key(
        "",
        'Data set: a name of TFDS, such as "cifar10"; one of `SOURCES` in '
        'vit_jax/data/sources/__init__.py; or "my_module:open_source", which runs the '
        "code of that module.",
    )
    data_dir: str = key(
        "",
        'Folder of the data set; "" is TFDS\'s default, ~/tensorflow_datasets.',
        **OF_HOST,
    )
    split: str = key(
        "train",
        "Training split, in the slicing syntax of TFDS, which all sources understand.",
        in_step=False,
    )
    num_examples: int = key(
        0,
        "Number of images in `data.split`, for planning a run without its data; it is "
        "checked when the data is read. 0 is unknown.",
    )
    image_key: str = key(
        "image",
        "Location of the images: a feature of TFDS, a column of a table or Parquet "
        'file, or, with `data.name="masks"`, a folder.',
        reason="data with other names; the command `finetune` sets it",
    )
    label_key: str = key(
        "label",
        "Location of the labels: a feature of TFDS, or a column of a table or Parquet "
        'file. In a table it may also be one column per class, such as "cat,dog", with '
        "values 1, 0, -1 (counts as 0) or empty.",
        reason="data with other names; the command `finetune` sets it",
    )
    image_dir: str = key(
        "",
        "Folder that the paths in a table are relative to; it is relative to the "
        "folder of the table.",
        reason="tables whose paths start from another folder",
        **OF_HOST,
    )
    image_suffix: str = key(
        "",
        'Suffix that is added to the paths in a table, such as ".jpg".',
        reason="tables that hold ids of images, not file names",
    )
    multi_label: bool = key(
        False,
        "Whether an image has any number of labels instead of exactly one.",
        reason="images with several tags; the command `finetune` sets it",
    )
    label_separator: str = key(
        "",
        "Text between the labels of an image in a column of a table, with "
        '`data.multi_label`; "" is any of "|", ";" and ",".',
        reason="names of labels with a comma; the command `finetune` sets it",
    )
    group_key: str = key(
        "",
        "Groups of images that a split keeps together, such as the photographs of one "
        "patient: a column of a table or Parquet file, or a regular expression for file "
        r"names whose first parentheses hold the group, such as '(.*)_\d+'. It applies to "
        'the splits "grouped_splits(all, 5)[4]", and to "train" and "val" of a folder '
        "without splits.",
        reason="several photographs of one subject; `finetune --group` sets it",
    )
    caption_key: str = key(
        "",
        "Location of the captions: a feature of TFDS, a column of a table or Parquet "
        "file, or, for image files, a field of metadata.jsonl or the suffix of a text "
        'file beside each image, such as "txt". If "", captions are made from the '
        "names of classes, see `data.prompts`.",
    )
    mask_key: str = key(
        "",
        "Location of the masks, images of class numbers for tasks that learn the class "
        "of each pixel: a feature of TFDS, a column of a Parquet file, a column of "
        'paths in a table, or, with `data.name="masks"`, a folder. If "", no masks are '
        "read.",
    )
    target_key: str = key(
        "",
        "Location of the numbers of an image for tasks that predict numbers, several "
        'separated by commas, such as "age,weight": features of TFDS, columns of a table '
        "or Parquet file, or fields of the JSON files of tar files or of metadata.jsonl "
        'of a folder. Empty cells are missing. If "", no numbers are read.',
        reason="regression; the command `finetune` sets it",
    )
    ignore_label: int = key(
        255,
        "Value in a mask of pixels without a class, which losses and metrics ignore.",
        at_least=None,
    )
    reduce_zero_label: bool = key(
        False,
        "Whether pixels of value 0 in a mask have no class, so that 1 is class 0, 2 is "
        "class 1, and so on.",
    )
    mask_values: tuple[int, ...] = key(
        (),
        "Values in a mask in the order of the classes, such as (0, 255) for two "
        "classes; () if masks contain class numbers.",
        reason="masks drawn in black and white; the command `finetune` sets it",
        like=(0,),
    )
    num_workers: int = key(
        0,
        "Number of loader processes; 0 loads in threads of the main process.",
        at_most=1_024,
        **OF_HOST,
    )
    num_threads: int = key(
        4, "Number of loader threads per process.", at_most=1_024, **OF_HOST
    )
    prefetch: int = key(
        8,
        "Number of batches that each process reads ahead.",
        reason="fitting large batches into the memory of the host",
        at_most=1_000_000,
        **OF_HOST,
    )
    exif: bool = key(
        False,
        "Rotate images by the orientation tag of the camera, which published recipes "
        "and other libraries do not do.",
        reason="photographs; the command `finetune` sets it",
    )
    max_megapixels: float = key(
        MAX_MEGAPIXELS,
        "Largest image to decode, in millions of pixels. Decoding takes at least 3 "
        "bytes of memory per pixel in every loader thread.",
        reason="scans and satellite images that are larger than the default",
        above=0,
        changes_result=False,
    )
    on_error: str = key(
        "raise",
        'Action for a damaged image: "raise" ends the run; "skip" skips and counts it; '
        '"skip_few" skips and reports up to 1 % of the images of a split, then ends '
        "the run.",
        reason="data with damaged files; the command `finetune` sets it",
        choices=("raise", "skip", "skip_few"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(ReaderConfig):
    """Training data: where they are, and how they are read and transformed."""

    num_classes: int = key(
        0,
        "Number of classes; a label outside [0, num_classes) is an error. With "
        "`data.mask_key` it is the number of classes of pixels. If 0, labels are not "
        "read and need not exist, for tasks that learn without labels.",
        below=2**31,
    )
    repeats: int = key(
        1,
        "Repeated augmentation (arXiv:1901.09335): number of successive copies of each "
        "training image, each transformed separately; DeiT uses 3. An epoch keeps its "
        "number of steps, so it contains only a part of the images.",
        at_least=1,
        below=1_000,
    )
    class_balance: str = key(
        "",
        'Frequency of classes in training: "inverse" draws all classes equally often, '
        '"sqrt" in proportion to the square root of their sizes, "effective" by '
        'effective numbers (arXiv:1901.05555); "" draws each image once per epoch.',
        reason="classes of very different sizes; the command `finetune` sets it",
        choices=("", "inverse", "sqrt", "effective"),
    )
    tokenizer: str = key(
        "",
        'Tokenizer of captions: "bytes", a folder or file with a tokenizer, or '
        'hf://owner/name. If "", captions are not read.',
        of_host=True,
    )
    num_tokens: int = key(
        64,
        "Number of tokens per caption; longer captions are cut, shorter captions are "
        "padded.",
        at_least=1,
    )
    prompts: tuple[str, ...] = key(
        ("{}",),
        "Texts with {} for the name of a class, from which captions are made if "
        "`data.caption_key` is not set; one is drawn for each image.",
    )
    fields: tuple[str, ...] = key(
        (),
        "Additional fields of a batch, defined by classes in your code, such as "
        '("my_module:Weather",); see docs/extending.md.',
        reason="tasks that learn from more than images and labels",
        like=("",),
    )
    exclude: str = key(
        "",
        "File that lists the ids of records to leave out of `data.split`, one per line.",
        reason="near-duplicates of test images, which the command `dedup` lists",
    )
    image_size: tuple[int, ...] = key(
        (224, 224),
        "Height and width of the images that reach the model, in pixels.",
        at_least=1,
    )
    channels: int = key(
        3,
        "Number of channels of the images that reach the model: 3 for RGB, 1 for grey.",
        at_least=1,
        at_most=MAX_CHANNELS,
    )
    bands: tuple[int, ...] = key(
        (),
        "Channels to read from an image file, counted from 0, in this order; () reads "
        "all.",
        reason="satellite images, whose files have more bands than a model needs",
        like=(0,),
    )
    pixels: str = key(
        "uint8",
        'Dtype of the pixels on the way to the model. With "uint8", PNG images of 16 '
        "bits are reduced to 8, and other images of more than 8 bits are refused. "
        "Floating-point pixels of a file are fractions of white.",
        reason="medical and satellite images of more than 8 bits",
        choices=DEPTHS,
    )
    train_transform: str = key(
        "",
        'Transforms of training images, separated by "|"; see '
        "vit_jax/data/transforms/parse.py.",
    )
    eval_transform: str = key("", 'Transforms of evaluation images, separated by "|".')
    mean: tuple[float, ...] | str = key(
        (0.5,),
        "Mean that is subtracted from images, as a fraction of white (255, or 65,535 "
        "with 16 bits): one number, or one per channel. "
        '"estimate" is the mean of up to 1,000 training images.',
        names=(ESTIMATE,),
    )
    std: tuple[float, ...] | str = key(
        (0.5,),
        "Standard deviation that images are divided by after `data.mean` is "
        "subtracted, as a fraction of white: one number, or one per channel. "
        '"estimate" is the standard deviation of up to 1,000 training images.',
        names=(ESTIMATE,),
    )
    check: bool = key(
        True,
        "Whether a run resumes only if the training data has not changed since its "
        "start.",
        reason="continuing after the data was repaired, with `data.check=False`",
        changes_result=False,
    )

    def __post_init__(self):
        for name in CHECKS:
            if getattr(self, name):
                CHECKS[name](self)
        if self.class_balance and (self.multi_label or not self.num_classes):
            raise UserError(
                f"data.class_balance={self.class_balance!r} needs one class per image: "
                "data.num_classes, and no data.multi_label"
            )
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value == ESTIMATE:
                continue
            if len(value) not in (1, self.channels):
                raise UserError(
                    f"data.{name}={value} must have one number, or one for each of "
                    f"data.channels={self.channels}"
                )
        if not all(self.std):
            raise UserError(
                f"data.std={self.std} must not hold 0: images are divided by it"
            )
        if any("{}" not in prompt for prompt in self.prompts) or not self.prompts:
            raise UserError(
                f"data.prompts={self.prompts}: give texts with {{}} for the name of a class"
            )
        if len(self.image_size) != 2:
            raise UserError(f"data.image_size={self.image_size} is not (height, width)")
        if math.prod(self.image_size) > MAX_PIXELS:
            raise UserError(
                f"data.image_size={self.image_size}: more than {MAX_PIXELS:,} pixels; "
                "choose a smaller size"
            )

    def __getstate__(self):
        # Parsed transforms are not sent to loader processes: they may import JAX.
        return {
            each.name: getattr(self, each.name) for each in dataclasses.fields(self)
        }

    @functools.cached_property
    def transforms(self):
        """The `Transforms` of `train_transform`, see `parse.parsed`."""
        from vit_jax.data.transforms import parse  # It imports this file.

        return parse.parsed(self)

    @property
    def has_labels(self) -> bool:
        """Whether labels are read with the images."""
        return bool(self.num_classes) and not self.mask_key

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the numbers of an image, see `target_key`."""
        return names_in(self.target_key)

    @property
    def of_photographs(self) -> bool:
        """Whether images are RGB or grey of 8 bits."""
        return are_photographs(self.channels, self.pixels, self.bands)


def names_in(target_key: str) -> tuple[str, ...]:
    """Returns the names in `data.target_key`, which commas separate."""
    return tuple(map(str.strip, target_key.split(","))) if target_key else ()


def are_photographs(channels: int, depth: str, bands: Sequence[int]) -> bool:
    """Returns whether images are RGB or grey of 8 bits, as `decode.decode` returns.

    Args:
      channels: number of channels.
      depth: dtype of the pixels, one of DEPTHS.
      bands: bands that are chosen; () for all.
    """
    return channels in (1, 3) and depth == DEPTHS[0] and not bands

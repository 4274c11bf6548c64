"""Config of the data: which images are read, and how they are prepared."""

import dataclasses
import functools
import math

from vit_jax.config.fields import Registry, key
from vit_jax.errors import UserError

# Larger images are not decoded, unless `data.max_megapixels` says so, ...
MAX_MEGAPIXELS = 100.0
# ... and none are made.
MAX_PIXELS = 100_000_000
ESTIMATE = "estimate"
# Values of `data.pixels`.
DEPTHS = ("uint8", "uint16", "float32")
MAX_CHANNELS = 512
SYNTHETIC_CLASSES = 10  # Of the synthetic set where `data.num_classes` is 0.
IGNORED = -1  # In place of the class of a pixel that counts for none.
# Key -> function that checks it against the others, imported where the key is set.
CHECKS = Registry(
    {
        "mask_key": "vit_jax.data.masks:check_config",
        "bands": "vit_jax.data.bands:check_config",
    }
)
# Value of `match_classes` of an evaluation or a teacher -> function that finds the classes of
# data in a model's.
MATCHERS = Registry(
    {
        "names": "vit_jax.data.class_names:match",
        "position": "vit_jax.data.class_names:match_by_position",
    }
)
# Of keys that say where and how fast a host reads, not what.
OF_HOST = {"changes_result": False, "of_host": True}
# Keys that say where the images of a data set are.
PLACE = ("data_dir", "image_key", "image_dir", "image_suffix")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Keys for reading data; the others are known where weights are evaluated."""

    name: str = key(
        "",
        'Data set: a name of TFDS, such as "cifar10"; one of `SOURCES` in '
        'vit_jax/data/sources/__init__.py; or "my_module:open_source", which runs the code '
        "of that module.",
    )
    data_dir: str = key(
        "", 'Its folder; "" is TFDS\'s default, ~/tensorflow_datasets.', **OF_HOST
    )
    split: str = key(
        "train",
        "Training split, in TFDS's slicing syntax for all sources.",
        in_step=False,
    )
    num_examples: int = key(0, "Size of `split`, for use without the data; checked.")
    image_key: str = key(
        "image", "TFDS feature or Parquet column of the images, and ..."
    )
    label_key: str = key(
        "label",
        "... of their labels, where labels are read. In a table also one column per class, "
        'as "cat,dog", with 1, 0, -1 (counts as 0) or nothing.',
    )
    image_dir: str = key(
        "", "Folder of the paths in a table, relative to the table's folder.", **OF_HOST
    )
    image_suffix: str = key("", 'Added to the paths in a table, as ".jpg".')
    multi_label: bool = key(
        False, "Whether an image has any number of labels instead of one class."
    )
    caption_key: str = key(
        "",
        "... of their captions; for image files the field of metadata.jsonl, or the suffix "
        'of a text beside each, as "txt". "": captions are made of class names.',
    )
    mask_key: str = key(
        "",
        "... of their masks, images of class numbers for tasks that learn the class of each "
        "pixel: a feature or column as above, a column of paths in a table, the folder of "
        '`data.name="masks"`. "": masks are not read.',
    )
    ignore_label: int = key(
        255, "Value of a mask that counts for no class.", at_least=None
    )
    reduce_zero_label: bool = key(
        False, "Whether 0 in a mask counts for no class either, and 1 is class 0."
    )
    mask_values: tuple[int, ...] = key(
        (),
        "Values of masks in the order of the classes, as (0, 255) for two; (): the class "
        "numbers themselves.",
        like=(0,),
    )
    num_workers: int = key(
        0,
        "Loader processes; 0 loads in threads of this process.",
        at_most=1_024,
        **OF_HOST,
    )
    num_threads: int = key(4, "Loader threads per process.", at_most=1_024, **OF_HOST)
    prefetch: int = key(
        8, "Batches read ahead per process.", at_most=1_000_000, **OF_HOST
    )
    exif: bool = key(
        False,
        "Turn images by the orientation tags of cameras; the published recipes and other "
        "libraries do not.",
    )
    max_megapixels: float = key(
        MAX_MEGAPIXELS,
        "Largest image to decode, in millions of pixels; each takes memory, 3 bytes per "
        "pixel or more, in every loader thread.",
        above=0,
        changes_result=False,
    )
    on_error: str = key(
        "raise",
        'For a damaged image: "raise"; "skip" (counted); or "skip_few": up to 1 % of the '
        "images of a split are skipped, and named.",
        choices=("raise", "skip", "skip_few"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(ReaderConfig):
    """`config.data` of a training run."""

    num_classes: int = key(
        0,
        "Number of classes; labels outside [0, classes) are an error. 0: labels are not "
        "read and need not exist, for tasks that learn without. With `mask_key` they are "
        "the classes of pixels.",
        below=2**31,
    )
    repeats: int = key(
        1,
        "Successive copies of each image in training, each transformed separately "
        "(arXiv:1901.09335; DeiT has 3). An epoch keeps its length, so that it has a part "
        "of the images.",
        at_least=1,
        below=1_000,
    )
    class_balance: str = key(
        "",
        "How often the classes are drawn in training: equally often by inverse frequency "
        '("inverse"), by the root of their numbers ("sqrt") or by effective numbers '
        '(arXiv:1901.05555; "effective"); "": each image once per epoch.',
        choices=("", "inverse", "sqrt", "effective"),
    )
    tokenizer: str = key(
        "",
        'Turns captions into tokens: "bytes", a folder or file with a tokenizer, or '
        'hf://owner/name. "": captions are not read.',
        of_host=True,
    )
    num_tokens: int = key(64, "Tokens of a caption, cut or padded.", at_least=1)
    prompts: tuple[str, ...] = key(
        ("{}",),
        "Captions of a class without `caption_key`: texts with {} for its name, one of "
        "which is drawn for each image.",
    )
    fields: tuple[str, ...] = key(
        (),
        'Fields of yours that a batch has besides, as ("my_module:Weather",); '
        "docs/extending.md.",
        like=("",),
    )
    exclude: str = key("", "File of record ids, one per line, to leave out of `split`.")
    image_size: tuple[int, ...] = key(
        (224, 224), "Height and width that reach the model, in pixels.", at_least=1
    )
    channels: int = key(
        3,
        "Bands that reach the model: 3 is RGB, 1 grey.",
        at_least=1,
        at_most=MAX_CHANNELS,
    )
    bands: tuple[int, ...] = key(
        (),
        "Bands of a file in the order to read them, counted from 0; () for all.",
        like=(0,),
    )
    pixels: str = key(
        "uint8",
        "Depth on the way to the model. 16 bits of a PNG become 8 with the default; other "
        "images of more depth are refused. Floats count as fractions of white.",
        choices=DEPTHS,
    )
    train_transform: str = key(
        "", "Training transforms; see vit_jax/data/transforms/parse.py."
    )
    eval_transform: str = key("", "Evaluation transforms.")
    mean: tuple[float, ...] | str = key(
        (0.5,),
        "Subtracted, one or one per channel, as a fraction of white (255, or 65,535 of 16 "
        'bits); "estimate" for that of up to 1,000 training images ...',
        names=(ESTIMATE,),
    )
    std: tuple[float, ...] | str = key(
        (0.5,), "... then divided by, alike.", names=(ESTIMATE,)
    )
    check: bool = key(
        True, "Resume only on the data of the run's start.", changes_result=False
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
        # Loader processes do without the parsed transforms, which may import JAX.
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
        """Whether every image has labels, which are read."""
        return bool(self.num_classes) and not self.mask_key

    @property
    def of_photographs(self) -> bool:
        """Whether images are RGB or grey of 8 bits."""
        return self.channels in (1, 3) and self.pixels == DEPTHS[0] and not self.bands

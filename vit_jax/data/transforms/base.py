"""The protocol of a transform, and the checks of its arguments.

A transform is a frozen dataclass whose fields are the arguments of the transform line. A
field made by `key` (vit_jax/config/fields.py) has a meaning and bounds; a field `size` that
the line leaves out is `data.image_size`, unless the line gives `sizes`. A user's transform
need not derive from these classes: it needs `runs_on`, and `CustomTransform` (custom.py)
adds the rest. One that makes several arrays of an image derives from `Views` (views.py).

Letters: B examples, H and W height and width before, h and w after, C channels, K
classes.
"""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from jaxtyping import UInt8

from vit_jax.config import fields
from vit_jax.errors import UserError

Given = Any  # An argument of several types; `__post_init__` checks it.
Size = tuple[int, int]

_KINDS = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a text"),
}


class Transform:
    """Base class of transforms.

    Attributes:
      runs_on: "host", in the loader on one image, or "device", in the training step on
        the whole batch.
      on_colors: whether it changes colours or grey levels, and so needs 1 or 3 channels
        of 8 bits in the loader, of any depth on the device. If it moves no pixels, masks
        stay as they are.
      moves_pixels: whether it moves pixels.
      moves_masks: whether a transform that moves pixels moves those of a mask equally: it
        is then called with masks too, arrays of int16 whose values, class numbers, it
        neither changes nor mixes. If not, it is refused where masks are read.
      output_size: method from the height and width of images to those of the results;
        either is None if it differs from image to image. None: the size stays.
    """

    runs_on: ClassVar[str]
    on_colors: ClassVar[bool] = False
    moves_pixels: ClassVar[bool] = False
    moves_masks: ClassVar[bool] = True
    output_size: ClassVar[Callable | None] = None

    def __post_init__(self):
        check_arguments(self)
        for field in dataclasses.fields(self):
            if field.name == "size":
                check_size(self.size)


class TooSmall(ValueError):
    """Raised where a crop is larger than the image."""


class HostTransform(Transform):
    """A transform of one image, run by the loader before images are batched.

    Attributes:
      in_eval: whether it makes no random choices, so that it may also prepare images for
        evaluation.
      sees_mask: whether it is called with the mask of the image, (H, W, 1) int16, as third
        argument where masks are read, to choose by.
      makes_arrays: whether it makes several arrays of an image, see `Views`.
      expand: method that returns the transforms to put in the place of this one and
        those to put at the end of the line, as text; None: no expansion.
      from_file: method that does the same as decoding an image and calling the
        transform, faster; None: no faster way.
    """

    runs_on = "host"
    in_eval: ClassVar[bool] = False
    sees_mask: ClassVar[bool] = False
    makes_arrays: ClassVar[bool] = False
    expand: ClassVar[Callable | None] = None
    from_file: ClassVar[Callable | None] = None

    def __call__(
        self, image: UInt8[np.ndarray, "H W C"], rng: np.random.Generator
    ) -> UInt8[np.ndarray, "h w C"]:
        """Returns the transformed image.

        `image` is read-only. `rng`, seeded with the run's seed and the example's position in the
        run, is the only source of random choices.
        """
        raise NotImplementedError


class DeviceTransform(Transform):
    """A transform of a whole batch, run inside the training step.

    Attributes:
      mixes_examples: whether it blends examples and labels; a line has at most one.
    """

    runs_on = "device"
    mixes_examples: ClassVar[bool] = False

    def __call__(self, images, labels, index, key):
        """Returns the transformed images and labels; JAX traces it.

        Args:
          images: (B, H, W, C), values in [0, 255], uint8 or float32.
          labels: (B, K), one-hot or soft.
          index: (B,) uint32, position of each example in the run.
          key: random key of this transform, the same at every step. With `index` it is
            the only source of random choices, see `example_uniform` in device.py.
        """
        raise NotImplementedError

    def apart(self, copies: int) -> "DeviceTransform":
        """Returns this transform for batches with so many successive copies of an image.

        One that mixes examples takes partners from outside the copies.
        """
        return self


def check_arguments(transform: object) -> None:
    """Checks the type and bounds of each argument that is a field made by `key`.

    The type is that of the field's default; without one it is a number, or a text where
    the field has choices. A transform's `__post_init__` may call this, or the parser does.

    Raises:
      UserError: an argument is of another type or outside of its bounds.
    """
    defaults = fields.defaults(type(transform))
    for name, about in fields.fields(type(transform)).items():
        without = "" if about.choices else 0.0
        value, default = getattr(transform, name), type(defaults.get(name, without))
        kind, called = _KINDS.get(default, (object, ""))
        if isinstance(value, bool) and default in (int, float):
            kind = ()
        if not isinstance(value, kind):
            raise UserError(f"{name}={value!r} is not {called}")
        fields.check(name, about, value)


def pair(size: Given) -> Size:
    """Returns height and width of a size that may be one number for both."""
    return (size, size) if isinstance(size, int) else tuple(size)


def to_size(transform: Transform, before: Size | None) -> Size:
    """Returns a transform's `size`: the `output_size` of those that end in it."""
    return pair(transform.size)


def check_size(size: Given) -> None:
    """Raises ValueError for a size that is neither a number nor a pair."""
    if size is None:  # The parser fills in data.image_size.
        return
    sides = pair(size) if isinstance(size, (int, tuple, list)) else ()
    if len(sides) != 2 or any(type(n) is not int or n < 1 for n in sides):
        raise ValueError(f"size={size!r} is not a whole number or (height, width)")


def check_range(name: str, bounds: Given, at_most: float = float("inf")) -> None:
    """Raises ValueError unless bounds are two numbers, 0 < least <= most <= at_most."""
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= at_most:
        limit = f" <= {at_most:g}" if at_most < float("inf") else ""
        raise ValueError(f"{name}={bounds} is not 0 < least <= most{limit}")


def check_part(area: Given, ratio: Given) -> None:
    """Raises ValueError for bounds that no random part of an image can satisfy.

    `area` is a fraction of the image's area, `ratio` one side divided by the other.
    """
    check_range("area", area, 1.0)
    check_range("ratio", ratio)

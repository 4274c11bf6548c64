"""Base classes of transforms, and checks of their arguments.

A transform is a frozen dataclass whose fields are the arguments in the transform line.
A field made by `key` (vit_jax/config/fields.py) has a meaning and bounds; a field
`size` that the line leaves out is `data.image_size`, unless the line gives `sizes`. A
user's transform need not derive from these classes: it needs `runs_on`, and
`CustomTransform` (custom.py) adds the rest. A transform that makes several arrays from
an image derives from `Views` (views.py).

Letters: B examples, H and W height and width before, h and w height and width after, C
channels, K classes.
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
      on_colors: True if the transform changes colours or grey levels. It then needs 1
        or 3 channels, of 8 bits in the loader, of any depth on the device; if it does
        not move pixels, masks are not changed.
      moves_pixels: True if the transform moves pixels.
      moves_masks: True if a transform that moves pixels can move those of a mask
        equally: it is then also called with masks, int16 arrays of class numbers, which
        it must neither change nor mix. If False, it is refused when masks are read.
      output_size: method from the height and width of images to those of the results;
        argument and result are None if sizes differ from image to image. None instead
        of a method: the size does not change.
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
    """Raised if a crop is larger than the image."""


class HostTransform(Transform):
    """A transform of one image, run by the loader before images are batched.

    Attributes:
      in_eval: True if the transform makes no random choices and may also prepare images
        for evaluation.
      sees_mask: True if the transform gets the mask of the image, (H, W, 1) int16, as
        third argument when masks are read, because its choices depend on the mask.
      makes_arrays: True if the transform makes several arrays from an image, see
        `Views`.
      expand: method that returns the transforms that replace this one and those that
        are added at the end of the line, both as text; None if it is not replaced.
      from_file: method that decodes an image and applies the transform, faster than
        both separately; None without such a method.
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

        Args:
          image: image, read-only.
          rng: the only source of random choices, seeded with the run's seed and the
            example's position in the run.
        """
        raise NotImplementedError


class DeviceTransform(Transform):
    """A transform of a whole batch, run inside the training step.

    Attributes:
      mixes_examples: True if the transform blends examples and labels; a line has at
        most one such transform.
    """

    runs_on = "device"
    mixes_examples: ClassVar[bool] = False

    def __call__(self, images, labels, index, key):
        """Returns the transformed images and labels; JAX traces this method.

        Args:
          images: images, (B, H, W, C), values in [0, 255], uint8 or float32.
          labels: labels, (B, K), one-hot or soft.
          index: position of each example in the run, (B,) uint32.
          key: random key of this transform, equal in all steps. Random choices depend
            only on `index` and `key`, see `example_uniform` in device.py.
        """
        raise NotImplementedError

    def apart(self, copies: int) -> "DeviceTransform":
        """Returns this transform for batches with successive copies of each image.

        A transform that mixes examples must not mix copies of the same image.
        """
        return self


def check_arguments(transform: object) -> None:
    """Checks the type and bounds of each argument that is a field made by `key`.

    The type is that of the field's default; without a default it is a text if the field
    has choices, else a number. A transform's `__post_init__` may call this function;
    otherwise the parser does.

    Raises:
      UserError: an argument has another type or is out of its bounds.
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
    """Returns a transform's `size`, for transforms whose `output_size` it is."""
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

    Args:
      area: smallest and largest fraction of the image's area.
      ratio: smallest and largest quotient of two sides.
    """
    check_range("area", area, 1.0)
    check_range("ratio", ratio)

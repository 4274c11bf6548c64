"""Transforms of a user's module, "my_module:MyTransform" in a line."""

import dataclasses
import functools
import inspect
from typing import ClassVar

import numpy as np

from vit_jax.config import fields
from vit_jax.data.decode import DamagedImage
from vit_jax.data.loader import Loader
from vit_jax.data.transforms.base import (
    DeviceTransform,
    HostTransform,
    TooSmall,
    Transform,
)
from vit_jax.data.transforms.views import Views
from vit_jax.errors import UserError


def find(name: str, key: str) -> type:
    """Imports the class of a user's transform, "module:Name".

    Args:
      name: module and name of the class.
      key: key of the line, for messages.

    Raises:
      UserError: the class does not exist, or is not a transform.
    """
    cls = fields.import_custom(name, key)
    is_class = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    if not is_class or getattr(cls, "runs_on", None) not in ("host", "device"):
        raise UserError(
            f"{key}={name!r} is {cls!r}: it must be a frozen dataclass with "
            'runs_on = "host" or "device", see vit_jax/data/transforms/base.py'
        )
    return cls


@dataclasses.dataclass(frozen=True)
class CustomTransform:
    """Wraps a transform of the user's module; its errors begin with `where`.

    Attributes are those of `transform` if it has them, else those of its base class.
    """

    # An error of a user's method would look like a bug of this package.
    from_file: ClassVar[None] = None

    where: str
    transform: object

    def __getattr__(self, name):
        if name.startswith("__"):  # Pickle reads some before `transform` is set.
            raise AttributeError(name)
        if hasattr(self.transform, name):
            return getattr(self.transform, name)
        value = getattr(self._base, name)
        return functools.partial(value, self) if inspect.isfunction(value) else value

    @property
    def makes_arrays(self) -> bool:
        """True if the transform makes several arrays from an image."""
        return hasattr(self.transform, "output_shapes")

    @property
    def _base(self) -> type[Transform]:
        if self.runs_on == "device":
            return DeviceTransform
        return Views if self.makes_arrays else HostTransform

    def alternatives(self) -> list[tuple["CustomTransform", float]]:
        """Returns the alternatives of `transform`, see `Views`, each wrapped."""
        if not hasattr(self.transform, "alternatives"):
            return [(self, 1.0)]
        made = self.transform.alternatives()
        return [(CustomTransform(self.where, op), weight) for op, weight in made]

    def of_share(self, *share: int) -> "CustomTransform":
        """Returns `transform.of_share`, wrapped."""
        return CustomTransform(self.where, self.transform.of_share(*share))

    def loader(self, loader: Loader) -> Loader:
        """Returns the loader of a line that ends in this transform, see `Views`."""
        return Views.loader(self, loader)

    def __call__(self, image, *args):
        if self.runs_on == "host":
            image = image.view()  # Data in memory must not change.
            image.flags.writeable = False
        known = (DamagedImage, TooSmall)
        with fields.guarded(self.where, known=known):
            result = self.transform(image, *args)
            if self.runs_on == "device":
                return self._checked_batch(result, *args)
            # Masks are int16.
            self._check_host(result, np.int16 if image.dtype == np.int16 else np.uint8)
            return result

    def apart(self, copies: int) -> "CustomTransform":
        if not hasattr(self.transform, "apart"):
            return self
        return CustomTransform(self.where, self.transform.apart(copies))

    def _check_host(self, result, dtype: type) -> None:
        several = self.makes_arrays
        numbers = self.numbers if several else ()
        named = result if isinstance(result, dict) else {"image": result}
        arrays = list(named.values())
        good = all(
            isinstance(a, np.ndarray)
            and a.dtype == (np.int32 if name in numbers else dtype)
            for name, a in named.items()
        )
        if good and (isinstance(result, dict) if several else arrays[0].ndim == 3):
            return
        kinds = [f"{getattr(a, 'dtype', type(a))} {np.shape(a) or ''}" for a in arrays]
        wanted = (
            "a dict of uint8 arrays (int32 of `numbers`), as `output_shapes`"
            if several
            else f"{np.dtype(dtype)} (H, W, C)"
        )
        raise UserError(f"{self.where} returned {', '.join(kinds)}, not {wanted}")

    def _checked_batch(self, result, labels, *_) -> tuple:
        shapes = [getattr(array, "shape", ()) for array in result]
        if [len(shape) for shape in shapes] != [4, 2] or shapes[1] != labels.shape:
            raise UserError(
                f"{self.where} returned arrays of the shapes {shapes}, not images "
                f"(B, H, W, C) and labels {labels.shape}"
            )
        return tuple(result)

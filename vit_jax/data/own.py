"""A user's own data set: data.name="my_module:open_source".

The name runs code: the module is imported and the function called, with the rights of
whoever started the command. What that code raises ends the command with one line.
"""

import contextlib
import dataclasses
import importlib
import operator
import re
from collections.abc import Iterator

import numpy as np

from vit_jax.data import arrays
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.errors import UserError

# TFDS names have a colon too, before their version: "eurosat/rgb:2.0.0".
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MEMBERS = ("class_names", "images", "labels", "describe", "record_id")


def is_own(name: str) -> bool:
    """Returns whether data.name names a function of a module."""
    return _OWN.fullmatch(name) is not None


def open_own(data: DataConfig, split: str):
    """Calls the user's function with `config.data` and the split expression.

    Returns:
      The `Source` that it returns.

    Raises:
      UserError: no such module or function, what it returns is no source, its images in
        memory are not uint8 (N, H, W, C), each with a label, or it raised.
    """
    module_name, function_name = data.name.split(":")
    try:
        with guarded(data.name):
            module = importlib.import_module(module_name)
    except UserError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or not cause.name:
            raise
        if not f"{module_name}.".startswith(f"{cause.name}."):
            raise  # The module is there, but not what it imports itself.
        raise UserError(
            f"data.name={data.name!r}: no module {module_name!r}: it must lie in the "
            "current folder, on PYTHONPATH, or be installed"
        ) from cause
    open_source = getattr(module, function_name, None)
    if not callable(open_source):
        raise UserError(
            f"data.name={data.name!r}: {getattr(module, '__file__', module_name)} has "
            f"no function {function_name!r}"
        )
    with guarded(data.name):
        source = open_source(data, split)
        missing = [name for name in _MEMBERS if not hasattr(source, name)]
    missing += [
        name for name in ("__len__", "__getitem__") if not hasattr(type(source), name)
    ]
    if missing:
        raise UserError(
            f"data.name={data.name!r} returned {type(source).__name__}, which lacks "
            f"{', '.join(missing)}: see Source in vit_jax/data/sources.py"
        )
    with guarded(data.name):
        _check_arrays(data.name, source)
    if isinstance(source, arrays.ArraySource):  # It runs no more code of theirs.
        return source
    return OwnSource(data.name, source)


@dataclasses.dataclass(frozen=True)
class OwnSource:
    """A user's own source, whose errors name it; other members are those of the source.

    Attributes:
      name: `data.name`.
      source: what the user's function returned.
    """

    name: str
    source: object

    # Not by `__getattr__`: since Python 3.12 what it gives does not count for a protocol.
    @property
    def class_names(self):
        return self.source.class_names

    @property
    def images(self):
        return self.source.images

    @property
    def labels(self):
        return self.source.labels

    def __len__(self) -> int:
        with guarded(self.name):
            return len(self.source)

    def __getitem__(self, i: int) -> dict:
        with guarded(self.name, f" for record {i}"):
            item = self.source[i]
            image, label = item["image"], _whole(item["label"])
            if not isinstance(image, bytes | np.ndarray):
                raise TypeError('"image" is neither bytes nor an array')
            return {"image": image, "label": label}

    def describe(self, i: int) -> str:
        with guarded(self.name, f" for record {i}"):
            return str(self.source.describe(i))

    def record_id(self, i: int) -> str:
        with guarded(self.name, f" for record {i}"):
            return str(self.source.record_id(i))

    def __getattr__(self, name: str):
        # A copy that is being unpickled has no `source` yet.
        if name in ("source", "name") or name.startswith("__"):
            raise AttributeError(name)
        member = getattr(self.source, name)
        if name == "entries":
            return guarded(self.name)(member)
        if name == "locate":  # Whose KeyError names a record that the set lacks.
            return guarded(self.name, known=(KeyError,))(member)
        return member


def _whole(label) -> int:
    """Returns a label as an int: an integer, a bool, a float or an array of one.

    Raises:
      TypeError: it is not one whole number.
    """
    try:
        return operator.index(label)
    except TypeError:
        value = np.asarray(label)
        if value.size != 1 or value.dtype.kind not in "buif" or value.item() % 1:
            raise
        return int(value.item())


def _check_arrays(name: str, source) -> None:
    """Raises UserError for images or labels in memory that cannot be taken as they are."""
    images, labels = source.images, source.labels
    if labels is not None or images is not None:
        if not hasattr(labels, "dtype"):
            raise UserError(
                f"data.name={name!r} returned labels of type {type(labels).__name__}; "
                "make them a NumPy array of integers"
            )
        arrays.check_labels(
            f"data.name={name!r} returned ", np.asarray(labels), source.class_names
        )
    if images is None:
        return
    if images.dtype != np.uint8 or images.ndim != 4:
        raise UserError(
            f"data.name={name!r} returned images={arrays.describe(images)}: not uint8 "
            "(N, H, W, C); convert them, or let vit_jax.data.arrays.open_arrays do it"
        )
    if not len(images) == len(labels) == len(source):
        raise UserError(
            f"data.name={name!r} returned {len(images)} images, {len(labels)} labels "
            f"and a length of {len(source)}; make them equal"
        )


@contextlib.contextmanager
def guarded(
    name: str, where: str = "", known: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turns what the code of a user's own source raises into one line.

    Args:
      name: `data.name`.
      where: of which record, for the message.
      known: exceptions that the caller handles; they stay as they are.

    Raises:
      UserError: the line. UserError and, for a damaged image, OSError and DamagedImage
        of a record stay as they are.
    """
    try:
        yield
    except (UserError, *known):
        raise
    except (OSError, DamagedImage) as error:
        if where:
            raise
        raise UserError(_line(name, where, error)) from error
    except (Exception, SystemExit) as error:  # Any code: it may raise anything.
        raise UserError(_line(name, where, error)) from error


def _line(name: str, where: str, error: BaseException) -> str:
    return (
        f"data.name={name!r}: runs the code of that module, which raised "
        f"{type(error).__name__}{where}: {error}; mend it, --debug shows its line"
    )

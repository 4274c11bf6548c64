"""Checks arguments of Python functions by the fields of a config dataclass."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from vit_jax.config import fields
from vit_jax.errors import UserError

F = TypeVar("F", bound=Callable)

# Flags of commands to what functions of Python take in their place; others have the name
# of an argument. A command line in a message stays as it is.
_FLAGS = {
    "--no_ema": "use_ema=False",
    "--resolution": "image_size",
    "--labels": "class_names",
    "--crop_pct": "crop_fraction",
    "crop_pct=": "crop_fraction=",
}
_FLAG = re.compile(r"--(?:config\.)?(?=[a-z])")
_COMMAND = re.compile(r"\b(?:python -m|pip install|convert) .*")


def checked(keys: type) -> Callable[[F], F]:
    """Returns a decorator that checks the arguments that a dataclass has fields for.

    The function gets each as a value of the field's type. The default of an argument, as
    None, is passed as it is.

    Args:
      keys: dataclass with a field made by `key` for each argument, by its name; for an
        argument that is no plain value its default is an instance of the type.

    Raises:
      UserError: when the decorated function is called: an argument is of another type or
        out of its bounds, or there are too many, too few or unknown ones.
    """
    defaults, about = fields.defaults(keys), fields.fields(keys)

    def decorate(function):
        signature = inspect.signature(function)
        parameters = signature.parameters

        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                takes = ", ".join(name for name in parameters if name != "self")
                raise UserError(
                    f"{function.__name__}: {error}; it takes {takes}"
                ) from error
            given = bound.arguments
            for name in about.keys() & given.keys():
                if given[name] is not parameters[name].default:
                    given[name] = take(name, about[name], given[name], defaults[name])
            if "tell" in parameters:
                tell = given.get("tell", parameters["tell"].default)
                given["tell"] = lambda line: tell(in_python(line))
            try:
                return function(*bound.args, **bound.kwargs)
            except UserError as error:
                error.args = (in_python(str(error)),)
                raise

        return call

    return decorate


def in_python(line: str) -> str:
    """Returns a message with the names of arguments in place of flags."""
    command = _COMMAND.search(line)
    end = command.start() if command else len(line)
    text = line[:end]
    for flag, argument in _FLAGS.items():
        text = text.replace(flag, argument)
    return _FLAG.sub("", text) + line[end:]


def take(name: str, about: fields.Key, value: object, default: object) -> object:
    """Returns an argument, checked, as a value of its field's type.

    A path is taken as a text, and any iterable as a tuple.

    Raises:
      UserError: it is of another type or out of its bounds.
    """
    if isinstance(default, str) and isinstance(value, os.PathLike):
        value = os.fspath(value)
    several = isinstance(value, Iterable) and not isinstance(
        value, str | bytes | Mapping
    )
    if isinstance(default, tuple) and several:
        value = tuple(value.tolist() if hasattr(value, "tolist") else value)
    value = fields.fit(name, value, default)
    fields.check(name, about, value)
    return value

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

# Flags of commands, with the arguments that Python functions have instead; any other
# flag has the name of its argument. Command lines in messages are not changed.
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
    """Returns a decorator that checks arguments by the fields of a dataclass.

    Each argument is converted to its field's type. The default of an argument, such as
    None, is passed unchanged.

    Args:
      keys: dataclass with a field made by `key` for each argument, of the same name; if
        an argument is neither a number nor a text, the field's default is an instance
        of its type.

    Raises:
      UserError: when the decorated function is called: an argument is of another type
        or out of its bounds, or there are too many, too few or unknown ones.
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
    """Returns a message with flags replaced by names of Python arguments."""
    command = _COMMAND.search(line)
    end = command.start() if command else len(line)
    text = line[:end]
    for flag, argument in _FLAGS.items():
        text = text.replace(flag, argument)
    return _FLAG.sub("", text) + line[end:]


def take(name: str, about: fields.Key, value: object, default: object) -> object:
    """Returns an argument, checked and converted to its field's type.

    A path becomes a string, and any iterable a tuple.

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

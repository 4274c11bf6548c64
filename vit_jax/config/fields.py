"""Fields of config dataclasses, each with the meaning and the bounds of its key.

A section is a frozen dataclass beside the code that it configures. `key` makes a field
that holds a value, `section` one that holds another dataclass, `choice` one that holds
one of several dataclasses by name, and `named` a mapping of those by names that the
user chooses. The builder (loading.py), the reference of the docs, the resume check and
the sweeps read these fields.
"""

import collections
import contextlib
import dataclasses
import importlib
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vit_jax.command_line.printing import masked
from vit_jax.errors import UserError

T = TypeVar("T")

_META = "config"
# Names of TFDS have a colon too, before their version: "eurosat/rgb:2.0.0".
CUSTOM = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


class Registry(collections.UserDict):
    """Maps names to components; one given as "module:Name" is imported on first use."""

    def __getitem__(self, name: str) -> object:
        component = self.data[name]
        if isinstance(component, str):
            module, _, attribute = component.partition(":")
            component = getattr(importlib.import_module(module), attribute)
            self.data[name] = component
        return component


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """Metadata of a field: meaning, allowed values, and what depends on the key.

    Attributes:
      help: meaning of the key, for the reference.
      reason: paper or purpose of a key that no recipe sets.
      choices: allowed texts; if empty, any text.
      names: texts that are allowed instead of a tuple of numbers.
      only_if: other keys of the section, each with its values under which this key is
        read, or with a dict from those values to the default of this key under each.
      at_least, above, at_most, below: bounds of a number, or of each of a tuple. A
        number is also finite, and below 2**63 if whole.
      distinct: whether a tuple must not be empty and must not have a number twice.
      changes_result: whether a run with another value is a different run, which must
        not continue the same workdir.
      of_host: whether hosts of one run may have different values.
      in_step: whether the compiled training step depends on it.
      training_only: whether outputs of a trained network do not depend on it.
      optional: whether the value may be None.
      like: example of the key's type, if the default does not show it, such as ().
    """

    help: str
    reason: str = ""
    choices: Sequence[str] = ()
    names: Sequence[str] = ()
    only_if: Mapping[str, Sequence[str] | Mapping[str, object]] | None = None
    at_least: int | float | None = 0
    above: int | float | None = None
    at_most: int | float | None = None
    below: int | float | None = None
    distinct: bool = False
    changes_result: bool = True
    of_host: bool = False
    in_step: bool = True
    training_only: bool = False
    optional: bool = False
    like: object = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section(Key):
    """Metadata of a field that holds a dataclass; it applies to every key inside.

    Attributes:
      cls: the dataclass.
      text_key: the key that is set if a text is given for the section; "" if a text is
        not allowed.
    """

    help: str = ""
    cls: type | None = None
    text_key: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Section):
    """Metadata of a field that holds one of several dataclasses, chosen by name.

    Attributes:
      types: name to dataclass. A dataclass of the user's module is named "module:Name".
      text_key: the key that holds the name.
      default: the name that applies if none is set.
      patterns: whether the names are regular expressions. A name that none of them
        matches gets the default's dataclass, whose code refuses it.
      base: class that a dataclass of the user's module must derive from.
      listed: whether the reference lists the keys of its dataclasses; False if they are
        those of another section.
    """

    types: Mapping[str, type]
    text_key: str = "name"
    default: str
    patterns: bool = False
    base: type = object
    listed: bool = True

    def find(self, name: object, where: str) -> type:
        """Returns the dataclass of a name that is set in the section at `where`.

        Raises:
          UserError: no dataclass has this name.
        """
        if isinstance(name, str) and name in self.types:
            return self.types[name]
        if is_custom(name):
            return self._import(name, f"{where}.{self.text_key}")
        if self.patterns:
            matches = (form for form in self.types if re.fullmatch(form, str(name)))
            form = next(matches, None)
            return self.types[form] if form else self.find(self.default, where)
        raise UserError(
            f"{where}.{self.text_key}={name!r} is not one of {', '.join(self.types)}"
        )

    def _import(self, name: str, where: str) -> type:
        cls = import_custom(name, where)
        is_class = dataclasses.is_dataclass(cls) and isinstance(cls, type)
        if is_class and issubclass(cls, self.base):
            return cls
        how, example = "such as", next(iter(self.types.values()))
        if self.base is not object:
            how, example = "derived from", self.base
        raise UserError(
            f"{where}={name!r} is {cls!r}: it must be a frozen dataclass of config "
            f"fields, {how} {example.__module__}:{example.__qualname__}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named(Section):
    """Metadata of a field that maps names chosen by the user to dataclasses.

    Attributes:
      choice: dataclasses that a name may map to.
      text_key: the key that is set if a text is given for one of these dataclasses.
      reserved: names that are not allowed.
    """

    choice: Choice
    reserved: Sequence[str] = ()


def key(default: object, help: str, **rules: Any) -> Any:
    """Returns a field that holds a value of the default's type, with `rules` of `Key`."""
    return dataclasses.field(default=default, metadata={_META: Key(help=help, **rules)})


def epochs(help: str, **rules: Any) -> Any:
    """Returns a field that holds a length in epochs; 0 means that it is not set."""
    return key(0.0, help, below=2**31, **rules)


def section(cls: type, **rules: Any) -> Any:
    """Returns a field that holds a dataclass, with `rules` of `Key` for all its keys."""
    return dataclasses.field(
        default_factory=cls, metadata={_META: Section(cls=cls, **rules)}
    )


def choice(types: Mapping[str, type], default: str, **rules: Any) -> Any:
    """Returns a field that holds one of several dataclasses, see `Choice`."""
    return chosen(Choice(types=types, default=default, **rules))


def chosen(about: Choice) -> Any:
    """Returns a field that holds one of the dataclasses of a `Choice`."""
    return dataclasses.field(
        default_factory=lambda: about.find(about.default, "")(), metadata={_META: about}
    )


def named(about: Choice, **rules: Any) -> Any:
    """Returns a field that maps names to choices, see `Named`."""
    return dataclasses.field(
        default_factory=dict, metadata={_META: Named(choice=about, **rules)}
    )


def fields(cls: type) -> dict[str, Key]:
    """Returns the metadata of the keys of a config dataclass, by name."""
    return {
        f.name: f.metadata[_META]
        for f in dataclasses.fields(cls)
        if _META in f.metadata
    }


def defaults(cls: type) -> dict[str, object]:
    """Returns the defaults of the keys that hold values, by name."""
    return {
        f.name: f.default
        for f in dataclasses.fields(cls)
        if _META in f.metadata and f.default is not dataclasses.MISSING
    }


def sections(cls: type, where: str = "") -> Iterator[tuple[str, str, type]]:
    """Yields every section that a config can hold, at any depth.

    Args:
      cls: dataclass of the config.
      where: dotted key of `cls` with a dot at the end; "" for the whole config.

    A choice that is not `listed` is left out.

    Yields:
      Dotted key, in which "NAME" stands for a name that the user chooses; name of the
      dataclass in its choice, "" for a plain section; and the dataclass.
    """
    for name, about in fields(cls).items():
        path = f"{where}{name}"
        if isinstance(about, Named):
            path, about = f"{path}.NAME", about.choice
        if isinstance(about, Choice):
            for kind, inner in about.types.items() if about.listed else ():
                yield path, kind, inner
                yield from sections(inner, f"{path}.")
        elif isinstance(about, Section):
            yield path, "", about.cls
            yield from sections(about.cls, f"{path}.")


def is_read(about: Key, values: Mapping[str, object] | object) -> bool:
    """Returns whether a key is read, given the other values of its section."""
    get = values.get if isinstance(values, Mapping) else lambda k: getattr(values, k)
    return all(get(k) in list(allowed) for k, allowed in (about.only_if or {}).items())


def walk(config: object) -> Iterator[tuple[tuple[str, ...], Key, object]]:
    """Yields path, metadata and value of every key of a config that is read.

    The metadata of a section applies to each of its keys.
    """
    for name, about in fields(type(config)).items():
        value = getattr(config, name)
        if isinstance(about, Named):
            parts = [((name, k), part) for k, part in value.items()]
        elif isinstance(about, Section):
            parts = [((name,), value)]
        else:
            if is_read(about, config):
                yield (name,), about, value
            continue
        for path, part in parts:
            for inner, key_, leaf in walk(part):
                yield (*path, *inner), _below(about, key_), leaf


def _below(about: Section, inner: Key) -> Key:
    """Applies the metadata of a section to that of a key in it."""
    return dataclasses.replace(
        inner,
        changes_result=inner.changes_result and about.changes_result,
        of_host=inner.of_host or about.of_host,
        in_step=inner.in_step and about.in_step,
    )


def flatten(tree: Mapping | object, prefix: str = "") -> dict[str, object]:
    """Returns the values of a config, or of nested mappings, by their dotted keys."""
    flat = {}
    items = tree if isinstance(tree, Mapping) else to_dict(tree)
    for name, value in items.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:  # A tuple comes back from JSON as a list.
            flat[f"{prefix}{name}"] = tuple(value) if isinstance(value, list) else value
    return flat


def to_dict(config: object) -> dict:
    """Returns a config, or a section of one, as nested dicts of the keys that are read.

    A named section that a text can express becomes that text.
    """
    tree = {}
    for name, about in fields(type(config)).items():
        value = getattr(config, name)
        if isinstance(about, Named):
            tree[name] = {k: _short(about, part) for k, part in value.items()}
        elif isinstance(about, Section):
            tree[name] = to_dict(value)
        elif is_read(about, config):
            tree[name] = value
    return tree


def _short(about: Named, part: object) -> dict | str:
    text = getattr(part, about.text_key, None)
    plain = about.choice.types[about.choice.default]
    if text and part == plain(**{about.text_key: text}):
        return text
    return to_dict(part)


def replace(config: T, changes: Mapping[str, object]) -> T:
    """Returns a config with the values of some dotted keys replaced, without checks."""
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if rest:
            value = replace(getattr(config, first), {rest: value})
        config = dataclasses.replace(config, **{first: value})
    return config


def to_json(config: object) -> dict:
    """Returns a config as plain dicts, lists and numbers, which JSON keeps unchanged.

    Passwords in URLs are masked, because the result is written to checkpoints and logs.
    """
    return _json(to_dict(config))


def _json(value: object) -> object:
    if isinstance(value, dict):
        return {k: _json(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_json(v) for v in value]
    return masked(value) if isinstance(value, str) else value


def differences(a: Mapping | object, b: Mapping | object) -> list[str]:
    """Lists the keys in which two configs differ, as "key: 1 -> 2"."""
    a, b = flatten(a), flatten(b)
    return [
        f"{name}: {a.get(name, 'absent')} -> {b.get(name, 'absent')}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name, "absent") != b.get(name, "absent")
    ]


def is_number(value: object, kind: type) -> bool:
    """Returns whether a value is a number of a type and not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Returns the `repr` of a value in one line of at most 100 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def fit(name: str, value: object, default: object) -> object:
    """Returns a value converted to the type of a key's default.

    Raises:
      UserError: it is of another type.
    """
    if isinstance(default, tuple) and isinstance(value, (list, tuple)):
        one = default[0] if default else ""
        return tuple(fit(f"{name}[{i}]", item, one) for i, item in enumerate(value))
    if isinstance(default, tuple) and isinstance(value, str):
        return fit(name, (value,), default)
    if type(default) is float and is_number(value, numbers.Real):
        return float(value)
    if type(default) is int and is_number(value, numbers.Integral):
        return int(value)
    if default is None and (value is None or isinstance(value, bool)):
        return value  # None is a choice beside True and False.
    first = default[0] if isinstance(default, tuple) and default else default
    plain = isinstance(first, (bool, int, float, str, tuple, type(None)))
    if type(value) is type(default) or (not plain and isinstance(value, type(default))):
        return value
    if callable(default) and callable(value):
        return value
    takes = "a function" if callable(default) else type(default).__name__
    raise UserError(
        f"{name}={shown(value)} is {type(value).__name__}, but it takes {takes}"
        + (f" (as {default!r})" if plain else f" of {type(first).__name__}")
    )


def check(name: str, about: Key, value: object) -> None:
    """Checks that a value, of the type of its key, is allowed.

    Raises:
      UserError: it is not; the message has the key, the value and what is allowed.
    """
    check_choice(name, about, value)
    numbers_ = value if isinstance(value, tuple) else (value,)
    if about.distinct and not numbers_:
        raise UserError(f"{name} is empty: give at least one number")
    for number in numbers_:
        if is_number(number, numbers.Real):
            _check_number(name, about, value, number)
    if about.distinct and len(set(numbers_)) < len(numbers_):
        raise UserError(f"{name}={value} has a number twice")


def check_choice(name: str, about: Key, value: object) -> None:
    """Checks that a text is allowed.

    Raises:
      UserError: it is not; the message lists the allowed texts.
    """
    if about.choices and value not in about.choices:
        raise UserError(f"{name}={value!r} is not one of {', '.join(about.choices)}")
    if about.names and isinstance(value, str) and value not in about.names:
        raise UserError(
            f"{name}={value!r} is not one of {', '.join(about.names)}: give one of them, "
            "or numbers"
        )


def _check_number(name: str, about: Key, value: object, number: numbers.Real) -> None:
    if not math.isfinite(number):
        raise UserError(f"{name}={value} must be finite")
    if about.above is not None:
        if number <= about.above:
            raise UserError(f"{name}={value} must be above {about.above}")
    elif about.at_least is not None and number < about.at_least:
        raise UserError(f"{name}={value} must be at least {about.at_least}")
    if about.at_most is not None and number > about.at_most:
        raise UserError(f"{name}={value} must be at most {about.at_most}")
    below = about.below if about.below is not None else 2**63
    if number >= below and (about.below is not None or isinstance(number, int)):
        power = math.log2(below) if below > 2**20 else 0
        text = f"2**{power:.0f}" if power and power.is_integer() else below
        raise UserError(f"{name}={value} must be below {text}")


def is_custom(name: object) -> bool:
    """Returns whether a name is "module:Name", an object of the user's module."""
    return isinstance(name, str) and re.fullmatch(CUSTOM, name) is not None


def import_custom(name: str, where: str) -> object:
    """Imports "module:Name", the value of the key `where`, which runs that module.

    Raises:
      UserError: no such module or object, or the module raised.
    """
    module_name, _, attribute = name.partition(":")
    try:
        with guarded(f"{where}={name!r}"):
            module = importlib.import_module(module_name)
    except UserError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or not cause.name:
            raise
        if not f"{module_name}.".startswith(f"{cause.name}."):
            raise  # The module exists, but one that it imports does not.
        raise UserError(
            f"{where}={name!r}: no module {module_name!r}: it must lie in the current "
            "folder, on PYTHONPATH, or be installed"
        ) from cause
    if not hasattr(module, attribute):
        raise UserError(
            f"{where}={name!r}: {getattr(module, '__file__', module_name)} has no "
            f"{attribute!r}"
        )
    return getattr(module, attribute)


@contextlib.contextmanager
def guarded(
    key_and_value: str, during: str = "", known: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Converts exceptions raised by a user's module to a UserError of one line.

    Args:
      key_and_value: key that names the module, such as "data.name='mine:open_source'".
      during: purpose of the call, such as " for record 3".
      known: exceptions that the caller handles; they pass through.

    Raises:
      UserError: the code raised. If it raised a UserError, that passes through.
    """
    try:
        yield
    except (UserError, *known):
        raise
    except (Exception, SystemExit) as error:  # Any code: it may raise anything.
        raise UserError(
            f"{key_and_value}: runs the code of that module, which raised "
            f"{type(error).__name__}{during}: {error}; mend it, --debug shows its line"
        ) from error

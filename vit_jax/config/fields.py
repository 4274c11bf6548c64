"""What configs are made of: frozen dataclasses whose fields say all there is of a key.

A section is a frozen dataclass beside the code that it configures. `key` makes a field
that holds a value, `section` one that holds another dataclass, `choice` one that holds
the dataclass that a name stands for, and `named` a mapping of those from names that the
user gives. The builder (loading.py), the reference of the docs, the resume check and
the sweeps read everything else from these fields.
"""

import dataclasses
import importlib
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vit_jax.errors import UserError
from vit_jax.printing import masked

T = TypeVar("T")

# Of an image: larger ones are neither decoded nor made.
MAX_PIXELS = 100_000_000
_META = "config"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """What a field says of its key.

    Attributes:
      help: what the key does, for the reference.
      choices: the texts that are allowed; any if empty.
      only_if: other key of the section to the values of it under which this one is
        read, or to a dict from these values to the default that each brings.
      at_least, above, at_most, below: bounds of a number, or of each of a tuple. A
        number is also finite, and below 2**63 if whole.
      distinct: a tuple states each number once, and at least one.
      changes_result: whether a run with another value is another run, so that a workdir
        is not continued with it.
      of_host: whether hosts of one run may state it differently.
      in_step: whether the compiled training step depends on it.
    """

    help: str
    choices: Sequence[str] = ()
    only_if: Mapping[str, Sequence[str] | Mapping[str, object]] | None = None
    at_least: int | float | None = 0
    above: int | float | None = None
    at_most: int | float | None = None
    below: int | float | None = None
    distinct: bool = False
    changes_result: bool = True
    of_host: bool = False
    in_step: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section(Key):
    """Says of a field that it holds a dataclass; what it says holds for all in it."""

    help: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Section):
    """Says of a field that it holds one of several dataclasses.

    Attributes:
      types: name to dataclass. "module:Name" is a name, too, of somebody's own.
      by: the key that states the name.
      default: the name if none is stated.
      patterns: whether the names are regular expressions, of which the first that
        matches counts.
    """

    types: Mapping[str, type]
    by: str = "name"
    default: str
    patterns: bool = False

    def find(self, name: object, where: str) -> type:
        """Returns the dataclass that a name stands for.

        Args:
          name: as stated.
          where: dotted name of the section, for messages.

        Raises:
          UserError: there is none of that name.
        """
        if self.patterns:
            return next(t for p, t in self.types.items() if re.fullmatch(p, str(name)))
        if isinstance(name, str) and name in self.types:
            return self.types[name]
        if isinstance(name, str) and ":" in name:
            return _own(name, f"{where}.{self.by}", next(iter(self.types.values())))
        raise UserError(
            f"{where}.{self.by}={name!r} is not one of {', '.join(self.types)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named(Section):
    """Says of a field that it maps names, which the user gives, to choices.

    Attributes:
      choice: what each is.
      text: the key that a bare text states.
      reserved: names that none may have.
    """

    choice: Choice
    text: str
    reserved: Sequence[str] = ()


def key(default: object, help: str, **rules: Any) -> Any:
    """Makes a field that holds a value.

    Args:
      default: of the type that the key takes.
      help: what the key does.
      **rules: see `Key`.
    """
    return dataclasses.field(default=default, metadata={_META: Key(help=help, **rules)})


def epochs(help: str, **rules: Any) -> Any:
    """Makes a field that holds a length in epochs; 0 is none."""
    return key(0.0, help, below=2**31, **rules)


def section(default: type, **rules: Any) -> Any:
    """Makes a field that holds a dataclass.

    Args:
      default: the dataclass.
      **rules: see `Key`; they hold for every key in it.
    """
    return dataclasses.field(
        default_factory=default, metadata={_META: Section(**rules)}
    )


def choice(types: Mapping[str, type], default: str, **rules: Any) -> Any:
    """Makes a field that holds one of several dataclasses.

    Args:
      types, default: see `Choice`.
      **rules: see `Choice` and `Key`.
    """
    about = Choice(types=types, default=default, **rules)
    return dataclasses.field(
        default_factory=lambda: about.find(default, "")(), metadata={_META: about}
    )


def named(about: Choice, text: str, **rules: Any) -> Any:
    """Makes a field that maps names to choices.

    Args:
      about, text: see `Named`.
      **rules: see `Key`.
    """
    return dataclasses.field(
        default_factory=dict, metadata={_META: Named(choice=about, text=text, **rules)}
    )


def fields(cls: type) -> dict[str, tuple[dataclasses.Field, Key]]:
    """Returns the fields of a dataclass that configs can state, by name."""
    return {
        f.name: (f, f.metadata[_META])
        for f in dataclasses.fields(cls)
        if _META in f.metadata
    }


def is_read(about: Key, values: Mapping[str, object] | object) -> bool:
    """Tells whether a key is read beside the values of others of its section."""
    get = values.get if isinstance(values, Mapping) else lambda k: getattr(values, k)
    return all(get(k) in list(allowed) for k, allowed in (about.only_if or {}).items())


def walk(config: object) -> Iterator[tuple[tuple[str, ...], Key, object]]:
    """Yields path, description and value of every key of a config that is read.

    What a section says of itself is said of each of its keys.
    """
    for name, (_, about) in fields(type(config)).items():
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
    """Adds what a section says to what a key in it says."""
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

    An evaluation that states no more than a bare text does is that text.
    """
    tree = {}
    for name, (_, about) in fields(type(config)).items():
        value = getattr(config, name)
        if isinstance(about, Named):
            tree[name] = {k: _short(about, part) for k, part in value.items()}
        elif isinstance(about, Section):
            tree[name] = to_dict(value)
        elif is_read(about, config):
            tree[name] = value
    return tree


def _short(about: Named, part: object) -> dict | str:
    text = getattr(part, about.text, None)
    plain = about.choice.types[about.choice.default]
    if text and part == plain(**{about.text: text}):
        return text
    return to_dict(part)


def replace(config: T, changes: Mapping[str, object]) -> T:
    """Returns a config with other values of some keys.

    Args:
      config: stays as it is.
      changes: dotted key to value, which is not checked.
    """
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if rest:
            value = replace(getattr(config, first), {rest: value})
        config = dataclasses.replace(config, **{first: value})
    return config


def to_json(config: object) -> dict:
    """Returns a config as plain dicts, lists and numbers, equal after a JSON trip.

    Passwords in URLs are masked: it is written into checkpoints and logs.
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
    """Tells whether a value is a number of a kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def fit(name: str, value: object, default: object) -> object:
    """Returns a value as the type that a key takes, where it is nearly that.

    Args:
      name: of the key, for messages.
      value: as given.
      default: of that type.

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
    if type(value) is not type(default):
        raise UserError(
            f"{name}={value!r} is {type(value).__name__}, "
            f"but it takes {type(default).__name__} (as {default!r})"
        )
    return value


def check(name: str, about: Key, value: object) -> None:
    """Refuses a value that no run could use.

    Args:
      name: of the key.
      about: of it.
      value: of its type.

    Raises:
      UserError: naming the key, the value and what is allowed.
    """
    check_choice(name, about, value)
    numbers_ = value if isinstance(value, tuple) else (value,)
    if about.distinct and not numbers_:
        raise UserError(f"{name} is empty: state at least one number")
    for number in numbers_:
        if is_number(number, numbers.Real):
            _check_number(name, about, value, number)
    if about.distinct and len(set(numbers_)) < len(numbers_):
        raise UserError(f"{name}={value} states a number twice")


def check_choice(name: str, about: Key, value: object) -> None:
    """Refuses a text that is none of those that are allowed.

    Raises:
      UserError: with those that are.
    """
    if about.choices and value not in about.choices:
        raise UserError(f"{name}={value!r} is not one of {', '.join(about.choices)}")


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


def _own(name: str, where: str, example: type) -> type:
    """Returns a dataclass of somebody's own, named as "module:Name"."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    # It is the user's code: it may raise anything, and call sys.exit.
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{where}={name!r} cannot be imported: {type(error).__name__}: {error}; "
            "--debug shows the line"
        ) from error
    if not (dataclasses.is_dataclass(found) and isinstance(found, type)):
        raise UserError(
            f"{where}={name!r} is {found!r}: it must be a frozen dataclass of config "
            f"fields, as {example.__module__}:{example.__qualname__}"
        )
    return found

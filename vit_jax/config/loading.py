"""From a config file to a dataclass: reading, overrides, defaults, and every check.

A config file under `configs/` states only what its recipe is about, as plain data. The
fields of the dataclasses bring the rest; any key that nothing would read is an error.
"""

import ast
import difflib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeVar

from ml_collections import ConfigDict

from vit_jax.config import fields
from vit_jax.config.fields import Choice, Key, Named, Section
from vit_jax.errors import UserError

T = TypeVar("T")


def read(cls: type, spec: str, overrides: Mapping[str, object] | None = None) -> dict:
    """Returns what a config file and overrides state, as nested dicts.

    Args:
      cls: dataclass of the config.
      spec: path of a config file, with its argument after a colon if it takes one:
        "configs/digits.py", "configs/transfer.py:model=B/16,dataset=cifar100".
      overrides: dotted key to value, as {"optim.rate": 0.01}.

    Raises:
      UserError: the file or the argument does not exist, or an override is not of a
        section.
    """
    path, _, arg = spec.partition(":")
    raw = _run_config_file(
        pathlib.Path(path), lambda file: _config_of(file, arg or None)
    ).to_dict()
    raw.setdefault("name", pathlib.Path(path).stem)
    for name, value in (overrides or {}).items():
        *sections, leaf = name.split(".")
        _check_sections(cls, name, sections)
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UserError(
                    f"{name}: {'.'.join(sections)}={node!r} is a split; to state its "
                    f"keys give all: --config.{'.'.join(sections)}="
                    f"\"{{'split': {node!r}}}\""
                )
        node[leaf] = value
    return raw


def _check_sections(cls: type, name: str, sections: list[str]) -> None:
    """Refuses an override of a key in what is no section."""
    deepest = 1
    if sections:
        about = _about(cls, sections[0])
        if not isinstance(about, Section):
            raise _unknown(cls, name, {})
        deepest = 2 if isinstance(about, Named) else 1
    if len(sections) > deepest:
        raise _unknown(cls, name, {})


def parse_override(text: str) -> object:
    """Turns the text of `--config.key=text` into a Python literal or a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text, text)


def complete(cls: type[T], raw: Mapping | ConfigDict | object) -> T:
    """Builds a config from what a recipe states, and checks every key and value.

    Args:
      cls: dataclass of the config.
      raw: nested mapping that holds what a recipe states, or a config.

    Raises:
      UserError: unknown key (with the nearest known one), a value of another type or
        out of its bounds, or values that do not fit each other.
    """
    if isinstance(raw, ConfigDict):
        raw = raw.to_dict()
    elif not isinstance(raw, Mapping):
        raw = fields.to_dict(raw)
    for name, (field, about) in fields.fields(cls).items():
        is_mapping = isinstance(raw.get(name, {}), (Mapping, ConfigDict))
        if isinstance(about, Section) and not is_mapping:
            first = next(iter(_known(field, about, {}, name)), "name")
            raise UserError(
                f"{name}={raw[name]!r} is a section, not a key: set a key of it, "
                f"as {name}.{first}"
            )
    _refuse_unknown(cls, raw)
    return _build(cls, raw, "")


def _build(cls: type[T], raw: Mapping, where: str) -> T:
    """Builds a dataclass from what is stated, where every key is one of its own."""
    stated = {}
    for name, (field, about) in fields.fields(cls).items():
        path = f"{where}{name}"
        if isinstance(about, Named):
            given = raw.get(name, {})
            _check_names(name, about, given)
            stated[name] = {
                k: _build_named(about, v, f"{path}.{k}") for k, v in given.items()
            }
        elif isinstance(about, Section):
            given = raw.get(name, {})
            stated[name] = _build(
                _type_of(field, about, given, path), given, f"{path}."
            )
        else:
            default = _default(field, about, stated)
            stated[name] = fields.fit(path, raw.get(name, default), default)
            if fields.is_read(about, stated):
                fields.check(path, about, stated[name])
    return cls(**stated)


def _build_named(about: Named, value: object, where: str) -> object:
    if isinstance(value, str):
        value = {about.text: value}
    if not isinstance(value, (Mapping, ConfigDict)):
        raise UserError(
            f"{where}={value!r} is {type(value).__name__}, but it takes str (a split) "
            f"or a dict, as {{'{about.choice.by}': 'fewshot'}}"
        )
    cls = about.choice.find(value.get(about.choice.by, about.choice.default), where)
    known = fields.fields(cls)
    for name in value:
        if name not in known:
            raise UserError(_unknown_of(about.choice, where, name, cls, value))
    return _build(cls, value, f"{where}.")


def _unknown_of(choice: Choice, where: str, name: str, cls: type, value) -> str:
    others = [k for k, other in choice.types.items() if name in fields.fields(other)]
    if others:
        return (
            f"config key {where}.{name} is read only with {where}.{choice.by}="
            f"{' or '.join(others)}"
        )
    known = [k for k in fields.fields(cls) if k != choice.by]
    nearest = difflib.get_close_matches(name, known, 1, cutoff=0)[0]
    kind = value.get(choice.by, choice.default)
    return f"unknown config key {where}.{name}; the nearest of {kind} is {nearest}"


def _check_names(section: str, about: Named, given: Mapping) -> None:
    for name in given:
        if "/" in name or name in ("", *about.reserved):
            raise UserError(
                f"{section}: {name!r} cannot be the name of an evaluation, of which files "
                "and metrics are named: choose another, without /"
            )


def _default(field, about: Key, values: Mapping) -> object:
    """Returns a key's default, which may depend on another key of its section."""
    for other, allowed in (about.only_if or {}).items():
        if isinstance(allowed, Mapping) and values.get(other) in allowed:
            return allowed[values[other]]
    return field.default


def _about(cls: type, name: str) -> Key | None:
    found = fields.fields(cls).get(name)
    return found and found[1]


def _type_of(field, about: Section, given: Mapping, where: str) -> type:
    """Returns the dataclass of a section under the name that is stated."""
    if isinstance(about, Choice):
        return about.find(given.get(about.by, about.default), where)
    return field.default_factory


def _known(field, about: Section, given: Mapping, where: str) -> dict:
    """Returns the fields of a section under the name that is stated; see `fields`."""
    if isinstance(about, Named):
        return {}
    return fields.fields(_type_of(field, about, given, where))


def _refuse_unknown(cls: type, raw: Mapping) -> None:
    """Raises UserError for a choice that does not exist, or a key that nothing reads."""
    own = fields.fields(cls)
    sections = {
        name: _known(field, about, raw.get(name, {}), name)
        for name, (field, about) in own.items()
        if isinstance(about, Section)
    }
    for section, known in {"": own, **sections}.items():
        given = raw.get(section, {}) if section else raw
        for name, (_, about) in known.items():
            if name in given and not isinstance(about, Section):
                fields.check_choice(f"{section}.{name}".strip("."), about, given[name])
    for name in raw:
        if name not in own:
            raise _unknown(cls, name, raw)
    for section, known in sections.items():
        if isinstance(own[section][1], Named):
            continue
        given = raw.get(section, {})
        for name in given:
            if name not in known or not _is_read(known, name, given):
                raise _unknown(cls, f"{section}.{name}", raw)


def _is_read(known: dict, name: str, given: Mapping) -> bool:
    values = {k: given.get(k, field.default) for k, (field, _) in known.items()}
    return fields.is_read(known[name][1], values)


def _unknown(cls: type, name: str, raw: Mapping) -> UserError:
    """Returns what refuses a key, and names the nearest or what would have it read."""
    *section, leaf = name.split(".")
    names = []
    for part, (field, about) in fields.fields(cls).items():
        names.append(part)
        if not isinstance(about, Section):
            continue
        given = raw.get(part, {})
        known = _known(field, about, given, part)
        names += [f"{part}.{k}" for k in known if _is_read(known, k, given)]
        if [part] != section:
            continue
        if leaf in known:
            ((other, allowed), *_) = known[leaf][1].only_if.items()
            return UserError(
                f"config key {name} is read only with {part}.{other}="
                f"{' or '.join(allowed)}"
            )
        types = about.types if isinstance(about, Choice) else {}
        under = [k for k, t in types.items() if leaf in fields.fields(t)]
        if under and about.patterns:
            return UserError(
                f"config key {name} is not one of this form of {part}.{about.by}"
            )
        if under:
            return UserError(
                f"config key {name} is read only with {part}.{about.by}="
                f"{' or '.join(under)}"
            )
    nearest = difflib.get_close_matches(name, names, 1, cutoff=0)[0]
    return UserError(f"unknown config key {name}; the nearest known key is {nearest}")


def arguments(path: str) -> dict[str, object]:
    """Returns what a config file takes behind the colon: its `ARGUMENTS`.

    Args:
      path: of the file.

    Returns:
      Name to default, or to a tuple of the values that are allowed.

    Raises:
      UserError: there is no such file, or it does not run.
    """
    return _run_config_file(pathlib.Path(path), lambda file: dict(file.ARGUMENTS))


def _config_of(file: ModuleType, arg: str | None) -> ConfigDict:
    config = file.get_config(arg)
    if not isinstance(config, ConfigDict):
        raise TypeError(f"get_config returned {config!r}")
    return config


def _run_config_file(path: pathlib.Path, get: Callable[[ModuleType], T]) -> T:
    is_file = os.path.isfile(path)  # False for names that are too long, too.
    if os.path.exists(path) and not (is_file and path.suffix == ".py"):
        what = "does not end in .py" if is_file else "is not a file"
        raise UserError(
            f"--config={path}: {what}; give a Python file that defines "
            "get_config(arg=None), as configs/digits.py"
        )
    if not is_file:
        here = sorted(p.name for p in path.parent.glob("[!_]*.py"))
        raise UserError(
            f"config file {path} not found; {path.parent}/ has "
            f"{', '.join(name for name in here if name != 'common.py') or 'none'}"
        )
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    # Configs share `configs/common.py`, wherever the command was started.
    folders = path.resolve().parents
    root = str(next((p.parent for p in folders if p.name == "configs"), folders[1]))
    sys.path.insert(0, root)
    try:
        spec.loader.exec_module(module)
        return get(module)
    except UserError:
        raise
    # It is the user's code: it may raise anything, and call sys.exit.
    except (Exception, SystemExit) as error:
        raise UserError(
            f"config file {path} does not run: {type(error).__name__}: {error}; it "
            "must define get_config(arg=None) that returns a ConfigDict; --debug "
            "shows the line"
        ) from error
    finally:
        sys.path.remove(root)

"""From a config file to a dataclass: reading, overrides, defaults, and every check.

A config file under `configs/` states only what its recipe is about, as plain data. The
fields of the dataclasses bring the rest; any key that nothing would read is an error.
"""

import ast
import difflib
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TypeVar

from ml_collections import ConfigDict

from vit_jax.config import fields
from vit_jax.config.fields import Choice, Key, Named, Section
from vit_jax.config.synonyms import SYNONYMS
from vit_jax.errors import UserError

T = TypeVar("T")


def read(cls: type, spec: str, overrides: Mapping[str, object] | None = None) -> dict:
    """Returns what a config file and overrides state, as nested dicts.

    Args:
      cls: dataclass of the config.
      spec: path of a config file or name of a recipe, with its argument after a colon if
        it takes one: "configs/digits.py", "transfer:model=B/16,dataset=cifar100".
      overrides: dotted key to value, as {"optim.learning_rate": 0.01}.

    Raises:
      UserError: the file or the argument does not exist, or an override is not of a
        section.
    """
    name, _, arg = spec.partition(":")
    path = find(name)
    raw = _run_config_file(path, lambda file: _config_of(file, arg or None)).to_dict()
    raw.setdefault("name", path.stem)
    override(cls, raw, overrides or {})
    return raw


def recipe_folder() -> pathlib.Path:
    """Returns the folder of the recipes: of this checkout, or in the installed package."""
    package = pathlib.Path(__file__).parents[1]
    installed = package / "recipes" / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipes() -> dict[str, str]:
    """Returns the names of all recipes, as "digits" and "eval/probe", with their titles."""
    folder, found = recipe_folder(), {}
    for path in sorted(folder.rglob("[!_]*.py")):
        if path.stem != "common":
            name = path.relative_to(folder).with_suffix("").as_posix()
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            found[name] = text.partition("\n")[0].rstrip(".")
    return found


def find(name: str) -> pathlib.Path:
    """Returns the path of a config file, or of the recipe of that name.

    Args:
      name: a path; or "digits", "eval/probe.py" or "configs/digits.py", which are found
        from any folder that has no such file.
    """
    path = pathlib.Path(name)
    known = re.fullmatch(r"(?:configs/)?(\w+(?:/\w+)?)(?:\.py)?", name)
    if known and not os.path.exists(path):
        recipe = recipe_folder() / f"{known[1]}.py"
        # Unlike pathlib's, its answer for a name that is too long is no.
        return recipe if os.path.isfile(recipe) else path
    return path


def override(cls: type, raw: dict, overrides: Mapping[str, object]) -> None:
    """Sets dotted keys in what a recipe states; sections come before keys in them.

    Where the name of a choice changes, as `optim.name`, what the recipe states for the
    old one and the new one does not have is dropped.

    Args:
      cls: dataclass of the config.
      raw: nested dicts, which are changed.
      overrides: dotted key to value.

    Raises:
      UserError: what stands before the last dot of a key is not a section.
    """
    for name in sorted(overrides, key=lambda name: name.count(".")):
        _override(cls, raw, name, overrides)


def _override(cls: type, raw: dict, name: str, overrides: Mapping[str, object]) -> None:
    *sections, leaf = name.split(".")
    node, at, where, value, about = raw, cls, "", overrides[name], None
    while sections:
        section = sections.pop(0)
        where = f"{where}.{section}".strip(".")
        about = fields.fields(at).get(section)
        if not isinstance(about, Section):
            known = _known_keys(cls, _expand(cls, raw, ""), "")
            nearest = _nearest(cls, name, known)
            raise UserError(
                f"unknown config key {name}; the nearest known key is {nearest}"
            )
        text_key = about.text_key
        if isinstance(about, Named):
            if not sections:  # The key is the name itself.
                node = node.setdefault(section, {})
                break
            _check_mapping(about, node.setdefault(section, {}), where)
            node, section = node[section], sections.pop(0)
            where, about = f"{where}.{section}", about.choice
        if section in node:
            node[section] = _expand_section(about, node[section], where, text_key)
        node = node.setdefault(section, {})
        at = _type_of(about, node, where)
    if isinstance(about, Choice) and leaf == about.text_key:
        for other in fields.fields(at).keys() - fields.fields(about.find(value, where)):
            if not any(f"{key}.".startswith(f"{where}.{other}.") for key in overrides):
                node.pop(other, None)
    about = fields.fields(at).get(leaf)
    if type(about) is Section and about.text_key and isinstance(value, str):
        # What the recipe states beside it stays.
        stated = _expand_section(about, node.get(leaf, {}), name, about.text_key)
        value = stated | {about.text_key: value}
    node[leaf] = value


def parse_override(text: str) -> object:
    """Turns the text of `--config.key=text` into a Python literal or a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text, text)


def complete(cls: type[T], raw: Mapping | ConfigDict | object, where: str = "") -> T:
    """Builds a config from what a recipe states, and checks every key and value.

    Args:
      cls: dataclass of the config, or of one section.
      raw: nested mapping that holds what a recipe states, or a config.
      where: dotted key of the section with a dot behind, for messages.

    Raises:
      UserError: unknown key (with the nearest known one), a value of another type or
        out of its bounds, or values that do not fit each other.
    """
    if isinstance(raw, ConfigDict):
        raw = raw.to_dict()
    elif not isinstance(raw, Mapping):
        raw = fields.to_dict(raw)
    raw = _expand(cls, raw, where)
    _check_choices(cls, raw, where)

    def nearest(key):
        return _nearest(cls, key, _known_keys(cls, raw, where))

    _refuse_unread(cls, raw, where, None, nearest)
    return _build(cls, raw, where)


def _expand(cls: type, raw: Mapping, where: str) -> dict:
    """Returns what is stated of a section, with a dict for every section inside.

    Args:
      cls: dataclass of the section.
      raw: what is stated of it.
      where: its dotted key with a dot behind; "" for the whole config.

    Raises:
      UserError: a section is no mapping and no text that stands for one, or the name
        of a choice or of a named section is not allowed.
    """
    raw = dict(raw)
    for name, about in fields.fields(cls).items():
        path = f"{where}{name}"
        if name not in raw or not isinstance(about, Section):
            continue
        if isinstance(about, Named):
            _check_mapping(about, raw[name], path)
            _check_names(path, about, raw[name])
            raw[name] = {
                key: _expand_section(
                    about.choice, value, f"{path}.{key}", about.text_key
                )
                for key, value in raw[name].items()
            }
        else:
            raw[name] = _expand_section(about, raw[name], path, about.text_key)
    return raw


def _expand_section(about: Section, value: object, where: str, text_key: str) -> dict:
    """Expands a section, or a text that stands for one of its keys; see `_expand`."""
    if text_key and isinstance(value, str):
        value = {text_key: value}
    _check_mapping(about, value, where)
    return _expand(_type_of(about, value, where), value, f"{where}.")


def _check_mapping(about: Section, value: object, where: str) -> None:
    if isinstance(value, (Mapping, ConfigDict)):
        return
    first = "name"
    if not isinstance(about, Named):
        first = next(iter(fields.fields(_type_of(about, {}, where))))
    raise UserError(
        f"{where}={value!r} is a section, not a key: set a key of it, as "
        f"{where}.{first}"
    )


def _check_names(section: str, about: Named, given: Mapping) -> None:
    for name in given:
        if "/" in name or name in ("", *about.reserved):
            raise UserError(
                f"{section}: {name!r} cannot be a name here, because files and metrics "
                "are named after it: choose another, without /"
            )


def _type_of(about: Section, given: Mapping, where: str) -> type:
    """Returns the dataclass of a section under the name that is stated."""
    if isinstance(about, Choice):
        return about.find(given.get(about.text_key, about.default), where)
    return about.cls


def _sections(
    cls: type, raw: Mapping, where: str
) -> Iterator[tuple[str, Section, type, Mapping]]:
    """Yields dotted key, metadata, dataclass and content of each section inside one."""
    for name, about in fields.fields(cls).items():
        inside = {f"{where}{name}": (about, raw.get(name, {}))}
        if isinstance(about, Named):
            given = raw.get(name, {}).items()
            inside = {f"{where}{name}.{k}": (about.choice, v) for k, v in given}
        elif not isinstance(about, Section):
            continue
        for path, (one, content) in inside.items():
            yield path, one, _type_of(one, content, path), content


def _check_choices(cls: type, raw: Mapping, where: str) -> None:
    """Checks every text that has a list of allowed ones.

    It comes before unknown keys are refused, because a wrong text may be the reason
    why nothing would read a key.
    """
    for name, about in fields.fields(cls).items():
        if name in raw and not isinstance(about, Section):
            fields.check_choice(f"{where}{name}", about, raw[name])
    for path, _, inner, given in _sections(cls, raw, where):
        _check_choices(inner, given, f"{path}.")


def _refuse_unread(
    cls: type,
    raw: Mapping,
    where: str,
    choice: Choice | None,
    nearest: Callable[[str], str],
) -> None:
    """Refuses keys that nothing would read.

    Args:
      cls: dataclass of a section.
      raw: what is stated of it.
      where: its dotted key with a dot behind; "" for the whole config.
      choice: by which `cls` was chosen, or None.
      nearest: returns the known key that is most like one.

    Raises:
      UserError: such a key; the message names the nearest, or what would have it read.
    """
    own = fields.fields(cls)
    for name in raw:
        if name in own and _is_read(cls, name, raw):
            continue
        key = f"{where}{name}"
        if name in own:
            ((other, allowed), *_) = own[name].only_if.items()
            raise UserError(
                f"config key {key} is read only with {where}{other}={' or '.join(allowed)}"
            )
        types = choice.types if choice else {}
        others = [k for k, other in types.items() if name in fields.fields(other)]
        if others and choice.patterns:
            raise UserError(
                f"config key {key} is not one of this form of {where}{choice.text_key}"
            )
        if others:
            raise UserError(
                f"config key {key} is read only with {where}{choice.text_key}={' or '.join(others)}"
            )
        if isinstance(raw[name], Mapping):  # A section: one of its keys says more.
            key = ".".join([key, *list(raw[name])[:1]])
        raise UserError(
            f"unknown config key {key}; the nearest known key is {nearest(key)}"
        )
    for path, about, inner, given in _sections(cls, raw, where):
        chosen_by = about if isinstance(about, Choice) else None
        _refuse_unread(inner, given, f"{path}.", chosen_by, nearest)


def _nearest(cls: type, key: str, known: Iterable[str]) -> str:
    """Returns what a key is called now, or the known key that is most like it.

    Likeness is counted by words and then by letters.
    """
    for where, _, section in (("", "", cls), *fields.sections(cls)):
        for name, about in fields.fields(section).items():
            if about.formerly == key:
                return f"{where}.{name}".strip(".")
    plain = re.sub(r"[^a-z0-9]", "", key.rpartition(".")[2].lower())
    known = list(known)
    if meant := [key for key in SYNONYMS.get(plain, ()) if key in known]:
        return " or ".join(meant)
    words = set(re.findall(r"[a-z0-9]+", key.lower()))

    def likeness(other):
        shared = words & set(re.findall(r"[a-z0-9]+", other))
        letters = difflib.SequenceMatcher(None, key, other).ratio()
        return letters + len(shared) / max(1, len(words))

    return max(known, key=likeness)


def key_called(cls: type, word: str) -> str:
    """Returns the dotted key of a config that a word means alone; "" if it means none.

    Args:
      cls: dataclass of the config.
      word: a key, the end of one, or what other codebases call one, as "lr".
    """
    places = [("", "", cls), *fields.sections(cls)]
    keys = [
        f"{at}.{name}".strip(".") for at, _, c in places for name in fields.fields(c)
    ]
    meant = SYNONYMS.get(re.sub(r"[^a-z0-9]", "", word.lower()), [word])[0]
    found = [key for key in keys if key == meant or key.endswith(f".{meant}")]
    return min(found, key=lambda key: key.count("."), default="")


def _known_keys(cls: type, raw: Mapping, where: str) -> Iterator[str]:
    """Yields the dotted keys that are read, given what is stated."""
    for name in fields.fields(cls):
        if _is_read(cls, name, raw):
            yield f"{where}{name}"
    for path, _, inner, given in _sections(cls, raw, where):
        yield from _known_keys(inner, given, f"{path}.")


def _is_read(cls: type, name: str, raw: Mapping) -> bool:
    return fields.is_read(fields.fields(cls)[name], fields.defaults(cls) | raw)


def _build(cls: type[T], raw: Mapping, where: str) -> T:
    """Builds a dataclass from what is stated, where every key is one of its own."""
    stated = {}
    defaults = fields.defaults(cls)
    for name, about in fields.fields(cls).items():
        path = f"{where}{name}"
        if isinstance(about, Named):
            stated[name] = {
                k: _build_section(about.choice, given, f"{path}.{k}")
                for k, given in raw.get(name, {}).items()
            }
        elif isinstance(about, Section):
            stated[name] = _build_section(about, raw.get(name, {}), path)
        else:
            default = _default(about, defaults[name], stated)
            value = raw.get(name, default)
            if not isinstance(value, str) or value not in about.names:
                value = fields.fit(path, value, default)
            stated[name] = value
            if fields.is_read(about, stated):
                fields.check(path, about, stated[name])
    return cls(**stated)


def _build_section(about: Section, given: Mapping, where: str) -> object:
    return _build(_type_of(about, given, where), given, f"{where}.")


def _default(about: Key, default: object, values: Mapping) -> object:
    """Returns a key's default, which may depend on another key of its section."""
    for other, allowed in (about.only_if or {}).items():
        if isinstance(allowed, Mapping) and values.get(other) in allowed:
            return allowed[values[other]]
    return default


def arguments(path: str) -> dict[str, object]:
    """Returns what a config file takes behind the colon: its `ARGUMENTS`.

    Args:
      path: of the file.

    Returns:
      Name to default, or to a tuple of the values that are allowed.

    Raises:
      UserError: there is no such file, or it does not run.
    """
    return _run_config_file(find(path), lambda file: dict(file.ARGUMENTS))


def read_study(path: str, arg: str | None = None) -> dict:
    """Returns what `get_study` of a config file states (tools/sweeps/study_config.py).

    Args:
      path: path of a config file or name of a recipe.
      arg: what stands behind its colon.

    Raises:
      UserError: there is no such file, it does not run, or it has no `get_study`.
    """

    def get(file: ModuleType) -> dict:
        if not hasattr(file, "get_study"):
            raise UserError(
                f"--config={path}: the file has no get_study(arg=None), so it is no study; "
                "take one of configs/study/"
            )
        study = file.get_study(arg)
        if not isinstance(study, Mapping):
            raise UserError(f"{path}: get_study returned {study!r}: give a dict")
        return dict(study)

    return _run_config_file(find(path), get)


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
            f"{', '.join(name for name in here if name != 'common.py') or 'none'}, and "
            f"recipes are found by their names: {', '.join(recipes())}"
        )
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    # Configs share `configs/common.py`, wherever the command was started.
    folders = path.resolve().parents
    root = str(next((p.parent for p in folders if p.name == "configs"), folders[1]))
    sys.path.insert(0, root)
    try:
        # Not by `exec_module`, which takes the bytecode of an earlier text of the same
        # size and second.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))  # noqa: S102
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

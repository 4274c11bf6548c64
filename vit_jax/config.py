"""Loading, completing and checking configs.

A config file under `configs/` states only what its recipe is about. `load` adds the
rest from `schema.py`, the one reference of what can be set; any key that nothing
would read is an error.
"""

import ast
import difflib
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeVar

from ml_collections import ConfigDict

from vit_jax import bounds, evals
from vit_jax.errors import UserError
from vit_jax.printing import masked
from vit_jax.schema import CHOICES, COMMON, FORMS

T = TypeVar("T")


def load(spec: str, overrides: Mapping[str, object] | None = None) -> ConfigDict:
    """Reads a config file, applies overrides and completes it.

    Args:
      spec: path of a config file, with its argument after a colon if it takes one:
        "configs/digits.py", "configs/transfer.py:model=B/16,dataset=cifar100".
      overrides: dotted key to value, as {"optim.rate": 0.01}.

    Returns:
      The complete, locked config.

    Raises:
      UserError: the file, the argument or a key does not exist, or a value does not
        fit its key.
    """
    return complete(_stated(spec, overrides))


def load_evaluation(
    spec: str, overrides: Mapping[str, object] | None = None
) -> ConfigDict:
    """Reads a config file for `python -m vit_jax.evaluate`.

    Args:
      spec, overrides: as of `load`.

    Returns:
      The complete, locked config; what it says of the model, and of its classes and
      images, is the weights' to say.

    Raises:
      UserError: as `load`, or a key that only training reads, or no evaluation.
    """
    raw = _stated(spec, overrides)
    evals.refuse_unread(raw)
    if isinstance(raw.setdefault("data", {}), dict):
        raw["data"].setdefault("classes", 1)  # Which nobody reads, as the rate.
    return complete(raw | {"optim": {"rate": 1.0}})


def _stated(spec: str, overrides: Mapping[str, object] | None) -> dict:
    """Returns what a config file and overrides state."""
    path, _, arg = spec.partition(":")
    raw = _run_config_file(
        pathlib.Path(path), lambda file: _config_of(file, arg or None)
    ).to_dict()
    raw.setdefault("name", pathlib.Path(path).stem)
    for key, value in (overrides or {}).items():
        *sections, leaf = key.split(".")
        deepest = 2 if sections[:1] == ["evals"] else 1
        if len(sections) > deepest or not set(sections[:1]) <= COMMON.keys():
            raise UserError(_unknown_key(key, _known_keys({})))
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UserError(
                    f"{key}: evals.{section}={node!r} is a split; to state its keys "
                    f"give all: --config.evals.{section}=\"{{'split': {node!r}}}\""
                )
        node[leaf] = value
    return raw


def parse_override(text: str) -> object:
    """Turns the text of `--config.key=text` into a Python literal or a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text, text)


def complete(raw: Mapping | ConfigDict) -> ConfigDict:
    """Adds the defaults to a config and checks every key and type.

    Args:
      raw: nested mapping that holds what a recipe states.

    Returns:
      A locked ConfigDict with every key that is read under the choices made.

    Raises:
      UserError: unknown key (with the nearest known one), or a value of another type.
    """
    raw = raw.to_dict() if isinstance(raw, ConfigDict) else dict(raw)
    for section in filter(None, COMMON):
        if not isinstance(raw.get(section, {}), (Mapping, ConfigDict)):
            raise UserError(
                f"{section}={raw[section]!r} is a section, not a key: set a key of it, "
                f"as {section}.{next(iter(COMMON[section]), 'name')}"
            )
    known = _known_keys(raw)
    done = {}
    for section, defaults in known.items():
        given = _given(raw, section)
        if section == "evals":  # Whose keys the user names.
            done[section] = evals.complete_all(given)
            continue
        for key in given:
            if key not in defaults:
                raise UserError(_unknown_key(f"{section}.{key}".strip("."), known))
        done[section] = {
            key: bounds.fit(
                f"{section}.{key}".strip("."), given.get(key, default), default
            )
            for key, default in defaults.items()
        }
    config = ConfigDict({**done.pop(""), **done}, convert_dict=True)
    bounds.check(config, flatten(config))
    return config.lock()


def steps(node: ConfigDict, name: str, total_steps: int, steps_per_epoch: float) -> int:
    """Returns a length in steps that `node` states as steps, epochs or a fraction.

    Args:
      node: config section with `{name}_steps`, `{name}_epochs` and `{name}_fraction`.
      name: which length, for instance "warmup".
      total_steps: length of the run.
      steps_per_epoch: training examples by batch size.

    Raises:
      UserError: more than one of them is set.
    """
    units = {
        f"{name}_steps": 1,
        f"{name}_epochs": steps_per_epoch,
        f"{name}_fraction": total_steps,
    }
    given = {key: node[key] for key in units if node.get(key, 0)}
    if len(given) > 1:
        stated = " and ".join(f"{key}={value}" for key, value in given.items())
        raise UserError(
            f"config states {stated}: keep one of them, set the others to 0"
        )
    return sum(max(1, round(value * units[key])) for key, value in given.items())


def total_steps(config: ConfigDict, examples: int) -> int:
    """Returns the length of the run in steps.

    Args:
      config: complete config.
      examples: size of the training split.

    Raises:
      UserError: not exactly one of `total_steps` and `epochs` is set.
    """
    if bool(config.total_steps) == bool(config.epochs):
        raise UserError(
            f"config states total_steps={config.total_steps} and "
            f"epochs={config.epochs}: set exactly one of them"
        )
    total = config.total_steps or max(
        1, round(config.epochs * examples / config.batch_size)
    )
    if total >= 2**31:  # The step is counted in 32 bits.
        raise UserError(
            f"epochs={config.epochs}: with {examples:,} images and "
            f"batch_size={config.batch_size} they are {total:,} steps, of which a run "
            "has fewer than 2**31: lower epochs"
        )
    return total


def differences(a: Mapping | ConfigDict, b: Mapping | ConfigDict) -> list[str]:
    """Lists the keys in which two nested configs differ, as "key: 1 -> 2"."""
    a, b = flatten(a), flatten(b)
    return [
        f"{key}: {a.get(key, 'absent')} -> {b.get(key, 'absent')}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key, "absent") != b.get(key, "absent")
    ]


def to_json(config: ConfigDict) -> dict:
    """Returns the config as plain dicts, lists and numbers, equal after a JSON trip.

    Passwords in URLs are masked: it is written into checkpoints and logs.
    """
    return {
        key: to_json(value)
        if isinstance(value, ConfigDict)
        else list(value)
        if isinstance(value, tuple)
        else masked(value)
        if isinstance(value, str)
        else value
        for key, value in config.items()
    }


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


def _known_keys(raw: Mapping) -> dict[str, dict]:
    """Returns section -> key -> default under the choices that `raw` makes."""
    known = {section: dict(keys) for section, keys in COMMON.items()}
    variant = raw.get("model", {}).get("variant", COMMON["model"]["variant"])
    form = next(form for form in FORMS if re.fullmatch(form, str(variant)))
    known["model"] |= FORMS[form]
    for (section, key), options in CHOICES.items():
        if key not in known[section]:
            continue
        value = _given(raw, section).get(key, known[section][key])
        if not isinstance(value, str) or value not in options:
            name = f"{section}.{key}".strip(".")
            raise UserError(f"{name}={value!r} is not one of {', '.join(options)}")
        known[section] |= options[value]
    return known


def _given(raw: Mapping, section: str) -> dict:
    """Returns what the recipe states in a section ("" is the top level)."""
    if section:
        return raw.get(section, {})
    return {key: value for key, value in raw.items() if key not in COMMON or not key}


def _unknown_key(name: str, known: Mapping[str, Mapping]) -> str:
    names = [f"{s}.{k}".strip(".") for s, keys in known.items() for k in (*keys, "")]
    *section, key = name.split(".")
    for (place, choice), options in CHOICES.items():
        under = [option for option, keys in options.items() if key in keys]
        if [place] == section and under:
            return (
                f"config key {name} is read only with {place}.{choice}="
                f"{' or '.join(under)}"
            )
    if section == ["model"] and any(key in keys for keys in FORMS.values()):
        return f"config key {name} is not one of this form of model.variant"
    nearest = difflib.get_close_matches(name, [n for n in names if n], 1, cutoff=0)
    return f"unknown config key {name}; the nearest known key is {nearest[0]}"


def flatten(tree: Mapping | ConfigDict, prefix: str = "") -> dict[str, object]:
    """Returns the values of a nested config by their dotted keys."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, (Mapping, ConfigDict)):
            flat |= flatten(value, f"{prefix}{key}.")
        else:  # A tuple comes back from JSON as a list.
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat

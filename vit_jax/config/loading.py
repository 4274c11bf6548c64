"""Loads a config file into a dataclass: overrides, defaults and all checks.

A config file under `configs/` sets only the keys that its recipe is about, as plain
data. The fields of the dataclasses have the defaults; any key that nothing reads is an
error.

Loading has two stages. `override` changes the plain data of a recipe, as often as
commands and sweeps set further keys; another `optim.name` drops the keys of the old
optimiser. `complete` then checks the result as a whole, and builds the dataclass once.
"""

import ast
import difflib
import importlib.util
import numbers
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TypeVar

from ml_collections import ConfigDict

from vit_jax.command_line.printing import print_error
from vit_jax.config import fields
from vit_jax.config.fields import Choice, Named, Section
from vit_jax.config.lengths import alternatives
from vit_jax.errors import UserError

T = TypeVar("T")

# Names that timm, big_vision, Hugging Face and papers use for these keys, without case
# and punctuation: the error about an unknown key suggests the known one.
_WORDS = {
    "batch_size": "batch batchsize bs perdevicetrainbatchsize",
    "data.data_dir": "datadir datapath dataroot root",
    "data.image_size": "imgsize imagesize inputsize resolution res cropsize",
    "data.name": "dataset datasetname",
    "data.num_classes": "numclasses nbclasses numlabels",
    "data.num_workers": "workers numworkers dataloaderworkers",
    "data.train_transform": (
        "mixup mixupalpha cutmix cutmixalpha randaugment randaug aa autoaugment "
        "augmentation augment colorjitter reprob randomerasing hflip ppcommon pp"
    ),
    "ema.decay": "ema emadecay modelema polyak polyakdecay",
    "ema.warmup": "emawarmup modelemawarmup usewarmup",
    "epochs": "epoch numepochs numtrainepochs totalepochs",
    "init.checkpoint": "pretrained finetune resume modelinit initialcheckpoint",
    "model.drop_path_rate": "droppath stochasticdepth stochdepth",
    "model.dropout": "droprate hiddendropoutprob",
    "model.dtype": "amp fp16 bf16 precision mixedprecision",
    "model.num_heads": "head heads numattentionheads nheads",
    "model.patch_dropout": "patchdroprate patchdrop",
    "model.pool": "head globalpool pooling pooltype classifier",
    "model.scan": "scanlayers",
    "model.variant": "model modelname arch architecture patchsize variant",
    "optim.b1": "beta1",
    "optim.b2": "beta2",
    "optim.base_learning_rate": "blr baselr baselearningrate",
    "optim.grad_accum_steps": "accum accumiter gradientaccumulationsteps gradaccum",
    "optim.grad_clip_norm": "gradclip clipgrad clipgradnorm maxgradnorm gradclipnorm clip",
    "optim.layer_decay": "layerdecay llrd",
    "optim.learning_rate": "lr learningrate rate peaklr maxlr",
    "optim.name": "opt optimizer optimiser",
    "optim.schedule": "sched scheduler lrscheduler lrschedulertype",
    "optim.warmup_epochs": "warmupepochs",
    "optim.warmup_learning_rate": "warmuplr warmuplrinit warmupinitlr",
    "optim.warmup_steps": "warmup warmupsteps",
    "optim.weight_decay": "wd weightdecay decay",
    "task.label_smoothing": "smoothing labelsmoothing labelsmoothingfactor",
    "total_steps": "steps maxsteps numsteps totalsteps",
}
SYNONYMS = {
    word: [key for key, words in _WORDS.items() if word in words.split()]
    for all_words in _WORDS.values()
    for word in all_words.split()
}

# Keys of earlier versions that stored configs may have, with the value without effect.
_FORMER = {
    "optim.weight_decay_epochs": 0.0,
    "optim.weight_decay_fraction": 0.0,
    "task.gram_start_epochs": 0.0,
    "task.gram_start_fraction": 0.0,
    "task.small_weight_epochs": 0.0,
    "task.small_weight_fraction": 0.0,
    "task.teacher_momentum_epochs": 0.0,
    "task.teacher_momentum_fraction": 0.0,
    "task.teacher_temperature_fraction": 0.0,
}


def drop_former_keys(stored: dict[str, dict]) -> None:
    """Removes keys of earlier versions that had no effect from a stored config."""
    for path, value in _FORMER.items():
        section, _, name = path.partition(".")
        if stored.get(section, {}).get(name) == value:
            del stored[section][name]


def is_former(difference: str) -> bool:
    """Returns whether a line of `fields.differences` is about a key of `drop_former_keys`."""
    return difference.endswith(
        tuple(f".{path}: {value} -> absent" for path, value in _FORMER.items())
    )


def read(cls: type, spec: str, overrides: Mapping[str, object] | None = None) -> dict:
    """Returns the keys that a config file and overrides set, as nested dicts.

    Args:
      cls: dataclass of the config.
      spec: path of a config file or name of a recipe, with its argument after a colon
        if it takes one: "configs/digits.py", "transfer:model=B/16,dataset=cifar100".
      overrides: dotted key to value, such as {"optim.learning_rate": 0.01}.

    Raises:
      UserError: the file or the argument does not exist, or a section is set as a key.
    """
    name, _, arg = spec.partition(":")
    path = find(name)
    raw = _run_config_file(path, lambda file: _config_of(file, arg or None)).to_dict()
    raw.setdefault("name", path.stem)
    override(cls, raw, overrides or {})
    return raw


def recipe_folder() -> pathlib.Path:
    """Returns the folder of the recipes, in this checkout or the installed package."""
    package = pathlib.Path(__file__).parents[1]
    installed = package / "recipes" / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipes() -> dict[str, str]:
    """Returns the titles of all recipes by name, such as "digits" and "eval/probe"."""
    folder, titles = recipe_folder(), {}
    for path in sorted(folder.rglob("[!_]*.py")):
        if path.stem != "common":
            name = path.relative_to(folder).with_suffix("").as_posix()
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            titles[name] = text.partition("\n")[0].rstrip(".")
    return titles


def find(name: str) -> pathlib.Path:
    """Returns the path of a config file.

    Args:
      name: a path; or, if that file does not exist, the name of a recipe, such as
        "digits", "eval/probe.py" or "configs/digits.py".
    """
    path = pathlib.Path(name)
    known = re.fullmatch(r"(?:configs/)?(\w+(?:/\w+)?)(?:\.py)?", name)
    if known and not os.path.exists(path):
        recipe = recipe_folder() / f"{known[1]}.py"
        # Not pathlib's `is_file`, which raises if a name is too long.
        return recipe if os.path.isfile(recipe) else path
    return path


def override(
    cls: type,
    raw: dict,
    overrides: Mapping[str, object],
    tell: Callable[[str], object] = print_error,
) -> None:
    """Applies overrides to the keys of a recipe: first whole sections, then their keys.

    If an override changes the kind of a section, as `optim.name` does, the recipe's
    keys that the new kind does not have are dropped. A text for a section chooses its
    kind; a mapping replaces the section. A key replaces its alternatives: `total_steps`
    replaces `epochs`. None removes a named part of a section, such as an evaluation
    (`evals.knn`), or all of them (`evals`).

    Args:
      cls: dataclass of the config.
      raw: keys of the recipe as nested dicts, changed in place.
      overrides: dotted key to value.
      tell: function that is called with a line about dropped keys.

    Raises:
      UserError: a section is set as a key.
    """
    merged = _merge(cls, raw, overrides, "", tell)
    raw.clear()
    raw.update(merged)


def _merge(
    cls: type, raw: Mapping, overrides: Mapping, where: str, tell: Callable
) -> dict:
    """Returns the keys that are set in a section, with a dict for each section inside."""
    raw, inner = dict(raw), _by_section(overrides)
    for name in inner:
        value = inner[name].get(None)
        # A value that is not a number replaces nothing here; it is refused later.
        replaces = isinstance(value, numbers.Real) and value > 0
        for other in alternatives(name) & raw.keys() - inner.keys():
            if replaces and raw[other]:
                tell(
                    f"{where}{other}={raw.pop(other)}: the recipe's value is dropped for "
                    f"{where}{name}={value}"
                )
    for name in {**raw, **inner}:
        path, value, given = f"{where}{name}", raw.get(name, {}), inner.get(name, {})
        about = fields.fields(cls).get(name)
        if isinstance(about, Named):
            value = given.pop(None, value)
            none_left = value is None
            value = {} if none_left else value
            _check_mapping(about, value, path)
            parts, given, kept = dict(value), _by_section(given), {}
            for part in {**parts, **given}:
                if "/" in part or part in ("", *about.reserved):
                    raise UserError(
                        f"{path}: {part!r} cannot be a name here, because files and "
                        "metrics are named after it: choose another, without /"
                    )
                if _is_removed(parts, given, part, path):
                    if part not in parts and not none_left:
                        known = ", ".join(parts) or "none"
                        raise UserError(
                            f"{path}.{part}=None: {part!r} is not among the names "
                            f"{known}; leave it out"
                        )
                    continue
                kept[part] = _merge_section(
                    *(about.choice, about.text_key, parts.get(part, {})),
                    *(given.get(part, {}), f"{path}.{part}", tell),
                )
            raw[name] = kept
        elif isinstance(about, Section):
            raw[name] = _merge_section(about, about.text_key, value, given, path, tell)
        elif given:  # Keys below a key that is not a section are refused later.
            raw[name] = given.pop(None, given)
    return raw


def _is_removed(parts: Mapping, given: Mapping, name: str, where: str) -> bool:
    """Returns whether overrides remove a named part of a section, by the value None."""
    path, keys = f"{where}.{name}", given.get(name, {})
    if name not in given:
        if parts[name] is None:
            raise UserError(
                f"{where}={{{name!r}: None}}: a mapping replaces all of {where}; set "
                f"{path}=None to remove only {name!r}"
            )
        return False
    if None not in keys or keys[None] is not None:
        return False
    if others := [key for key in keys if key is not None]:
        raise UserError(
            f"{path}=None removes {name!r}, but {path}.{others[0]} is set too: leave one "
            "of them out"
        )
    return True


def _merge_section(
    about: Section,
    text_key: str,
    value: object,
    given: dict,
    where: str,
    tell: Callable,
) -> dict:
    """Merges overrides into a section, or into a text that was given for one."""
    if text_key == about.text_key and isinstance(given.get(None), str):
        given = {text_key: given.pop(None)} | given
    value = given.pop(None, value)
    if text_key and isinstance(value, str):
        value = {text_key: value}
    _check_mapping(about, value, where)
    cls = _type_of(about, value, where)
    if isinstance(about, Choice) and about.text_key in given:
        kind, before = given[about.text_key], fields.fields(cls)
        cls = about.find(kind, where)
        kept = fields.fields(cls).keys() | {name.partition(".")[0] for name in given}
        if gone := [name for name in value if name in before and name not in kept]:
            tell(
                f"{where}.{about.text_key}={kind!r} has no "
                f"{', '.join(f'{where}.{name}' for name in gone)}: the recipe's value is "
                "dropped"
            )
        value = {name: one for name, one in value.items() if name not in gone}
    return _merge(cls, value, given, f"{where}.", tell)


def _by_section(overrides: Mapping) -> dict[str, dict]:
    """Groups dotted keys by their first word; the key of one word is None."""
    grouped = {}
    for name, value in overrides.items():
        first, dot, rest = name.partition(".")
        grouped.setdefault(first, {})[rest if dot else None] = value
    return grouped


def parse_override(text: str) -> object:
    """Turns the text of `--config.key=text` into a Python literal or a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text, text)


def complete(cls: type[T], raw: Mapping | ConfigDict | object, where: str = "") -> T:
    """Builds a config with its defaults, and checks every key and value.

    Args:
      cls: dataclass of the config, or of one section.
      raw: nested mapping of the keys that a recipe sets, or a config.
      where: dotted key of the section with a dot at the end, for messages.

    Raises:
      UserError: a key is unknown (the message suggests the nearest known one), a value
        has another type or is out of its bounds, or values do not fit each other.
    """
    if isinstance(raw, ConfigDict):
        raw = raw.to_dict()
    elif not isinstance(raw, Mapping):
        raw = fields.to_dict(raw)
    raw = _merge(cls, raw, {}, where, print_error)  # Its sections become dicts.
    return _build(Section(cls=cls), raw, where, lambda: _known_keys(cls, raw, where))


def _check_mapping(about: Section, value: object, where: str) -> None:
    if isinstance(value, (Mapping, ConfigDict)):
        return
    first = "name"
    if not isinstance(about, Named):
        first = next(iter(fields.fields(_type_of(about, {}, where))))
    raise UserError(
        f"{where}={value!r} is a section, not a key: set a key of it, such as "
        f"{where}.{first}"
    )


def _type_of(about: Section, given: Mapping, where: str) -> type:
    """Returns the dataclass of a section, given the keys that are set in it."""
    if isinstance(about, Choice):
        return about.find(given.get(about.text_key, about.default), where)
    return about.cls


def _build(
    section: Section, raw: Mapping, where: str, known: Callable[[], Iterable[str]]
) -> object:
    """Builds the dataclass of a section from what `_merge` returned, and checks it."""
    cls = _type_of(section, raw, where.rstrip("."))
    choice = section if isinstance(section, Choice) else None
    keys, defaults = fields.fields(cls), fields.defaults(cls)
    # First, because a wrong text may be the reason why a key would not be read.
    for name in defaults:
        if name in raw:
            fields.check_choice(f"{where}{name}", keys[name], raw[name])
    for name, value in raw.items():
        of_plain_key = isinstance(value, Mapping) and name in defaults
        if name not in keys or of_plain_key or not _is_read(cls, name, raw):
            raise _unread(cls, name, value, where, choice, known)
    values = {}
    for name, about in keys.items():
        path = f"{where}{name}"
        if isinstance(about, Named):
            values[name] = {
                each: _build(about.choice, given, f"{path}.{each}.", known)
                for each, given in raw.get(name, {}).items()
            }
        elif isinstance(about, Section):
            values[name] = _build(about, raw.get(name, {}), f"{path}.", known)
        else:
            default = defaults[name]
            for other, allowed in (about.only_if or {}).items():
                if isinstance(allowed, Mapping):  # Each value brings its default.
                    default = allowed.get(values.get(other), default)
            value = raw.get(name, default)
            is_name = isinstance(value, str) and value in about.names
            if not is_name and not (value is None and about.optional):
                like = default if about.like is None else about.like
                value = fields.fit(path, value, like)
            values[name] = value
            if fields.is_read(about, values):
                fields.check(path, about, value)
    return cls(**values)


def _unread(
    cls: type,
    name: str,
    value: object,
    where: str,
    choice: Choice | None,
    known: Callable[[], Iterable[str]],
) -> UserError:
    """Returns the error for a key that nothing would read; see `_build`."""
    key, about = f"{where}{name}", fields.fields(cls).get(name)
    if about and not isinstance(value, Mapping):
        ((other, allowed), *_) = about.only_if.items()
        only = f"{where}{other}={' or '.join(allowed)}"
        return UserError(f"config key {key} is read only with {only}")
    types = choice.types if choice and not about else {}
    if kinds := [k for k, kind in types.items() if name in fields.fields(kind)]:
        only = f"read only with {where}{choice.text_key}={' or '.join(kinds)}"
        if choice.patterns:
            only = f"not read with this form of {where}{choice.text_key}"
        return UserError(f"config key {key} is {only}")
    if isinstance(value, Mapping):  # A section: one of its keys says more.
        key = ".".join([key, *list(value)[:1]])
    return UserError(
        f"unknown config key {key}; the nearest known key is {_nearest(key, known())}"
    )


def _nearest(key: str, known: Iterable[str]) -> str:
    """Returns the known key that is most similar to `key`, by its words and letters."""
    known = list(known)
    if meant := [each for each in _synonyms(key.rpartition(".")[2]) if each in known]:
        return " or ".join(meant)
    words = set(re.findall(r"[a-z0-9]+", key.lower()))

    def similarity(other):
        shared = words & set(re.findall(r"[a-z0-9]+", other))
        letters = difflib.SequenceMatcher(None, key, other).ratio()
        return letters + len(shared) / max(1, len(words))

    return max(known, key=similarity)


def _synonyms(word: str) -> list[str]:
    return SYNONYMS.get(re.sub(r"[^a-z0-9]", "", word.lower()), [])


def key_called(cls: type, word: str) -> str:
    """Returns the dotted key that a single word stands for; "" if it is unknown.

    Args:
      cls: dataclass of the config.
      word: a key, the end of a key, or its name in other codebases, such as "lr".
    """
    sections = [("", "", cls), *fields.sections(cls)]
    keys = [
        f"{at}.{name}".strip(".") for at, _, c in sections for name in fields.fields(c)
    ]
    meant = [*_synonyms(word), word][0]
    matches = [key for key in keys if key == meant or key.endswith(f".{meant}")]
    return min(matches, key=lambda key: key.count("."), default="")


def _known_keys(cls: type, raw: Mapping, where: str) -> Iterator[str]:
    """Yields the dotted keys that are read, given those that are set."""
    for name, about in fields.fields(cls).items():
        inside = {}
        if isinstance(about, Named):
            given = raw.get(name, {}).items()
            inside = {f"{where}{name}.{k}": (about.choice, v) for k, v in given}
        elif isinstance(about, Section):
            inside = {f"{where}{name}": (about, raw.get(name, {}))}
        if _is_read(cls, name, raw):
            yield f"{where}{name}"
        for path, (section, given) in inside.items():
            yield from _known_keys(_type_of(section, given, path), given, f"{path}.")


def _is_read(cls: type, name: str, raw: Mapping) -> bool:
    return fields.is_read(fields.fields(cls)[name], fields.defaults(cls) | raw)


def read_study(path: str, arg: str | None = None) -> dict:
    """Returns the study that `get_study(arg)` of a config file defines.

    Args:
      path: path of a config file or name of a recipe.
      arg: text behind the colon of --config; None without a colon.

    Raises:
      UserError: the file does not exist, does not run, or has no `get_study`.
    """

    def get(file: ModuleType) -> dict:
        if not hasattr(file, "get_study"):
            raise UserError(
                f"--config={path}: the file has no get_study(arg=None), so it is not a "
                "study; choose one of configs/study/"
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
            "get_config(arg=None), such as configs/digits.py"
        )
    if not is_file:
        here = sorted(p.name for p in path.parent.glob("[!_]*.py"))
        raise UserError(
            f"config file {path} not found; {path.parent}/ has "
            f"{', '.join(name for name in here if name != 'common.py') or 'none'}; a "
            f"recipe can be given by its name: {', '.join(recipes())}"
        )
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    # Configs share `configs/common.py`, wherever the command was started.
    folders = path.resolve().parents
    root = str(next((p.parent for p in folders if p.name == "configs"), folders[1]))
    sys.path.insert(0, root)
    try:
        # Not by `exec_module`, which uses the old bytecode if a file was changed within
        # a second and kept its size.
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

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
from vit_jax.config.fields import Choice, Named, Section
from vit_jax.errors import UserError
from vit_jax.printing import print_error

T = TypeVar("T")

# What other codebases call our keys, for the hint at an unknown one: words without case
# and punctuation, as timm, big_vision, Hugging Face and the papers have them.
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
    for line in override(cls, raw, overrides or {}):
        print_error(line)
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


def override(cls: type, raw: dict, overrides: Mapping[str, object]) -> list[str]:
    """Sets dotted keys in what a recipe states; sections come before keys in them.

    Where the kind of a section changes, as by `optim.name`, what the recipe states of the
    old kind and the new one does not have is dropped. A text for a section chooses its
    kind; a mapping replaces the section.

    Args:
      cls: dataclass of the config.
      raw: nested dicts, which are changed.
      overrides: dotted key to value.

    Returns:
      A line for each section that keys were dropped of.

    Raises:
      UserError: a section is stated that is none.
    """
    dropped = []
    merged = _merge(cls, raw, overrides, "", dropped)
    raw.clear()
    raw.update(merged)
    return dropped


def _merge(
    cls: type, raw: Mapping, overrides: Mapping, where: str, dropped: list[str]
) -> dict:
    """Returns what is stated of a section, with a dict for every section inside."""
    raw, inner = dict(raw), _by_section(overrides)
    for name in {**raw, **inner}:
        path, stated, given = f"{where}{name}", raw.get(name, {}), inner.get(name, {})
        about = fields.fields(cls).get(name)
        if isinstance(about, Named):
            stated = given.pop(None, stated)
            _check_mapping(about, stated, path)
            parts, given = dict(stated), _by_section(given)
            for part in {**parts, **given}:
                if "/" in part or part in ("", *about.reserved):
                    raise UserError(
                        f"{path}: {part!r} cannot be a name here, because files and "
                        "metrics are named after it: choose another, without /"
                    )
                parts[part] = _merge_section(
                    *(about.choice, about.text_key, parts.get(part, {})),
                    *(given.get(part, {}), f"{path}.{part}", dropped),
                )
            raw[name] = parts
        elif isinstance(about, Section):
            raw[name] = _merge_section(
                about, about.text_key, stated, given, path, dropped
            )
        elif given:  # Keys below one that is no section are refused later.
            raw[name] = given.pop(None, given)
    return raw


def _merge_section(
    about: Section,
    text_key: str,
    stated: object,
    given: dict,
    where: str,
    dropped: list[str],
) -> dict:
    """Merges overrides into a section, or into a text that stands for one of its keys."""
    if text_key == about.text_key and isinstance(given.get(None), str):
        given = {text_key: given.pop(None)} | given
    stated = given.pop(None, stated)
    if text_key and isinstance(stated, str):
        stated = {text_key: stated}
    _check_mapping(about, stated, where)
    cls = _type_of(about, stated, where)
    if isinstance(about, Choice) and about.text_key in given:
        kind, before = given[about.text_key], cls
        cls = about.find(kind, where)
        kept = fields.fields(cls).keys() | {name.partition(".")[0] for name in given}
        gone = [n for n in stated if n in fields.fields(before) and n not in kept]
        if gone:
            dropped.append(
                f"{where}.{about.text_key}={kind!r} has no "
                f"{', '.join(f'{where}.{name}' for name in gone)}: what the recipe states "
                "of it is dropped"
            )
        stated = {name: value for name, value in stated.items() if name not in gone}
    return _merge(cls, stated, given, f"{where}.", dropped)


def _by_section(overrides: Mapping) -> dict[str, dict]:
    """Groups dotted keys by their first word; the word alone is the key None."""
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
    raw = _merge(cls, raw, {}, where, [])
    return _build(Section(cls=cls), raw, where, lambda: _known_keys(cls, raw, where))


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


def _type_of(about: Section, given: Mapping, where: str) -> type:
    """Returns the dataclass of a section under the name that is stated."""
    if isinstance(about, Choice):
        return about.find(given.get(about.text_key, about.default), where)
    return about.cls


def _build(
    section: Section, raw: Mapping, where: str, known: Callable[[], Iterable[str]]
) -> object:
    """Builds the dataclass of a section from what `_merge` returned, and checks it."""
    cls = _type_of(section, raw, where.rstrip("."))
    choice = section if isinstance(section, Choice) else None
    own, defaults = fields.fields(cls), fields.defaults(cls)
    # First, because a wrong text may be the reason why nothing would read a key.
    for name in defaults:
        if name in raw:
            fields.check_choice(f"{where}{name}", own[name], raw[name])
    for name, value in raw.items():
        of_plain_key = isinstance(value, Mapping) and name in defaults
        if name not in own or of_plain_key or not _is_read(cls, name, raw):
            raise _unread(cls, name, value, where, choice, known)
    values = {}
    for name, about in own.items():
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
            if not isinstance(value, str) or value not in about.names:
                value = fields.fit(path, value, default)
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
            only = f"not one of this form of {where}{choice.text_key}"
        return UserError(f"config key {key} is {only}")
    if isinstance(value, Mapping):  # A section: one of its keys says more.
        key = ".".join([key, *list(value)[:1]])
    return UserError(
        f"unknown config key {key}; the nearest known key is {_nearest(key, known())}"
    )


def _nearest(key: str, known: Iterable[str]) -> str:
    """Returns the known key that is most like another, by words and then by letters."""
    known = list(known)
    if meant := [each for each in _synonyms(key.rpartition(".")[2]) if each in known]:
        return " or ".join(meant)
    words = set(re.findall(r"[a-z0-9]+", key.lower()))

    def likeness(other):
        shared = words & set(re.findall(r"[a-z0-9]+", other))
        letters = difflib.SequenceMatcher(None, key, other).ratio()
        return letters + len(shared) / max(1, len(words))

    return max(known, key=likeness)


def _synonyms(word: str) -> list[str]:
    return SYNONYMS.get(re.sub(r"[^a-z0-9]", "", word.lower()), [])


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
    meant = [*_synonyms(word), word][0]
    found = [key for key in keys if key == meant or key.endswith(f".{meant}")]
    return min(found, key=lambda key: key.count("."), default="")


def _known_keys(cls: type, raw: Mapping, where: str) -> Iterator[str]:
    """Yields the dotted keys that are read, given what is stated."""
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


def arguments(path: str) -> dict[str, object]:
    """Returns the `ARGUMENTS` of a config file: name to default, or to allowed values.

    Raises:
      UserError: there is no such file, or it does not run.
    """
    return _run_config_file(find(path), lambda file: dict(file.ARGUMENTS))


def read_study(path: str, arg: str | None = None) -> dict:
    """Returns what `get_study` of a config file states for the text behind its colon.

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

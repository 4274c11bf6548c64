"""Every key of a config, its default and its meaning; loading and checking configs.

A config file under `configs/` states only what its recipe is about. `load` adds the
rest from `COMMON` and `CHOICES` below, so that this file is the one reference of
what can be set, and any key that nothing would read is an error.
"""

import ast
import difflib
import importlib.util
import numbers
import pathlib
import sys
from collections.abc import Mapping

from ml_collections import ConfigDict

from vit_jax.errors import UserError

# What the sections may hold. A value gives the default and, by its type, the type.
COMMON = {
    "": {
        "name": "",  # Recipe name; the config file's stem unless stated.
        "seed": 0,  # Of initialisation, data order, augmentation and dropout.
        "total_steps": 0,  # Length of the run: this ...
        "epochs": 0.0,  # ... or this many passes over the training split.
        "batch_size": 0,  # Images a step, over all devices and microbatches.
        "init": "",  # Workdir or .npz file to start from; "" is from scratch.
        "init_average": True,  # Take a workdir's averaged parameters if it has them.
        "init_head": "replace",  # "replace": new zero head, or "keep".
        "debug_nans": False,  # Stop at the operation that makes the first NaN (slow).
    },
    "data": {
        "name": "",  # "digits", "folder", "made", or a TFDS name such as "cifar10".
        "data_dir": "",  # Where it lies; "" is TFDS's own, ~/tensorflow_datasets.
        "split": "train",  # Training split; TFDS's slicing syntax, all sources.
        "classes": 0,  # Number of classes; labels outside [0, classes) are an error.
        "examples": 0,  # Size of `split` where the data is not at hand; checked.
        "image_size": (224, 224),  # Height and width that reach the model, in pixels.
        "channels": 3,  # 1 or 3.
        "image_key": "image",  # TFDS feature names.
        "label_key": "label",
        "ops": "",  # Training transforms; see vit_jax/data/ops.py.
        "eval_ops": "",  # Evaluation transforms.
        "mean": (0.5,),  # Subtracted, one or a channel, as a fraction of 255 ...
        "std": (0.5,),  # ... then divided by.
        "workers": 0,  # Loader processes; 0 loads in threads of this process.
        "threads": 4,  # Loader threads a process.
        "prefetch": 8,  # Batches read ahead, a process.
        "on_error": "raise",  # A damaged image: "raise", or "skip" (counted).
    },
    "model": {
        "variant": "B/16",  # Size letter and patch; models/variants.py.
        "width": 0,  # These four replace the variant's own numbers when not 0.
        "depth": 0,
        "heads": 0,
        "mlp_dim": 0,
        "head": "token",  # Classifier input: "token" or "gap" (mean pooling).
        "representation": False,  # One tanh layer of the model's width before the head.
        "dropout": 0.0,
        "stochastic_depth": 0.0,  # Drop rate of the last block; 0 at the first, linear.
        "head_bias": 0.0,  # Initial bias of the classifier; -10 suits sigmoid.
        "gelu": "tanh",  # "tanh" (Google's) or "erf" (timm, Hugging Face).
        "epsilon": 1e-6,  # Of the LayerNorms.
        "dtype": "float32",  # Of the computation; parameters stay float32.
    },
    "loss": {
        "name": "softmax",  # "softmax" or "sigmoid" cross-entropy.
        "label_smoothing": 0.0,
    },
    "optim": {
        "name": "adam",  # "adam" or "sgd".
        "rate": 0.0,  # Peak learning rate: this ...
        "rate_per_256": 0.0,  # ... or this, times batch_size / 256.
        "decay": "cosine",  # "linear", "cosine", "rsqrt" or "constant".
        "warmup_steps": 0,  # Linear warmup, as one of these three.
        "warmup_epochs": 0.0,
        "warmup_fraction": 0.0,  # Of total_steps.
        "weight_decay": 0.0,  # Decoupled from the loss, times the scheduled rate.
        "decay_mask": (r"/kernel$",),  # Regular expressions: what weight decay touches.
        "clip_norm": 0.0,  # Largest global gradient norm; 0 is off.
        "accumulate": 1,  # Microbatches a step.
        "freeze": (),  # Regular expressions: parameters that do not move ...
        "freeze_steps": 0,  # ... for this many steps; 0 is the whole run.
    },
    "average": {
        "decay": 0.9999,  # Polyak averaging of the parameters; 0 is off.
    },
    "every": {  # Steps.
        "log": 50,
        "evaluate": 0,  # 0: only at the end.
        "checkpoint": 1_000,
    },
    "keep": {
        "last": 2,  # This many newest checkpoints stay ...
        "every": 0,  # ... and those at multiples of this step; 0 is none.
    },
    "mesh": {"data": -1},  # Devices an axis; -1 is all that are left.
    "evals": {},  # Name of an evaluation: split of the data set.
}

# Keys that exist only under one choice, so that a key nobody reads is found.
_END = {"end_rate": 0.0}  # Rate at the last step.
CHOICES = {
    ("optim", "name"): {
        "adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
        "sgd": {"momentum": 0.9, "nesterov": False},
    },
    ("optim", "decay"): {
        "linear": _END,
        "cosine": _END,
        # peak / sqrt(1 + steps after warmup / timescale), at the end linearly to 0.
        "rsqrt": {"timescale": 10_000, "cooldown_steps": 0},
        "constant": {},
    },
    ("", "init_head"): {"replace": {}, "keep": {}},
    ("model", "head"): {"token": {}, "gap": {}},
    ("model", "gelu"): {"tanh": {}, "erf": {}},
    ("model", "dtype"): {"float32": {}, "bfloat16": {}},
    ("loss", "name"): {"softmax": {}, "sigmoid": {}},
    ("data", "on_error"): {"raise": {}, "skip": {}},
}

# Sections whose keys the user names.
_FREE = ("evals",)


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
    path, _, arg = spec.partition(":")
    raw = _run_config_file(pathlib.Path(path), arg or None).to_dict()
    raw.setdefault("name", pathlib.Path(path).stem)
    for key, value in (overrides or {}).items():
        *sections, leaf = key.split(".")
        if len(sections) > 1 or not set(sections) <= COMMON.keys():
            raise UserError(_unknown_key(key, _known_keys({})))
        section = raw.setdefault(sections[0], {}) if sections else raw
        section[leaf] = value
    return complete(raw)


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
        for key in given:
            if section in _FREE:
                defaults = {**defaults, key: ""}
            if key not in defaults:
                raise UserError(_unknown_key(f"{section}.{key}".strip("."), known))
        done[section] = {
            key: _fit(f"{section}.{key}".strip("."), given.get(key, default), default)
            for key, default in defaults.items()
        }
    config = ConfigDict({**done.pop(""), **done}, convert_dict=True)
    _check_values(config)
    return config.lock()


def steps(node: ConfigDict, name: str, total_steps: int, steps_per_epoch: float) -> int:
    """Returns a length in steps that `node` states as steps, epochs or a fraction.

    Args:
      node: config section with `{name}_steps` and maybe `_epochs`, `_fraction`.
      name: which length, for instance "warmup".
      total_steps: length of the run.
      steps_per_epoch: training examples by batch size.

    Raises:
      UserError: more than one of them is set.
    """
    units = {"steps": 1, "epochs": steps_per_epoch, "fraction": total_steps}
    given = {u: node.get(f"{name}_{u}", 0) for u in units if node.get(f"{name}_{u}", 0)}
    if len(given) > 1:
        names = " and ".join(f"{name}_{u}={v}" for u, v in given.items())
        raise UserError(f"config states {names}: keep one of them")
    return sum(round(value * units[unit]) for unit, value in given.items())


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
    return config.total_steps or max(
        1, round(config.epochs * examples / config.batch_size)
    )


def differences(a: Mapping | ConfigDict, b: Mapping | ConfigDict) -> list[str]:
    """Lists the keys in which two nested configs differ, as "key: 1 -> 2"."""
    a, b = _flatten(a), _flatten(b)
    return [
        f"{key}: {a.get(key, 'absent')} -> {b.get(key, 'absent')}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key, "absent") != b.get(key, "absent")
    ]


def to_json(config: ConfigDict) -> dict:
    """Returns the config as plain dicts, lists and numbers, equal after a JSON trip."""
    return {
        key: to_json(value)
        if isinstance(value, ConfigDict)
        else list(value)
        if isinstance(value, tuple)
        else value
        for key, value in config.items()
    }


def _run_config_file(path: pathlib.Path, arg: str | None) -> ConfigDict:
    if not path.is_file():
        here = sorted(p.name for p in path.parent.glob("[!_]*.py"))
        raise UserError(
            f"config file {path} not found; {path.parent}/ has "
            f"{', '.join(name for name in here if name != 'common.py') or 'none'}"
        )
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    # Configs share `configs/common.py`, wherever the command was started.
    root = str(path.resolve().parent.parent)
    sys.path.insert(0, root)
    try:
        spec.loader.exec_module(module)
        return module.get_config(arg)
    finally:
        sys.path.remove(root)


def _known_keys(raw: Mapping) -> dict[str, dict]:
    """Returns section -> key -> default under the choices that `raw` makes."""
    known = {section: dict(keys) for section, keys in COMMON.items()}
    for (section, key), options in CHOICES.items():
        value = _given(raw, section).get(key, COMMON[section][key])
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


def _fit(name: str, value: object, default: object) -> object:
    if isinstance(default, tuple) and isinstance(value, (list, tuple)):
        return tuple(value)
    if isinstance(default, tuple) and isinstance(value, str):
        return (value,)
    if type(default) is float and _is_number(value, numbers.Real):
        return float(value)
    if type(default) is int and _is_number(value, numbers.Integral):
        return int(value)
    if type(value) is not type(default):
        raise UserError(
            f"{name}={value!r} is {type(value).__name__}, "
            f"but it takes {type(default).__name__} (as {default!r})"
        )
    return value


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


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
    nearest = difflib.get_close_matches(name, [n for n in names if n], 1, cutoff=0)
    return f"unknown config key {name}; the nearest known key is {nearest[0]}"


def _check_values(config: ConfigDict) -> None:
    positive = {
        "batch_size": config.batch_size,
        "data.classes": config.data.classes,
        "optim.accumulate": config.optim.accumulate,
        "every.log": config.every.log,
        "every.checkpoint": config.every.checkpoint,
        "keep.last": config.keep.last,
    }
    for name, value in positive.items():
        if value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    if bool(config.optim.rate) == bool(config.optim.rate_per_256):
        raise UserError(
            f"config states optim.rate={config.optim.rate} and optim.rate_per_256="
            f"{config.optim.rate_per_256}: set exactly one of them"
        )
    if len(config.data.image_size) != 2:
        raise UserError(
            f"data.image_size={config.data.image_size} is not (height, width)"
        )


def _flatten(tree: Mapping | ConfigDict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, (Mapping, ConfigDict)):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:  # A tuple comes back from JSON as a list.
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat

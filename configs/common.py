"""Functions that recipes share, for arguments and `quick` versions."""

import os
import pathlib
from types import SimpleNamespace

from ml_collections import ConfigDict

from vit_jax.errors import UserError

FOLDER = "FOLDER"  # Value of an argument that stands for any existing folder.


def parse_arg(arg: str | None, **arguments: object) -> SimpleNamespace:
    """Parses the argument of a recipe, ARG in --config=file.py:ARG.

    Args:
      arg: argument, such as "model=B/16,dataset=cifar100,quick"; "" or None for all
        defaults. Commas within brackets belong to a value, as in
        "train=even_splits(train, 3)[0]".
      **arguments: name to default. A tuple lists the allowed values, the default first,
        and FOLDER in it allows any existing folder, as a pathlib.Path; a bool is a
        flag, set by its bare name; any other default has the type of the value.

    Returns:
      An object with one attribute for each argument.

    Raises:
      UserError: a name or value is unknown; the message lists the known ones.
    """
    values = {
        name: default[0] if isinstance(default, tuple) else default
        for name, default in arguments.items()
    }
    for word in filter(None, _words(arg or "")):
        name, equals, text = word.partition("=")
        if name not in arguments:
            known = ", ".join(arguments) or "none"
            hint = ""
            if "data" in arguments and not equals:
                hint = (
                    ". A comma ends a value: give a folder with a comma in its name by "
                    "--config.data.name=folder --config.data.data_dir=FOLDER"
                )
            raise UserError(
                f"config argument {name!r} is unknown; it takes {known}{hint}"
            )
        is_flag = isinstance(arguments[name], bool)
        values[name] = _value(
            name, text if equals or not is_flag else "True", arguments
        )
    return SimpleNamespace(**values)


def _words(arg: str) -> list[str]:
    """Splits an argument at the commas outside of brackets."""
    words, depth = [""], 0
    for letter in arg:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth <= 0:
            words.append("")
        else:
            words[-1] += letter
    return words


def _value(name: str, text: str, arguments: dict) -> object:
    default = arguments[name]
    if isinstance(default, bool):
        default = (default, not default)
    if isinstance(default, tuple):
        by_text = {str(value).lower(): value for value in default if value != FOLDER}
        if text.lower() in by_text:
            return by_text[text.lower()]
        folder = os.path.expanduser(text)
        if FOLDER in default and (text == FOLDER or os.path.isdir(folder)):
            return pathlib.Path(folder)
        known = ", ".join(filter(None, map(str, default)))
        hint = " (a folder that exists)" if FOLDER in default else ""
        raise UserError(f"config argument {name}={text!r} is not one of {known}{hint}")
    try:
        return type(default)(text)
    except ValueError:
        kind = type(default).__name__
        raise UserError(
            f"config argument {name}={text!r} is not of type {kind}"
        ) from None


# Sizes of a ViT or hybrid that any machine can train.
TINY = dict(width=16, depth=2, num_heads=2, mlp_dim=32)


def quick(config: ConfigDict, **tiny: object) -> ConfigDict:
    """Changes a recipe to 3 steps of a tiny model on synthetic data, for any machine.

    Args:
      config: config of the recipe, changed in place. Patch size, head, losses,
        optimiser and transforms stay.
      **tiny: keys of a tiny network; not needed for a ViT, hybrid or BiT ResNet.
    """
    c, variant = config, config.model.variant
    patch = int(variant.partition("/")[2] or 32)  # Pixels of a token's side.
    tiny = tiny or (TINY if "/" in variant else {})
    if variant.startswith("R"):
        depths = (1,) * (3 if patch == 16 else 4)
        tiny = tiny | dict(stage_depths=depths, stem_width=32)
    c.model.update(tiny)
    c.mesh = dict(data=-1)
    _drop(c, "log_every_epochs", "eval_every_epochs", "checkpoint_every_epochs")
    if isinstance(c.get("init"), ConfigDict):
        # The other keys still apply if a user sets a checkpoint.
        c.init.checkpoint = ""
    else:
        _drop(c, "init")
    c.update(epochs=0, total_steps=3, batch_size=8, log_every_steps=1)
    c.update(eval_every_steps=0, checkpoint_every_steps=1_000)
    c.data.update(name="synthetic", split="train", num_examples=20, num_workers=0)
    c.data.image_size = (2 * patch, 2 * patch)
    if c.data.get("tokenizer"):
        _made_captions(c)
    c.evals = {name: _on_made_data(e) for name, e in c.get("evals", {}).items()}
    _shorten(c.optim)
    return c


def _made_captions(c: ConfigDict) -> None:
    """Replaces captions by the class names of the synthetic data."""
    c.data.update(tokenizer="bytes", caption_key="", num_classes=10)
    c.task.text.update(TINY, vocab_size=0)
    _drop(c.task.text, "eos_id")
    c.evals = dict(val=dict(kind="zero_shot"))


def _on_made_data(evaluation: str | ConfigDict) -> str | dict:
    """Returns an evaluation of the same kind on a split of the synthetic data."""
    if isinstance(evaluation, str):
        return "val"
    return dict(kind=evaluation.get("kind", "classification"))


def _shorten(optim: ConfigDict) -> None:
    """Shortens a schedule to 3 steps."""
    units = ("warmup_steps", "warmup_epochs", "warmup_fraction")
    warmup = any(optim.get(unit) for unit in units)
    _drop(optim, *units)
    optim.warmup_steps = int(warmup)
    schedule = optim.get("schedule", {})
    if "boundaries" in schedule or "boundary_epochs" in schedule:
        _drop(schedule, "boundary_epochs")
        schedule.boundaries = (2,)
    for section, key, most in (
        (optim, "freeze_steps", 1),
        (optim, "grad_accum_steps", 2),
        (schedule, "cooldown_steps", 1),
    ):
        if key in section:
            section[key] = min(most, section[key])


def _drop(section: ConfigDict, *keys: str) -> None:
    for key in keys:
        if key in section:
            del section[key]


def cifar10(config: ConfigDict, **model: object) -> None:
    """Replaces a recipe's data set by CIFAR-10, and its network by a small one.

    Args:
      config: config of the recipe, changed in place.
      **model: keys of a network that a CPU can train; by default those of a ViT.
    """
    c = config
    c.batch_size = 256
    c.data.update(name="cifar10", num_examples=50_000, image_size=(32, 32))
    c.data.eval_transform = ""
    if c.data.num_classes:
        c.data.num_classes = 10
    for name, each in c.evals.items():
        if isinstance(each, str):
            c.evals[name] = "test"
        else:
            each.update({k: "test" for k in ("split", "test") if k in each})
    vit = dict(variant="Ti/4", width=192, depth=6, num_heads=6, mlp_dim=384)
    c.model.update(model or vit | dict(dtype="float32", scan=False))


def use_captions(data: str, config: ConfigDict) -> None:
    """Replaces COCO's captions by a folder of pairs, or by another TFDS data set."""
    if data == "coco_captions":
        return
    config.data.update(name=data, num_examples=0)
    if os.path.isdir(os.path.expanduser(data)):
        config.data.update(name="folder", data_dir=data, caption_key="txt")


def use_folder(data: str | pathlib.Path, config: ConfigDict) -> None:
    """Replaces a recipe's data set by a folder of photographs, if `data` is a path.

    Without labels, images at any depth are read: 5 % of them, in the order of hashes of
    their paths, are held out for evaluations of the task. The other evaluations, which
    need labels, are removed. With labels, folders are classes, see
    vit_jax/data/sources/folder.py.
    """
    if not isinstance(data, pathlib.Path):
        return
    config.data.update(name="folder", data_dir=str(data), num_examples=0)
    evals = config.get("evals", {}).items()
    if config.data.num_classes:
        config.evals = {name: "" for name, each in evals if isinstance(each, str)}
        return
    config.data.split, held_out = "all[5%:]", "all[:5%]"
    config.evals = {
        name: dict(each.to_dict(), split=held_out)
        for name, each in evals
        if each.get("kind") == "task"
    }


def big_vision_crop(short_side: int) -> str:
    """Returns big_vision's `eval_transform`: resize of the short side, central crop."""
    how = f"{short_side}, interpolation='area'"
    return f"resize_small({how}) | central_crop(down=True)"


def bicubic_crop(short_side: int) -> str:
    """Returns an `eval_transform`: bicubic resize of the short side, central crop."""
    return f"resize_small({short_side}, interpolation='bicubic') | central_crop"


JITTER = "flip | color_jitter(0.4, 0.4, 0.2, 0.1, p=0.8) | grayscale(0.2)"
# DINO's transforms of crops.
DINO_TRANSFORMS = dict(
    large_transforms=(
        f"{JITTER} | gaussian_blur(1.0)",
        f"{JITTER} | gaussian_blur(0.1) | solarize(0.2)",
    ),
    small_transform=f"{JITTER} | gaussian_blur(0.5)",
)
# DINOv2 and DINOv3 use one minus DINO's probabilities of blur; their weights were
# trained so.
DINOV2_TASK = dict(
    dino_weight=1.0,
    patch_weight=1.0,
    koleo_weight=0.1,
    teacher_temperature=0.07,
    teacher_temperature_start=0.04,
    large_transforms=(JITTER, f"{JITTER} | gaussian_blur(0.9) | solarize(0.2)"),
    small_transform=f"{JITTER} | gaussian_blur(0.5)",
)
# DINOv2's transforms without flips, so that the anchor's crops have the same patches.
GRAM_TRANSFORMS = dict(
    large_transforms=tuple(
        line.removeprefix("flip | ") for line in DINOV2_TASK["large_transforms"]
    ),
    small_transform=DINOV2_TASK["small_transform"].removeprefix("flip | "),
)


def small_image_crops(side: int) -> str:
    """Returns DINO's crops for images with sides of a few dozen pixels."""
    return (
        f"multi_crop(small_size={side // 2}, num_small=4, area=(0.5, 1.0), "
        "small_area=(0.2, 0.5))"
    )


_DINOV2_AREAS = "area=(0.32, 1.0), small_area=(0.05, 0.32)"


def dinov2_crops(side: int, patch: int, small: int = 96) -> str:
    """Returns DINOv2's crops; sides of small crops are rounded up to whole patches."""
    small = -(-small // patch) * patch
    return f"multi_crop({side}, small_size={small}, num_small=8, {_DINOV2_AREAS})"


def crops_of_sizes(sizes: tuple, shares: tuple, num_small: int = 8) -> str:
    """Returns DINOv2's crops with several pairs of sizes; each step draws one pair."""
    return (
        f"multi_crop(sizes={sizes}, shares={shares}, num_small={num_small}, "
        f"{_DINOV2_AREAS})"
    )


def dinov2_optim(
    config: ConfigDict, rate: float, layer_decay: float, **more: object
) -> dict:
    """Returns DINOv2's optimiser.

    Args:
      config: config of the recipe, with batch size and variant.
      rate: peak learning rate for a batch of 1,024 images; it is multiplied by the
        square root of the batch size / 1,024.
      layer_decay: value for `optim.layer_decay`.
      **more: further keys of the optimiser, such as schedules.
    """
    depth = dict(S=12, B=12, L=24, g=40)[config.model.variant[0]]
    token = layer_decay ** (depth + 1) if layer_decay else 1.0
    return dict(
        name="adamw",
        learning_rate=rate * (config.batch_size / 1_024) ** 0.5,
        warmup_ends_at_peak=True,
        weight_decay=0.04,
        # All parameters except biases, norms and LayerScale.
        weight_decay_mask=(
            r"/kernel$",
            r"(cls|pos_embedding|register_tokens|mask_token|last_layer|gain)$",
        ),
        layer_decay=layer_decay,
        learning_rate_factors=(
            "network/embedding/ -> 0.2",
            f"mask_token$ -> {token:.6g}",
        ),
        grad_clip_norm_per_part=3.0,
        freeze=(r"head/(last_layer|gain)$",),
        **more,
    )


def shrink_dino(config: ConfigDict, scale: int = 1) -> None:
    """Shrinks heads and crops of a quick recipe; `scale` is that of large crops."""
    side = config.data.image_size[0]
    config.task.update(num_outputs=64, hidden_dim=32, bottleneck_dim=16)
    config.data.train_transform = (
        f"multi_crop({scale * side}, small_size={side // 2}, num_small=2)"
    )

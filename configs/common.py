"""What recipes share: their argument, and the `quick` version of any of them."""

from types import SimpleNamespace

from ml_collections import ConfigDict

from vit_jax.errors import UserError


def parse_arg(arg: str | None, **arguments: object) -> SimpleNamespace:
    """Reads the part of --config=file.py:PART behind the colon.

    Args:
      arg: "model=B/16,dataset=cifar100,quick", or "" or None for all defaults. Commas
        within brackets belong to a value, as in "train=even_splits(train, 3)[0]".
      **arguments: name to default. A tuple lists the allowed values, first the default;
        a bool is a flag, set by its bare name; otherwise the default gives the type.

    Returns:
      An object with one attribute for each argument.

    Raises:
      UserError: an unknown name or value; the line names the known ones.
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
                    ". A comma ends a value: a folder that has one in its name is "
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
    """Cuts at the commas that stand outside of brackets."""
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
        by_text = {str(value).lower(): value for value in default}
        if text.lower() in by_text:
            return by_text[text.lower()]
        known = ", ".join(map(str, default))
        raise UserError(f"config argument {name}={text!r} is not one of {known}")
    try:
        return type(default)(text)
    except ValueError:
        kind = type(default).__name__
        raise UserError(
            f"config argument {name}={text!r} is not of type {kind}"
        ) from None


def quick(config: ConfigDict) -> ConfigDict:
    """Turns a recipe into 3 steps of a tiny model on made data, for any machine.

    What the recipe is about stays: patch, head, losses, optimiser, transforms. A data
    folder that was stated stays as well, so that it is told that nothing reads it.
    """
    c = config
    c.epochs, c.total_steps, c.batch_size = 0, 3, 8
    if "init" in c:
        del c.init
    variant, token = c.model.variant, 32  # Pixels a token.
    if "/" in variant:  # All but the ResNets have an encoder.
        token = int(variant.split("/")[1])
        c.model.update(width=16, depth=2, num_heads=2, mlp_dim=32)
    if variant.startswith("R"):
        c.model.update(
            stage_depths=(1, 1, 1) if token == 16 else (1, 1, 1, 1), stem_width=32
        )
    c.data.update(name="synthetic", split="train", num_examples=20, num_workers=0)
    c.data.image_size = (2 * token, 2 * token)
    c.evals = {name: "val" for name in c.get("evals", {})}
    # One evaluation and one checkpoint, at the end.
    c.log_every_steps, c.eval_every_steps, c.checkpoint_every_steps = 1, 0, 1_000
    for name in ("log_every_epochs", "eval_every_epochs", "checkpoint_every_epochs"):
        if name in c:
            del c[name]

    optim = c.optim.to_dict()
    warmups = [optim.pop(f"warmup_{u}", 0) for u in ("steps", "epochs", "fraction")]
    optim["warmup_steps"] = int(any(warmups))
    schedule = optim.get("schedule", {})
    if "boundaries" in schedule:
        schedule["boundaries"] = (2,)
    if "cooldown_steps" in schedule:
        schedule["cooldown_steps"] = min(1, schedule["cooldown_steps"])
    most = {"freeze_steps": 1, "grad_accum_steps": 2}
    c.optim = optim | {k: min(n, optim[k]) for k, n in most.items() if k in optim}
    return c

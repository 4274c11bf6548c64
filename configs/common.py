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
        known = ", ".join(filter(None, map(str, default)))
        raise UserError(f"config argument {name}={text!r} is not one of {known}")
    try:
        return type(default)(text)
    except ValueError:
        kind = type(default).__name__
        raise UserError(
            f"config argument {name}={text!r} is not of type {kind}"
        ) from None


def quick(config: ConfigDict, **model: object) -> ConfigDict:
    """Turns a recipe into 3 steps of a tiny model on made data, for any machine.

    What the recipe is about stays: patch, head, losses, optimiser, transforms. A data
    folder that was stated stays as well, so that it is told that nothing reads it.

    Args:
      config: of the recipe.
      **model: keys of a tiny network; of a ViT, hybrid or BiT ResNet they are known.
    """
    c = config
    c.epochs, c.total_steps, c.batch_size = 0, 3, 8
    if "init" in c:
        del c.init
    variant = c.model.variant
    token = int(variant.split("/")[1]) if "/" in variant else 32  # Pixels a token.
    if "/" in variant and not model:  # All but the ResNets have an encoder.
        model = dict(width=16, depth=2, num_heads=2, mlp_dim=32)
    c.model.update(model)
    if variant.startswith("R"):
        c.model.update(
            stage_depths=(1, 1, 1) if token == 16 else (1, 1, 1, 1), stem_width=32
        )
    c.data.update(name="synthetic", split="train", num_examples=20, num_workers=0)
    c.data.image_size = (2 * token, 2 * token)
    if c.data.get("tokenizer"):  # The made data has names of classes for captions.
        c.data.update(tokenizer="bytes", caption_key="", num_classes=10)
        c.task.text.update(width=16, depth=2, num_heads=2, mlp_dim=32, vocab_size=0)
        if "eos_id" in c.task.text:
            del c.task.text.eos_id
        c.evals = dict(val=dict(kind="zero_shot"))
    # Of the same kind, on the splits that the made data has.
    c.evals = {
        name: "val"
        if isinstance(e, str)
        else dict(kind=e.get("kind", "classification"))
        for name, e in c.get("evals", {}).items()
    }
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


def images_of(data: str, config: ConfigDict, *, labelled: bool = False) -> None:
    """Sets the images of a recipe that learns without labels, or of what follows it.

    Args:
      data: "imagenet"; "cifar10", which comes with a network and a batch that a CPU can
        train; or another set, of which only the name is known.
      config: of the recipe; its model and batch size are set already.
      labelled: whether it learns classes.
    """
    c = config
    c.data = dict(name=data, split="train", num_classes=0)
    c.data.eval_transform = "resize_small(256) | central_crop"
    c.data.mean = (0.485, 0.456, 0.406)
    c.data.std = (0.229, 0.224, 0.225)
    test, num_classes = "validation", 1_000
    if data == "imagenet":  # The number of images is from the TFDS catalogue.
        c.data.update(name="imagenet2012", num_examples=1_281_167)
    elif data == "cifar10":
        test, num_classes = "test", 10
        c.data.update(num_examples=50_000, image_size=(32, 32), eval_transform="")
        c.model.update(variant="Ti/4", width=192, depth=6, num_heads=6, mlp_dim=384)
        c.model.update(dtype="float32", scan=False)
        c.batch_size = 256
    if labelled:
        c.data.num_classes, c.evals = num_classes, dict(val=test)
    else:
        c.evals = dict(knn=dict(kind="knn", test=test, every_epochs=20))
        c.evals.val = dict(kind="task", split=test)

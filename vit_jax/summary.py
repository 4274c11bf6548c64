"""Shows what models cost: python -m vit_jax.summary --variant=B/16,R50+B/16

One line per model. GMACs: multiply-accumulates (10^9) of the forward pass of one image.
MiB: activations that one image keeps for the backward pass (float32, or the config's
dtype). exaFLOPs: operations (10^18) of training on the number of images in the first
line: 7 epochs of JFT-300M, as in table 6 of arXiv:2010.11929, unless --images_seen or
--config says otherwise. Everything is counted from traces, without computing anything.
Exit codes: 0 done, 2 bad input (one line says what).
"""

import argparse
import json
import math
import os
import re

from vit_jax.command_line import cli
from vit_jax.errors import UserError

IMAGES = 7 * 303_000_000
RESOLUTION = (224, 224)
CLASSES = 1_000
HEADING = ("variant", "pixels", "parameters", "GMACs", "tokens", "MiB", "exaFLOPs")


def main(flags: argparse.Namespace) -> int:
    """Prints the costs of the models given by the flags; returns the exit code."""
    _check(flags)
    if flags.config:
        from vit_jax.training import config as configuration

        config = configuration.load(flags.config, flags.overrides)
        models = [(config.build_model(), True)]
        images = flags.images_seen or _images(config)
    else:
        num_classes = CLASSES if flags.num_classes is None else flags.num_classes
        models = find(flags.variant, flags.resolution, num_classes)
        images = IMAGES if flags.images_seen is None else flags.images_seen
    _show(models, images, flags.json)
    return 0


def _check(flags):
    """Raises UserError for bad flags and bad combinations of them."""
    keys = {
        "variant": "model.variant",
        "resolution": "data.image_size",
        "num_classes": "data.num_classes",
    }
    for name, key in keys.items():
        if flags.config and getattr(flags, name) is not None:
            raise UserError(
                f"--{name} and --config exclude each other: use --config.{key}"
            )
    for key, value in flags.overrides.items():
        if not flags.config:
            raise UserError(f"--config.{key}={value} needs --config=FILE")
    if flags.images_seen is not None and flags.images_seen < 1:
        raise UserError(f"--images_seen={flags.images_seen} must be at least 1")
    if flags.num_classes is not None and flags.num_classes < 0:
        raise UserError(
            f"--num_classes={flags.num_classes} must be at least 0 (0: no classifier)"
        )


def _images(config):
    """Returns the number of images that a run of the config trains on."""
    examples = config.data.num_examples
    if config.epochs and not examples:
        from vit_jax.data.sources.open import open_source

        try:
            examples = len(open_source(config.data, config.data.split))
        except UserError as error:
            raise UserError(f"{error}; or give --images_seen") from error
    return config.num_steps(examples) * config.batch_size


def find(
    variant: str | None, resolution: str | None, num_classes: int
) -> list[tuple[object, bool]]:
    """Builds models by name.

    Args:
      variant: names, separated by commas; None for all variants.
      resolution: image size, such as "224" or "224x160"; None for 224.
      num_classes: number of classes; 0 for no classifier.

    Returns:
      Each model, and whether it has the requested resolution rather than the nearest
      one that fits its patch size.

    Raises:
      UserError: a variant is unknown, or a given resolution does not fit a given
        variant.
    """
    from vit_jax import models

    names = models.names() if variant is None else variant.split(",")
    sides = _sides(resolution)
    built = []
    for name in names:
        patch = models.side_multiple(name)
        fitting = tuple(max(1, round(side / patch)) * patch for side in sides)
        if fitting != sides and variant is not None and resolution is not None:
            near = "x".join(map(str, fitting))
            raise UserError(
                f"--resolution={resolution} is not a multiple of the patch {patch} of "
                f"{name}: use one, such as --resolution={near}"
            )
        model = models.create(name, num_classes=num_classes, image_size=fitting)
        built.append((model, fitting == sides))
    return built


def _sides(resolution):
    """Reads "224" or "224x160"."""
    if resolution is None:
        return RESOLUTION
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", resolution)
    if not match:
        raise UserError(
            f"--resolution={resolution} is not a side or height x width in pixels: "
            "give it as 224 or 224x160"
        )
    from vit_jax.data.config import MAX_PIXELS

    sides = int(match[1][:9]), int((match[2] or match[1])[:9])
    if math.prod(sides) > MAX_PIXELS:
        raise UserError(
            f"--resolution={resolution}: more than {MAX_PIXELS:,} pixels; choose a "
            "smaller size"
        )
    return sides


def _show(models, images, as_json):
    """Prints each line as soon as its model is traced."""
    if not as_json:
        print(f"exaFLOPs: training on {images:,} images\n{_line(HEADING)}", flush=True)
    marked = False
    for model, as_asked in models:
        row = _measure(model, images)
        marked |= not as_asked
        print(json.dumps(row) if as_json else _line(_cells(row, as_asked)), flush=True)
    if marked and not as_json:
        print("* the nearest resolution that fits the patch")


def _measure(model, images):
    from vit_jax.models import cost

    return {
        "variant": model.options["variant"],
        "resolution": model.options["image_size"],
        "num_classes": model.options["num_classes"],
        "parameters": cost.parameters(model),
        "macs": cost.macs_per_image(model),
        "tokens": cost.tokens(model),
        "activation_bytes": cost.activation_bytes(model),
        "images": images,
        "exaflops": cost.training_exaflops(model, images),
    }


def _cells(row, as_asked):
    return (
        row["variant"],
        "x".join(map(str, row["resolution"])) + ("" if as_asked else "*"),
        f"{row['parameters']:,}",
        _number(row["macs"] / 1e9, 2),
        row["tokens"] or "-",
        _number(row["activation_bytes"] / 2**20, 1),
        _number(row["exaflops"], 1),
    )


def _number(x, decimals):
    return f"{x:,.{decimals}f}" if x >= 1 else f"{x:.3g}"


def _line(cells):
    first, *others = cells
    widths = 10, 13, 9, 6, 9, 8
    columns = (f"{cell:>{width}}" for cell, width in zip(others, widths, strict=True))
    return "  ".join((f"{first:<10}", *columns))


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, config="TrainConfig")
    add = parser.add_argument
    add("--variant", help="names of models: B/16,R50+B/16; default: all")
    add("--resolution", help="image size in pixels, or HEIGHTxWIDTH")
    add("--num_classes", type=int, help=f"number of classes; default: {CLASSES}")
    add("--images_seen", type=int, help="images of the whole training run")
    add("--json", action="store_true", help="print one JSON object per line")
    add("--config", help="recipe or file, :argument: its model and run")
    return parser


if __name__ == "__main__":
    # Tracing needs no accelerator: leave them to other processes.
    os.environ["JAX_PLATFORMS"] = "cpu"
    cli.run(main, parser())

"""Draws what a model has learned, and which parts of images it attends to.

    python -m vit_jax.visualize --model=CHECKPOINT --images FOLDER --out=DIR

CHECKPOINT is a run or weights, as for vit_jax.predict; --images takes files, folders
and "-". Each figure is written as PNG and SVG (with dark colours on dark screens), and
its numbers as npz; its name is printed as soon as it is written. Only the first --shown
images get figures for themselves. Needs matplotlib: pip install -e '.[plots]' in the
clone.
Exit codes: 0 done, 1 some images could not be read (a line each says why), 2 bad input.

--figure takes some of these names, separated by commas (default: all that are
possible):
"""

import argparse
import dataclasses
import pathlib
import textwrap

from etils import epath

from vit_jax.analysis import figures
from vit_jax.analysis.figures import FIGURES
from vit_jax.command_line import cli
from vit_jax.command_line.printing import address, print_error, print_line
from vit_jax.errors import UserError

EXIT_DAMAGED = 1


def main(flags: argparse.Namespace) -> int:
    """Draws the figures given by the flags; returns the exit code."""
    cli.refuse_overrides(flags, "looking into a model")
    named = figures.create(_names(flags), vars(flags))
    # Imported after the flags and the images are checked: their errors come at once.
    from vit_jax.data import image_files

    images = image_files.find_some(flags.images) if flags.images else []
    count = len(images) if isinstance(images, list) else None
    required = {**named, **figures.create(["cka"] if flags.compare else [], {})}
    for name, figure in required.items():
        if count is not None and (too_few := figure.too_few(name, count)):
            raise UserError(too_few)

    from vit_jax.analysis.figures.writing import available_figures
    from vit_jax.distributed import compilation

    if uncached := compilation.enable_cache():
        print_error(uncached)
    loaded = load_model(flags, flags.model)
    if not named:
        for name, figure in figures.create(FIGURES, {}).items():
            if figure.reads == "weights" and (missing := figure.missing(loaded)):
                print_error(f"figure skipped: {name}: {missing}")
        named = figures.create(available_figures(loaded, count), vars(flags))
    if flags.compare and "cka" not in named:
        missing = FIGURES["cka"]().missing(loaded)
        raise UserError(
            f"--compare={flags.compare}: not compared with {flags.model} in the figure cka: "
            f"{missing}; or leave --compare out"
        )
    other = load_model(flags, flags.compare) if flags.compare else None
    return draw(flags, loaded, images, named, other)


def draw(flags: argparse.Namespace, loaded, images, named, other) -> int:
    """Draws the figures and prints their files; returns the exit code."""
    from vit_jax.analysis.figures.writing import write_figures
    from vit_jax.command_line import progress

    damaged, out = [], epath.Path(flags.out)
    reads = {figure.reads for figure in named.values()}

    def total():
        if not isinstance(images, list):
            return None
        whole = len(images) - len(damaged)
        return whole if "all images" in reads else min(whole, flags.shown)

    def tell(name, why):
        damaged.append(name)
        bar.total = total()
        print_error(f"{name}: {why}")

    # None shows the progress bar on terminals only.
    hidden = True if reads == {"weights"} else None
    with progress.bar(total(), "images", "images", disable=hidden) as bar:
        for name in write_figures(
            loaded,
            images,
            named,
            out,
            other=other,
            max_shown=flags.shown,
            batch_size=flags.batch_size,
            on_unreadable=tell,
            on_too_few=None if flags.figure or flags.compare else print_error,
            on_progress=bar.update,
        ):
            if name.endswith(".png"):
                print_line(out / name)
    return EXIT_DAMAGED if damaged else 0


def load_model(flags: argparse.Namespace, checkpoint: str):
    """Opens a checkpoint; flags override the values stored with it."""
    from vit_jax.analysis.loaded_model import LoadedModel
    from vit_jax.tasks.pictures import pictures

    pretrained, preprocess, classes = cli.open_weights(
        flags, checkpoint, with_task=True
    )
    name = flags.name if checkpoint == flags.model else ""
    names = classes or pretrained.class_names  # Both must have one name per class.
    loaded = LoadedModel.from_pretrained(
        name or _name(checkpoint), pretrained, preprocess, names
    )
    return dataclasses.replace(
        loaded, pictures=pictures(pretrained, loaded.model, loaded.preprocess)
    )


def _name(checkpoint: str) -> str:
    """Returns a model's name in figures: its file or folder, or the address."""
    path = pathlib.Path(checkpoint)
    if not path.exists():
        return address(checkpoint)
    path = path.resolve()
    return path.name if path.is_dir() else path.name.removesuffix(path.suffix)


def _names(flags: argparse.Namespace) -> tuple[str, ...]:
    """Returns the figures given by --figure; an empty tuple stands for all."""
    names = tuple(filter(None, flags.figure.split(",")))
    for name in names:
        if name not in FIGURES:
            raise UserError(
                f"--figure={name} is not one of {', '.join(FIGURES)}: give some of "
                "these, separated by commas"
            )
        if FIGURES[name].reads != "weights" and not flags.images:
            raise UserError(f"--figure={name}: needs images; set --images")
    if flags.compare and not flags.images:
        raise UserError(
            f"--compare={flags.compare}: models are compared on images; set --images"
        )
    if flags.compare and names and "cka" not in names:
        raise UserError(
            f"--compare={flags.compare}: models are compared in the figure cka, which "
            f"--figure={flags.figure} leaves out; add it, or leave --compare out"
        )
    return names


def parser() -> cli.Parser:
    """Returns the flags, with the options of all figures."""
    lines = [
        textwrap.fill(
            FIGURES[name].help,
            88,
            initial_indent=f"    {name:<16}",
            subsequent_indent=20 * " ",
        )
        for name in FIGURES
    ]
    parser = cli.Parser("\n".join([__doc__, *lines]))
    add = parser.add_argument
    add("--images", nargs="+", default=(), help="files, folders, or - for a pipe")
    add("--figure", default="", help="names: filters,rollout; default: all")
    add("--out", required=True, help="folder for the figures")
    add("--name", default="", help="name of the model in titles; default: its file")
    add("--compare", default="", metavar="CHECKPOINT", help="second model, for cka")
    for name, option in figures.options().items():
        add(f"--{name}", default=option.default, **option.metadata)
    add(
        "--shown",
        type=cli.positive,
        default=16,
        help="number of images with figures for themselves; default: 16",
    )
    add("--labels", default="", help="file of class names, one per line")
    add(
        "--batch_size",
        type=cli.positive,
        default=0,
        help="batch size; default: as memory allows",
    )
    cli.add_patch_flags(parser)
    cli.add_max_megapixels_flag(parser)
    cli.add_weights_flags(parser)
    return parser


if __name__ == "__main__":
    cli.run(main, parser())

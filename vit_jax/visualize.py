"""Draws what a model has learned, and where it looks.

    python -m vit_jax.visualize --model=CHECKPOINT --images FOLDER --out=DIR

CHECKPOINT is whatever holds weights, as for vit_jax.predict; --images takes files, folders
and "-". --figure names some of these, between commas (default: all that there is
something for):

    filters     principal components of the first filters
    posemb      how alike the position embeddings of patches are
    distance    how far each head looks, by depth: over all images
    norms       how long tokens are, by depth: over all images
    cka         how alike layers are, or those of --other=CHECKPOINT: over all images, of
                which it takes 4 or more
    attention   where the query looks, by layer and head: an image a figure; of more
                than 12 layers some, or those of --layers
    rollout     the same over all layers, on the image
    windows     what patches get in their windows, by stage, over the image (Swin)
    relevance   which patches spoke for the most probable classes, or for --classes
    reconstruction
                what a network that was pretrained to predict hidden patches makes of
                the images: a sheet

Each is written as PNG, SVG (dark on dark screens) and its numbers as npz, and named as
soon as it is there. Only the first --shown images get figures of their own. Needs
matplotlib: pip install -e '.[plots]' in the clone.
Exit codes: 0 done, 1 some images could not be read (a line each says why), 2 bad input.
"""

import argparse
import dataclasses
import pathlib

from vit_jax import cli
from vit_jax.analysis import FIGURES, WEIGHT_FIGURES
from vit_jax.errors import UserError
from vit_jax.printing import address

EXIT_DAMAGED = 1


def main(flags: argparse.Namespace) -> int:
    """Draws what the flags name; returns the exit code."""
    cli.refuse_overrides(flags, "looking into a model")
    figures = _figures(flags)
    # After the flags, so that their errors come at once; JAX after the images.
    from vit_jax.data import inputs

    images = inputs.find_some(flags.images) if flags.images else []
    count = len(images) if isinstance(images, list) else None

    from vit_jax.analysis.figures import FigureOptions, available_figures
    from vit_jax.analysis.plots import ImageOptions
    from vit_jax.analysis.representations import check_num_cka_images
    from vit_jax.distributed import compilation

    if count is not None and ("cka" in figures or flags.other):
        check_num_cka_images(count)
    if uncached := compilation.enable_cache():
        cli.tell(uncached)
    loaded = load_model(flags, flags.model)
    options = FigureOptions(
        figures=figures or available_figures(loaded, count),
        image_options=ImageOptions(
            query=flags.query,
            head_fusion=flags.combine,
            discard_ratio=flags.discard,
            classes=flags.classes,
            topk=flags.topk,
            layers=flags.layers,
        ),
        max_shown=flags.shown,
        batch_size=flags.batch_size,
        layer=flags.layer,
        explicit=bool(figures or flags.other),
    )
    if flags.other and "cka" not in options.figures:
        raise UserError(
            f"--other={flags.other}: cka compares networks with attention, which "
            f"{flags.model} has not: leave --other out"
        )
    other = load_model(flags, flags.other) if flags.other else None
    return draw(flags, loaded, images, options, other)


def draw(flags: argparse.Namespace, loaded, images, options, other) -> int:
    """Draws and tells what was drawn; returns the exit code."""
    from vit_jax import progress
    from vit_jax.analysis.figures import write_figures

    damaged, out = [], pathlib.Path(flags.out)

    def total():
        if not isinstance(images, list):
            return None
        whole = len(images) - len(damaged)
        return whole if options.reads_all_images else min(whole, options.max_shown)

    def tell(name, why):
        damaged.append(name)
        bar.total = total()
        cli.tell(f"{name}: {why}")

    # None shows it on terminals only.
    hidden = None if {*options.figures} - {*WEIGHT_FIGURES} else True
    with progress.bar(total(), "images", "images", disable=hidden) as bar:
        for name in write_figures(
            loaded,
            images,
            options,
            out,
            other=other,
            on_unreadable=tell,
            on_skipped=cli.tell,
            on_progress=bar.update,
        ):
            if name.endswith(".png"):
                cli.say(out / name)
    return EXIT_DAMAGED if damaged else 0


def load_model(flags: argparse.Namespace, checkpoint: str):
    """Opens a checkpoint, with the flags in place of what travelled with it."""
    from vit_jax.analysis.loaded_model import LoadedModel
    from vit_jax.tasks.pretrained import pictures

    found, preprocess, classes = cli.open_weights(flags, checkpoint, with_task=True)
    given = flags.name if checkpoint == flags.model else ""
    names = classes or found.class_names  # Either has to be one a class.
    loaded = LoadedModel.from_pretrained(
        given or _name(checkpoint), found, preprocess, names
    )
    return dataclasses.replace(
        loaded, pictures=pictures(found, loaded.model, preprocess)
    )


def _name(checkpoint: str) -> str:
    """Returns what figures call a model: its file or folder, or the address."""
    path = pathlib.Path(checkpoint)
    if not path.exists():
        return address(checkpoint)
    path = path.resolve()
    return path.name if path.is_dir() else path.name.removesuffix(path.suffix)


def _figures(flags: argparse.Namespace) -> tuple[str, ...]:
    """Returns the figures that are asked for; none stands for all."""
    figures = tuple(filter(None, flags.figure.split(",")))
    for name in figures:
        if name not in FIGURES:
            raise UserError(
                f"--figure={name} is not one of {', '.join(FIGURES)}: name some of "
                "these between commas"
            )
        if name not in WEIGHT_FIGURES and not flags.images:
            raise UserError(f"--figure={name} is made from images: set --images")
    if flags.other and not flags.images:
        raise UserError(
            f"--other={flags.other} is compared by what images are to it: set --images"
        )
    if flags.other and figures and "cka" not in figures:
        raise UserError(
            f"--other={flags.other} is compared by the figure cka, which "
            f"--figure={flags.figure} leaves out: add it, or leave --other out"
        )
    return figures


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--images", nargs="+", default=(), help="files, folders, or - for a pipe")
    add("--figure", default="", help="as filters,rollout; default: all")
    add("--out", required=True, help="folder of the figures")
    add("--name", default="", help="what figures call the model; default: its file")
    add("--other", default="", help="a second model, for cka")
    add("--query", type=_place, help="ROW,COLUMN of a patch; default: class token")
    add(
        "--layers",
        type=_numbers,
        default=(),
        help="as 0,11: of attention; default: some",
    )
    add("--combine", default="mean", help="of heads in rollout: mean or max")
    add("--discard", type=float, default=0.9, help="fraction rollout leaves out; 0.9")
    add("--classes", type=_numbers, default=(), help="as 3,7: those of relevance")
    add("--topk", type=cli.positive, default=2, help="most probable ones; default 2")
    add("--layer", type=int, default=0, help="of posemb, from 0; default 0")
    add("--shown", type=cli.positive, default=16, help="images drawn; default 16")
    add("--labels", default="", help="file of class names, one a line")
    add("--batch_size", type=cli.positive, default=0, help="default: as memory allows")
    cli.add_weights_flags(parser)
    return parser


def _place(text: str) -> tuple[int, int]:
    row, _, column = text.partition(",")
    if not (row.isdecimal() and column.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROW,COLUMN, as 3,10")
    return int(row), int(column)


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not numbers from 0 on with commas between them"
        )
    return tuple(map(int, words))


if __name__ == "__main__":
    cli.run(main, parser())

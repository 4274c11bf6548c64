"""Draws what a model has learned, and where it looks.

    python -m vit_jax.visualize --model=CHECKPOINT --images FOLDER --out=DIR

CHECKPOINT is a run or weights, as for vit_jax.predict; --images takes files, folders
and "-". --figure names some of these, between commas (default: all that there is
something for):

    filters     principal components of the first filters
    posemb      cosine similarity of the position embeddings of patches
    distance    mean attention distance of each head, by depth: over all images
    norms       norms of tokens, by depth: over all images
    cka         similarity of layers (linear CKA), or with those of --compare=CHECKPOINT:
                over all images, 4 or more
    attention   where the query looks, by layer and head: an image a figure; of more
                than 12 layers some, or those of --layers
    rollout     the same over all layers, on the image
    windows     what patches get in their windows, by stage, over the image (Swin)
    pca         three principal components of patch features as colours, for all
                images together (DINOv2's figure)
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

    if count is not None and ("cka" in figures or flags.compare):
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
        explicit=bool(figures or flags.compare),
    )
    if flags.compare and "cka" not in options.figures:
        raise UserError(
            f"--compare={flags.compare}: cka compares networks with attention, which "
            f"{flags.model} has not: leave --compare out"
        )
    other = load_model(flags, flags.compare) if flags.compare else None
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
    if flags.compare and not flags.images:
        raise UserError(
            f"--compare={flags.compare} is compared by what images are to it: set --images"
        )
    if flags.compare and figures and "cka" not in figures:
        raise UserError(
            f"--compare={flags.compare} is compared by the figure cka, which "
            f"--figure={flags.figure} leaves out: add it, or leave --compare out"
        )
    return figures


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--images", nargs="+", default=(), help="files, folders, or - for a pipe")
    add("--figure", default="", help="names: filters,rollout; default: all")
    add("--out", required=True, help="folder of the figures")
    add("--name", default="", help="of the model in titles; default: its file")
    add("--compare", default="", metavar="CHECKPOINT", help="second model, for cka")
    add("--query", type=_place, help="ROW,COLUMN of a patch; default: class token")
    add(
        "--layers",
        type=_numbers,
        default=(),
        help="as 0,11: of attention; default: some",
    )
    add("--combine", default="mean", help="heads in rollout by mean or max")
    add(
        "--discard",
        type=float,
        default=0.9,
        help="weakest attention rollout drops; 0.9",
    )
    add(
        "--classes",
        type=_numbers,
        default=(),
        help="of relevance: 3,7; default: the top ones",
    )
    add("--topk", type=cli.positive, default=2, help="classes of relevance; default: 2")
    add("--layer", type=int, default=0, help="of posemb, counted from 0; default: 0")
    add(
        "--shown",
        type=cli.positive,
        default=16,
        help="images with their own figures; default: 16",
    )
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

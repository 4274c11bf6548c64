"""Makes docs/gallery/: python docs/gallery.py --model=deit:Ti/16 --digits=runs/digits

Draws what vit_jax.visualize draws of a published model, on photographs that come with
scikit-image and belong to nobody, and of the digits model (README.md trains it), and
keeps the PNGs, made small.
"""

import argparse
import io
import pathlib
import tempfile

from PIL import Image

from vit_jax import cli, visualize

GALLERY = pathlib.Path(__file__).parent / "gallery"
# CC0 by Stefan van der Walt, CC0 by Rachel Michetti, public domain by NASA and by
# SpaceX, says scikit-image.
PHOTOGRAPHS = ("chelsea", "coffee", "astronaut", "rocket")
DIGITS = 64
# The figures that are kept: of weights and of all images, and of single ones.
PHOTOGRAPHS_KEPT = (
    *("filters", "posemb", "distance", "norms", "cka", "attention/chelsea"),
    *(f"{kind}/{name}" for kind in ("rollout", "relevance") for name in PHOTOGRAPHS),
)
DIGITS_KEPT = ("filters", "posemb", "distance", "cka", "attention/3", "relevance/3")
_WIDTH, _COLOURS = 900, 128  # Pixels and colours at most.


def main(flags: argparse.Namespace) -> None:
    """Writes the gallery."""
    GALLERY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, write, model, kept in (
            ("photographs", _photographs, flags.model, PHOTOGRAPHS_KEPT),
            ("digits", _digits, flags.digits, DIGITS_KEPT),
        ):
            images, out = folder / name, folder / f"{name}_figures"
            images.mkdir()
            write(images)
            words = [f"--model={model}", f"--images={images}", f"--out={out}"]
            words += [f"--labels={flags.labels}"] * bool(
                flags.labels and write is _photographs
            )
            words += [f"--heads={flags.heads}"] * bool(flags.heads)
            visualize.main(cli.parse(visualize.parser(), words))
            for stem in kept:
                small = GALLERY / f"{name}_{stem.replace('/', '_')}.png"
                small.write_bytes(_small(out / f"{stem}.png"))


def _photographs(folder: pathlib.Path) -> None:
    import skimage.data

    for name in PHOTOGRAPHS:
        Image.fromarray(getattr(skimage.data, name)()).save(folder / f"{name}.png")


def _digits(folder: pathlib.Path) -> None:
    from sklearn.datasets import load_digits

    for i, pixels in enumerate(load_digits().images[:DIGITS]):
        Image.fromarray((pixels * 255 / 16).round().astype("uint8")).save(
            folder / f"{i}.png"
        )


def _small(path: pathlib.Path) -> bytes:
    """Returns a PNG with fewer pixels and colours."""
    with Image.open(path) as file:
        picture = file.convert("RGB")
    picture.thumbnail((_WIDTH, 4 * _WIDTH), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.quantize(_COLOURS).save(stream, "png", optimize=True)
    return stream.getvalue()


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="deit:Ti/16", help="of photographs")
    add("--digits", default="runs/digits", help="workdir of configs/digits.py")
    add("--labels", default="", help="file of the photographs' class names")
    add("--heads", type=cli.positive, default=0, help="where the weights do not tell")
    return parser


if __name__ == "__main__":
    cli.run(main, parser())

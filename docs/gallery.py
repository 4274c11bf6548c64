"""Makes docs/gallery/: python docs/gallery.py --model=deit:Ti/16 --digits=runs/digits

Runs vit_jax.visualize on a published model, with photographs of scikit-image (extra
`docs`) in the public domain or CC0, and on the digits model (README.md trains it), and
keeps the PNGs, reduced.
"""

import argparse
import io
import pathlib
import shlex
import tempfile

from PIL import Image

from vit_jax import visualize
from vit_jax.command_line import cli

GALLERY = pathlib.Path(__file__).parent / "gallery"
# CC0 by Stefan van der Walt, CC0 by Rachel Michetti, public domain by NASA and by
# SpaceX, says scikit-image.
PHOTOGRAPHS = ("chelsea", "coffee", "astronaut", "rocket")
# Also CC0 or in the public domain; for the figures of all images together.
OTHERS = ("camera", "hubble_deep_field", "brick", "grass")
DIGITS = 64
# The figures that are kept: those of weights and of all images, and some of single ones.
PHOTOGRAPHS_KEPT = (
    *("filters", "posemb", "distance", "norms", "cka", "attention/chelsea"),
    *(f"{kind}/{name}" for kind in ("rollout", "relevance") for name in PHOTOGRAPHS),
)
DIGITS_KEPT = ("filters", "posemb", "distance", "cka", "attention/03", "relevance/03")
_WIDTH, _COLOURS = 720, 192  # Pixels and colours at most.


def main(flags: argparse.Namespace) -> None:
    """Writes the gallery."""
    GALLERY.mkdir(exist_ok=True)
    more = ["--name=DeiT-Ti", "--combine=max", *shlex.split(flags.more)]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        _photographs(folder / "photographs")
        _draw(flags.model, folder / "photographs", more, PHOTOGRAPHS_KEPT)
        _digits(folder / "digits")
        _draw(flags.digits, folder / "digits", ["--name=digits"], DIGITS_KEPT)


def _draw(model: str, images: pathlib.Path, more: list[str], kept: tuple) -> None:
    """Draws all figures of a model on some images, and keeps some."""
    out = images.with_name(f"{images.name}_figures")
    words = [f"--model={model}", f"--images={images}", f"--out={out}", *more]
    visualize.main(cli.parse(visualize.parser(), words))
    for stem in kept:
        small = GALLERY / f"{images.name}_{stem.replace('/', '_')}.png"
        small.write_bytes(_small(out / f"{stem}.png"))


def _photographs(folder: pathlib.Path) -> None:
    import skimage.data

    folder.mkdir()
    for name in (*PHOTOGRAPHS, *OTHERS):
        Image.fromarray(getattr(skimage.data, name)()).save(folder / f"{name}.png")


def _digits(folder: pathlib.Path) -> None:
    from sklearn.datasets import load_digits

    folder.mkdir()
    for i, pixels in enumerate(load_digits().images[:DIGITS]):
        Image.fromarray((pixels * 255 / 16).round().astype("uint8")).save(
            folder / f"{i:02}.png"
        )


def _small(path: pathlib.Path) -> bytes:
    """Returns a PNG with fewer pixels and colours."""
    with Image.open(path) as file:
        picture = file.convert("RGB")
    picture.thumbnail((_WIDTH, 2 * _WIDTH), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    # Not by the most frequent colours, or the ends of a scale would go.
    how = Image.Quantize.MAXCOVERAGE
    small = picture.quantize(_COLOURS, how, dither=Image.Dither.NONE)
    small.save(stream, "png", optimize=True)
    return stream.getvalue()


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="deit:Ti/16", help="network for the photographs")
    add("--digits", default="runs/digits", help="workdir of configs/digits.py")
    add("--more", default="", help="further flags of visualize for the photographs")
    return parser


if __name__ == "__main__":
    cli.run(main, parser())

"""Contact sheets: pictures of many images in rows and columns, with captions."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from vit_jax.data.config import MAX_PIXELS
from vit_jax.errors import UserError
from vit_jax.evaluators import fonts

_CELL = 128  # Side in pixels; smaller images are magnified to about this size.
_MARGIN, _FONT_SIZE, _LINE = 8, 12, 15  # Sizes in pixels.
_PAPER, _INK = (255, 255, 255), (20, 20, 20)


def check(count: int, columns: int, image_size: Sequence[int]) -> None:
    """Checks the size of a contact sheet, before its images are read.

    Args:
      count: maximum number of images.
      columns: images per row.
      image_size: height and width of an image in pixels.

    Raises:
      UserError: the sheet would have more pixels than an image may have.
    """
    H, W = image_size
    width, height = _cell(H, W, _LINE)
    sides = columns * width + _MARGIN, -(-count // columns) * height + _MARGIN
    if math.prod(sides) > MAX_PIXELS:
        raise UserError(
            f"--columns={columns} and {count} images of {H}x{W}: the picture would have "
            f"{sides[0]}x{sides[1]} pixels, more than {MAX_PIXELS:,}: lower --rows and "
            "--columns"
        )


def _cell(height: int, width: int, text: int) -> tuple[int, int]:
    """Returns width and height of an image with its margin and caption."""
    factor = max(1, _CELL // max(height, width))
    return width * factor + _MARGIN, height * factor + text + _MARGIN


def draw(
    images: UInt8[np.ndarray, "B H W C"],
    captions: Sequence[Sequence[str]],
    columns: int,
) -> Image.Image:
    """Draws images in rows, each above its caption.

    Args:
      images: RGB or grey images. Small ones are magnified by an integer, which keeps
        their pixels sharp.
      captions: lines of text per image. Long lines are cut; letters that no installed
        font has are escaped.
      columns: images per row.

    Returns:
      An RGB picture.
    """
    B, H, W, _ = images.shape
    factor = max(1, _CELL // max(H, W))
    width, height = _cell(H, W, max(map(len, captions)) * _LINE)
    size = columns * width + _MARGIN, -(-B // columns) * height + _MARGIN
    sheet = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(sheet)
    pixels = images.repeat(3 // images.shape[-1], axis=-1)
    for i, caption in enumerate(captions):
        left = _MARGIN + i % columns * width
        top = _MARGIN + i // columns * height
        picture = Image.fromarray(pixels[i]).resize(
            (W * factor, H * factor), Image.Resampling.NEAREST
        )
        sheet.paste(picture, (left, top))
        for number, text in enumerate(caption):
            y = top + H * factor + number * _LINE
            text, font = fonts.choose(text, _FONT_SIZE)
            pen.text((left, y), _cut(text, font, W * factor), _INK, font)
    return sheet


def captions(
    labels: Float[np.ndarray, "B K"], class_names: Sequence[str], most: int = 3
) -> list[list[str]]:
    """Returns labels as lines of text: class names, with their fractions if mixed.

    Args:
      labels: fraction of each class.
      class_names: class names in label order; if empty, lines read "class 7".
      most: maximum number of named classes; the fractions of all others are summed.

    Returns:
      Lines per image, largest fraction first.
    """
    return [_caption(shares, class_names, most) for shares in labels]


def _caption(shares, class_names, most) -> list[str]:
    present = [int(k) for k in np.argsort(-shares, kind="stable") if shares[k] > 5e-4]
    name = lambda k: class_names[k] if len(class_names) else f"class {k}"
    if len(present) == 1 and shares[present[0]] > 1 - 5e-4:
        return [name(present[0])]
    # The fraction comes first, so that it is kept when a long name is cut.
    lines = [f"{shares[k]:.1%} {name(k)}" for k in present[:most]]
    if rest := present[most:]:
        lines.append(f"{shares[rest].sum():.1%} in {len(rest)} more")
    return lines


def _cut(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Shortens a text to a width in pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."

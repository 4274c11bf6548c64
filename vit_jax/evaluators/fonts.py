"""Fonts for pictures with class names; letters that no font has are escaped."""

import functools
import unicodedata

from PIL import ImageFont

# Pillow's default font has little more than ASCII. These have letters with accents, or
# Chinese,
# Japanese and Korean, on Linux, macOS and Windows.
_INSTALLED = (
    *("DejaVuSans.ttf", "Arial.ttf", "arial.ttf"),
    *("NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "msyh.ttc"),
)
_NO_CHARACTER = "\uffff"  # Fonts draw it as the box for a missing letter.


def choose(text: str, size: int) -> tuple[str, ImageFont.FreeTypeFont]:
    """Returns a text to draw and a font that has all of its letters.

    Args:
      text: any text.
      size: height of the font, in pixels.

    Returns:
      The text, composed (NFC), and the first installed font that has all its letters;
      or Pillow's default font and the text with an escape, such as "\\u83ca", for each
      letter that this font lacks.
    """
    text = unicodedata.normalize("NFC", text)
    fonts = _fonts(size)
    for font in fonts:
        if all(_has(font, letter) for letter in text):
            return text, font
    default = fonts[0]
    letters = (
        letter if _has(default, letter) else letter.encode("unicode_escape").decode()
        for letter in text
    )
    return "".join(letters), default


@functools.cache
def _fonts(size: int) -> list[ImageFont.FreeTypeFont]:
    fonts = [ImageFont.load_default(size)]
    for name in _INSTALLED:
        try:
            fonts.append(ImageFont.truetype(name, size))
        except OSError:  # The font is not installed.
            continue
    return fonts


@functools.lru_cache(maxsize=4096)
def _has(font: ImageFont.FreeTypeFont, letter: str) -> bool:
    # No font draws control characters and surrogates.
    return letter.isprintable() and _drawn(font, letter) != _drawn(font, _NO_CHARACTER)


def _drawn(font: ImageFont.FreeTypeFont, letter: str) -> tuple[bytes, tuple[int, int]]:
    mask = font.getmask(letter)
    return bytes(mask), mask.size

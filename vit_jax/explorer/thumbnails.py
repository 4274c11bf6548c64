"""Small pictures of the images of a folder, made beside what people wait for."""

import functools
import io
import threading

from PIL import Image, ImageDraw

from vit_jax.data import decode
from vit_jax.explorer.images import MOST_NAMES, Folder

_SIDE = 112  # Pixels of the longer side.
_SCALED = ("JPEG", "MPO")  # Formats that Pillow can decode to an eighth of the size.


class Thumbnails:
    """The thumbnails of a folder, of which each is made once.

    One is made at a time, so that the other cores are free for whoever clicks. Methods
    may be called by several threads at once.

    Args:
      folder: of the images.
    """

    def __init__(self, folder: Folder):
        self._folder, self._making = folder, threading.Lock()
        self._made = functools.lru_cache(MOST_NAMES)(self._make)

    def of(self, name: str) -> bytes:
        """Returns a small JPEG of an image, a grey one with a word if it is damaged.

        Raises:
          Refused: as of `Folder.read`.
        """
        version = self._folder.version(name)
        with self._making:
            return self._made(name, version)

    def _make(self, name: str, version: tuple[int, int]) -> bytes:
        del version  # Part of the key alone.
        return thumbnail(self._folder.read(name))


def thumbnail(data: bytes) -> bytes:
    """Returns a small JPEG of an image, a grey one with a word if it is damaged."""
    try:
        picture = _decode(data)
        picture.thumbnail((_SIDE, _SIDE))
    except decode.DamagedImage:
        picture = Image.new("RGB", (_SIDE, _SIDE), (96, 96, 96))
        words, white = "cannot\nbe read", (255, 255, 255)
        ImageDraw.Draw(picture).text((16, 30), words, white, font_size=22)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=80)
    return stream.getvalue()


def _decode(data: bytes) -> Image.Image:
    """Decodes an image; a photograph no finer than its thumbnail needs."""
    try:
        picture = Image.open(io.BytesIO(data))
        if picture.format in _SCALED:
            picture.thumbnail((_SIDE, _SIDE))
            return picture.convert("RGB")
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
        raise decode.DamagedImage("cannot be decoded") from error
    return Image.fromarray(decode.decode(data))

"""The explorer's images: size checks before decoding, folders and thumbnails."""

import functools
import io
import itertools
import os
import pathlib
import threading
from collections.abc import Iterator

from PIL import Image, ImageDraw, ImageOps, UnidentifiedImageError

from vit_jax.data import bands, decode, image_files
from vit_jax.data.config import MAX_MEGAPIXELS
from vit_jax.errors import UserError

MAX_BYTES = 32 << 20
MAX_NAMES = 2_000  # Maximum number of names per folder; more would make the page slow.
KINDS = "JPEG, PNG, WebP, GIF, BMP or TIFF"
_THUMBNAIL_SIDE = 112  # Longer side in pixels.
_SCALED = ("JPEG", "MPO")  # Formats that Pillow can decode to an eighth of the size.


class Refused(Exception):
    """A rejected request.

    Args:
      status: HTTP status, 400 to 599.
      sentence: reason, which the page shows.
    """

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


def check(data: bytes, name: str, max_megapixels: float = MAX_MEGAPIXELS) -> None:
    """Raises Refused if an image file has too many bytes, or pixels by its header.

    Data that are not an image pass: decoding them gives the reason later.

    Args:
      data: content of an image file.
      name: name of the image for messages.
      max_megapixels: size of the largest image to read, see `data.max_megapixels`.
    """
    if len(data) > MAX_BYTES:
        raise too_large(len(data), name)
    try:
        width, height = Image.open(io.BytesIO(data)).size
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        return
    try:
        decode.check_size((height, width), max_megapixels)
    except decode.DamagedImage as error:
        raise Refused(413, f"{name} {error}.") from error


def too_large(size: int, name: str) -> Refused:
    """Returns the rejection of a file with too many bytes."""
    return Refused(
        413,
        f"{name} has {size:,} bytes, more than {MAX_BYTES:,}: give a smaller file.",
    )


def damaged(error: decode.DamagedImage, name: str) -> Refused:
    """Returns the rejection of data that are not a readable image."""
    return Refused(415, f"{name} {error}: give a {KINDS} file.")


class Folder:
    """The images of a folder; nothing outside it is read.

    Methods may be called by several threads at once.

    Args:
      root: path of the folder.
      max_megapixels: size of the largest image to read, see `data.max_megapixels`.

    Raises:
      UserError: the path is not a folder.
    """

    def __init__(self, root: str, max_megapixels: float = MAX_MEGAPIXELS):
        if not os.path.isdir(root):
            raise UserError(f"--images={root} is not a folder: give one with images")
        self._root, self._lock = pathlib.Path(root).resolve(), threading.Lock()
        self._max_megapixels = max_megapixels
        # Time and size of the file are unused here, but part of the cache's key.
        make = lambda name, time, size: thumbnail(self.read(name), max_megapixels)
        self._thumbnails = functools.lru_cache(MAX_NAMES)(make)

    def names(self) -> tuple[list[str], bool]:
        """Returns the sorted paths below the folder, and whether some are omitted."""
        names = list(itertools.islice(self._walk(), MAX_NAMES + 1))
        return names[:MAX_NAMES], len(names) > MAX_NAMES

    def read(self, name: str) -> bytes:
        """Reads an image file.

        Args:
          name: one of the paths in `names`.

        Raises:
          Refused: the file is missing, its name is not that of an image, it is too
            large, or a link leads outside the folder.
        """
        path = self._find(name)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise _unreadable(error, name) from error
        if len(data) > MAX_BYTES:
            raise too_large(size, name)
        check(data, name, self._max_megapixels)
        return data

    def thumbnail(self, name: str) -> bytes:
        """Returns the `thumbnail` of an image, which is renewed when its file changes.

        Raises:
          Refused: the image cannot be read, see `read`.
        """
        try:
            stat = self._find(name).stat()
        except OSError as error:
            raise _unreadable(error, name) from error
        with self._lock:  # One at a time keeps the other cores free for requests.
            return self._thumbnails(name, stat.st_mtime_ns, stat.st_size)

    def _find(self, name: str) -> pathlib.Path:
        path = self._resolve(name)
        if path is None:
            raise Refused(404, f"{name!r} is not an image of the chosen folder.")
        return path

    def _walk(self) -> Iterator[str]:
        # Linked folders are skipped: one may lead anywhere, or in a circle.
        for folder, below, files in os.walk(self._root):
            below[:] = sorted(name for name in below if not name.startswith("."))
            for file in sorted(files):
                name = os.path.relpath(os.path.join(folder, file), self._root)
                if not file.startswith(".") and self._resolve(name):
                    yield name

    def _resolve(self, name: str) -> pathlib.Path | None:
        """Returns the file for a name; None if it must not be read."""
        try:
            name.encode()  # A name that fails here cannot be part of a URL.
            path = (self._root / name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # For example, a link to itself.
            return None
        inside = path.is_relative_to(self._root) and path.is_file()
        return path if inside and name.lower().endswith(image_files.SUFFIXES) else None


def _unreadable(error: OSError, name: str) -> Refused:
    return Refused(404, f"{name} cannot be read: {error.strerror}.")


def thumbnail(data: bytes, max_megapixels: float = MAX_MEGAPIXELS) -> bytes:
    """Returns a small JPEG of an image; a grey one with a text if it is damaged."""
    side = _THUMBNAIL_SIDE
    try:
        picture = _decode(data, max_megapixels)
        picture.thumbnail((side, side))
    except decode.DamagedImage:
        picture = Image.new("RGB", (side, side), (96, 96, 96))
        text, white = "cannot\nbe read", (255, 255, 255)
        ImageDraw.Draw(picture).text((16, 30), text, white, font_size=22)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=80)
    return stream.getvalue()


def _decode(data: bytes, max_megapixels: float) -> Image.Image:
    """Decodes an image upright, JPEGs at the smallest size sufficient for a thumbnail."""
    try:
        picture = Image.open(io.BytesIO(data))
        if picture.format in _SCALED:
            picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
            return ImageOps.exif_transpose(picture.convert("RGB"))
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
        raise decode.DamagedImage("cannot be decoded") from error
    how = {"exif": True, "max_megapixels": max_megapixels}
    return Image.fromarray(bands.picture(data, **how))

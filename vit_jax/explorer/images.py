"""Images that people give to the explorer: checked before they are decoded."""

import io
import os
import pathlib
from collections.abc import Iterator

from PIL import Image, UnidentifiedImageError

from vit_jax.data import decode
from vit_jax.errors import UserError
from vit_jax.evaluation import inputs

MAX_BYTES = 32 << 20
MAX_PIXELS = 50_000_000
MOST_NAMES = 2_000  # Of a folder; the page would be slow with more.
KINDS = "JPEG, PNG, WebP, GIF, BMP or TIFF"


class Refused(Exception):
    """A request that is not granted: an HTTP status and one sentence on why.

    Args:
      status: 400 to 599.
      sentence: for the person at the page.
    """

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


def check(data: bytes, name: str) -> None:
    """Checks the size of an image, by its header alone.

    Raises:
      Refused: it has too many bytes or pixels. What is no image passes: decoding it
        will say why.
    """
    if len(data) > MAX_BYTES:
        raise too_large(len(data), name)
    try:
        width, height = Image.open(io.BytesIO(data)).size
    except Image.DecompressionBombError as error:
        raise Refused(413, f"{name} has too many pixels ({error}).") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        return
    if width * height > MAX_PIXELS:
        raise Refused(
            413,
            f"{name} has {width}x{height} pixels, more than {MAX_PIXELS:,}: make it "
            "smaller.",
        )


def too_large(size: int, name: str) -> Refused:
    """Returns the refusal of a file of too many bytes."""
    return Refused(
        413,
        f"{name} has {size:,} bytes, more than {MAX_BYTES:,}: give a smaller file.",
    )


def damaged(error: decode.DamagedImage, name: str) -> Refused:
    """Returns the refusal of what is no readable image."""
    return Refused(415, f"{name} {error}: give a {KINDS} file.")


class Folder:
    """The images of a folder, and of nothing outside it.

    Args:
      root: the folder.

    Raises:
      UserError: it is none.
    """

    def __init__(self, root: str):
        if not os.path.isdir(root):
            raise UserError(f"--images={root} is not a folder: give one with images")
        self._root = pathlib.Path(root).resolve()

    def names(self) -> tuple[list[str], bool]:
        """Returns the paths below the folder, sorted, and whether some are left out."""
        names = []
        for name in self._walk():
            if len(names) == MOST_NAMES:
                return names, True
            names.append(name)
        return names, False

    def read(self, name: str) -> bytes:
        """Returns an image's content.

        Args:
          name: one of `names`.

        Raises:
          Refused: it is not there, not an image by its name, too large, or outside the
            folder when links are followed.
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
        check(data, name)
        return data

    def version(self, name: str) -> tuple[int, int]:
        """Returns what an image's file has another of once it is changed.

        Raises:
          Refused: as of `read`.
        """
        try:
            found = self._find(name).stat()
        except OSError as error:
            raise _unreadable(error, name) from error
        return found.st_mtime_ns, found.st_size

    def _find(self, name: str) -> pathlib.Path:
        path = self._resolve(name)
        if path is None:
            raise Refused(404, f"{name!r} is no image of the chosen folder.")
        return path

    def _walk(self) -> Iterator[str]:
        # Linked folders are not entered: one may lead anywhere, or round in circles.
        for folder, below, files in os.walk(self._root):
            below[:] = sorted(name for name in below if not name.startswith("."))
            for file in sorted(files):
                name = os.path.relpath(os.path.join(folder, file), self._root)
                if not file.startswith(".") and self._resolve(name):
                    yield name

    def _resolve(self, name: str) -> pathlib.Path | None:
        """Returns the file that a name stands for, if it may be read."""
        try:
            name.encode()  # Or it could not be written into an address.
            path = (self._root / name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # As a link that leads to itself.
            return None
        inside = path.is_relative_to(self._root) and path.is_file()
        return path if inside and name.lower().endswith(inputs.SUFFIXES) else None


def _unreadable(error: OSError, name: str) -> Refused:
    return Refused(404, f"{name} cannot be read: {error.strerror}.")

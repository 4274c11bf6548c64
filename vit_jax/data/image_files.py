"""Images of a command line: files, folders, and standard input.

Importing it does not import JAX, so that a wrong path is an error at once.
"""

import concurrent.futures
import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from vit_jax.command_line.files import not_a_file
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources import folder
from vit_jax.errors import UserError

SUFFIXES = (*folder.EXTENSIONS, ".jp2", ".pbm", ".pnm")
STDIN = "-"

_CHUNK = 1 << 16
# No path begins with these bytes, which are not text.
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"II*\0", b"MM\0*")
_TEXT_SIGNATURES = (b"GIF87a", b"GIF89a", b"RIFF", b"BM")  # Images if a 0 follows.

# Name for messages, and path, content, or pixels of a data set.
Named = tuple[str, str | bytes | np.ndarray]
T = TypeVar("T")


def find(words: Iterable[str], stdin: int = 0) -> Iterator[Named]:
    """Yields the images named by arguments of a command line: a name, and a path or content.

    Files are not checked for existence. A link that leads back to a folder above it is not
    followed.

    Args:
      words: files; folders, searched recursively for SUFFIXES in the order of their names;
        "-" for standard input, which has either paths, one per line, or one image.
      stdin: file descriptor of standard input.
    """
    for word in words:
        if word == STDIN:
            yield from _read_stdin(stdin)
        else:
            yield from _below(word)


def find_some(words: Sequence[str], stdin: int = 0) -> Iterable[Named]:
    """Returns the images of `find`, as an iterator if standard input is among the words.

    Raises:
      UserError: no image exists.
    """
    images, first = find(words, stdin), []
    for name, source in images:
        first.append((name, source))
        if isinstance(source, bytes) or os.path.isfile(source):
            break
    else:
        raise UserError(
            f"no image: {first[0][0]!r} {_missing(first[0][1])}"
            if first
            else f"no image in {', '.join(words)}: their names end in "
            f"{' '.join(SUFFIXES)}"
        )
    images = itertools.chain(first, images)
    return images if STDIN in words else list(images)


def _missing(path: str) -> str:
    """Returns the reason why a path is not an image file."""
    if kind := not_a_file(path):
        return f"is {kind}, not a file: send its content to {STDIN} instead"
    if os.path.isdir(path):
        return "is a folder that cannot be listed"
    return "is a broken link" if os.path.islink(path) else "does not exist"


def load(source: str | bytes | np.ndarray) -> bytes | np.ndarray:
    """Returns an image file's content, or pixels as they are.

    It raises OSError also for a pipe or a device.
    """
    if not isinstance(source, str):
        return source
    if kind := not_a_file(source):
        raise OSError(f"it is {kind}, not a file")
    with open(source, "rb") as file:
        return file.read()


def attempt(image: Named, work: Callable[[bytes | np.ndarray, str], T]) -> T | str:
    """Returns the result of `work` on a file's content and name, or the reason of a failure."""
    name, source = image
    try:
        return work(load(source), name)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except DamagedImage as error:
        return str(error)


def ahead(
    items: Iterable, work: Callable[..., T], *, threads: int, limit: int
) -> Iterator[T]:
    """Maps `work`, which must not raise, over items in threads, in order, ahead of the caller.

    The items are read in a thread too, so that a result is yielded as soon as its item is
    read, even if a slow pipe yields no further ones yet. At most `limit` results, 2 or more,
    wait for the caller.
    """
    results = queue.Queue(limit)
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def feed():
        end = None
        try:
            for item in items:
                results.put(pool.submit(work, item))
        except (OSError, RuntimeError, ValueError) as error:
            end = error  # A RuntimeError if the caller ended and shut the pool down.
        finally:
            results.put(end)

    # A daemon thread, because one that waits for a pipe cannot be ended.
    threading.Thread(target=feed, daemon=True).start()
    try:
        while (result := results.get()) is not None:
            if isinstance(result, Exception):
                raise result
            yield result.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                results.get_nowait()


def _below(path: str, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Named]:
    """Yields a file, or the images of a folder and its subfolders.

    `above` has device and inode of the folders on the way, to which links may lead back.
    """
    if not os.path.isdir(path):
        yield path, path
        return
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        about = os.stat(path)
    except OSError:  # Opening it raises an error later.
        yield path, path
        return
    if (here := (about.st_dev, about.st_ino)) in above:
        return
    for entry in entries:
        if folder.is_ignored(entry):
            continue
        if folder.is_folder(entry):
            yield from _below(entry.path, (*above, here))
        elif entry.name.lower().endswith(SUFFIXES):
            yield entry.path, entry.path


def _read_stdin(stdin: int) -> Iterator[Named]:
    # Not through `sys.stdin`, whose lock a waiting thread would keep at exit.
    try:
        chunk = os.read(stdin, _CHUNK)
    except OSError as error:
        raise UserError(f"standard input cannot be read: {error}") from error
    if _is_image(chunk):
        rest = list(iter(lambda: os.read(stdin, _CHUNK), b""))
        yield STDIN, b"".join([chunk, *rest])
        return
    line = b""
    while chunk:
        *lines, line = (line + chunk).split(b"\n")
        yield from _paths(lines)
        chunk = os.read(stdin, _CHUNK)
    yield from _paths([line])


def _paths(lines: list[bytes]) -> Iterator[Named]:
    for line in lines:
        if path := os.fsdecode(line.rstrip(b"\r")):
            yield from _below(path)


def _is_image(start: bytes) -> bool:
    return start.startswith(_SIGNATURES) or (
        start.startswith(_TEXT_SIGNATURES) and b"\0" in start[:64]
    )

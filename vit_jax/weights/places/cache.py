"""A fetched file on its way into a cache: checked, then renamed into place."""

import hashlib
import os
import pathlib
from collections.abc import Callable

from vit_jax.errors import UserError


class FetchError(UserError):
    """A place that did not give its file.

    Args:
      place: as it was asked for.
      reason: why, as a sentence that begins with the place goes on.
      remedy: what to do about it.
    """

    def __init__(self, place: str, reason: str, remedy: str):
        super().__init__(f"{place} {reason}: {remedy}")
        self.place, self.reason, self.remedy = place, reason, remedy


def digest(path: pathlib.Path, *, git: bool = False) -> str:
    """Returns the SHA-256 of a file, or the name that git gives its content (SHA-1)."""
    with path.open("rb") as stream:
        if not git:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        head = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: head).hexdigest()


def is_whole(path: pathlib.Path, wanted: str = "", *, git: bool = False) -> bool:
    """Tells whether a file is there with the wanted hash (or its beginning)."""
    return path.is_file() and (
        not wanted or digest(path, git=git).startswith(wanted.lower())
    )


def land(
    path: pathlib.Path,
    receive: Callable[[pathlib.Path], None],
    *,
    place: str,
    wanted: str = "",
    git: bool = False,
    lock: pathlib.Path | None = None,
) -> None:
    """Fills a partial file beside `path` and renames it when it is whole.

    One process at a time works on a file; those that waited find it done.

    Args:
      path: of the file to be.
      receive: called with the path of the partial file, which may hold a beginning.
      place: where the content is from, for messages.
      wanted: hash of the content, or its beginning; not checked if empty.
      git: whether the hash is git's.
      lock: file that processes lock; beside `path` if None.

    Raises:
      FetchError: the content has another hash; it is deleted.
      UserError: the folder cannot be written.
    """
    from huggingface_hub.utils import WeakFileLock

    part = path.with_name(path.name + ".part")
    lock = lock or path.with_name(path.name + ".lock")
    try:
        for folder in (path.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if is_whole(path, wanted, git=git):
                return
            receive(part)
            if not is_whole(part, wanted, git=git):
                got = digest(part, git=git)
                discard(part)
                raise FetchError(
                    place,
                    f"has the {'SHA-1' if git else 'SHA-256'} {got}, not {wanted}",
                    "it was deleted; fetch it again, or correct the hash",
                )
            os.replace(part, path)
            tag_of(part).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or one_line(error)}): free "
            "space, or choose another cache folder by VIT_JAX_CACHE (hf://: HF_HOME)"
        ) from error


def one_line(error: BaseException) -> str:
    """Returns an error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def tag_of(part: pathlib.Path) -> pathlib.Path:
    """Returns where a partial file's ETag is kept."""
    return part.with_name(part.name + ".etag")


def discard(part: pathlib.Path) -> None:
    """Deletes a partial file."""
    part.unlink(missing_ok=True)
    tag_of(part).unlink(missing_ok=True)

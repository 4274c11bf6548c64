"""Checks of paths that a user gives; files that are never half written, and reading them."""

import contextlib
import fcntl
import io
import json
import os
import pathlib
import re
import stat
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from etils import epath

from vit_jax.command_line.printing import masked
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def not_a_file(path: str | os.PathLike) -> str:
    """Returns why a path cannot be read as a file or listed as a folder.

    Reading a pipe may wait for ever, and a device may never end.

    Returns:
      What it is, as "a pipe (FIFO)"; "" for files, folders, and what does not exist.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # Opening it raises the same error.
        return ""
    return _KINDS.get(stat.S_IFMT(mode), "")


def check(thing: str, path: str | os.PathLike) -> None:
    """Refuses a path that is a pipe, a device or a socket.

    Args:
      thing: what the path was given as, for example "--labels".
      path: file or folder; it need not exist.

    Raises:
      UserError: it is none of these.
    """
    if kind := not_a_file(path):
        raise UserError(
            f"{thing}={path}: is {kind}, not a file; copy its content to a file and "
            "give that"
        )


def new_workdir(name: str) -> str:
    """Returns a folder under runs/ that does not exist yet."""
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{i}" for i in range(2, 100))]
    return next(name for name in names if not os.path.exists(name))


def default_workdir(job: str, *words: str) -> str:
    """Returns a folder under runs/ for a job, the same whenever the words are.

    Args:
      job: first part of its path, as "finetune".
      *words: what the job is given, as weights and data; passwords in URLs are left out.
    """
    shown = map(masked, filter(None, words))
    parts = (re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-.") for word in shown)
    return f"runs/{job}/{'_'.join(parts)}"


def refuse_scheme(thing: str, path: str | os.PathLike, *, local: bool = False) -> None:
    """Refuses a place that is neither a local path nor in a bucket of Google.

    Otherwise a folder would be made that is named "s3:".

    Args:
      thing: what the place was given as, for example "--out".
      path: the place.
      local: whether it must not be in a bucket either.

    Raises:
      UserError: it is another.
    """
    scheme = re.match(r"([A-Za-z][\w+.-]*):/", os.fspath(path))
    if scheme and (local or not os.fspath(path).startswith("gs://")):
        bucket = "" if local else ", or one in a bucket, gs://BUCKET/FOLDER"
        raise UserError(
            f"{thing}={path}: {scheme[1]}:// is neither read nor written here; give a "
            f"local path{bucket}"
        )


@contextlib.contextmanager
def writing_out(folder: str | os.PathLike) -> Iterator[None]:
    """Turns a failure to write what --out asks for into one line.

    Raises:
      UserError: the line.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--out={folder} cannot be written ({error.strerror or error}): choose "
            "another folder"
        ) from error


def download_snapshot(setting: str, repo: str, **options) -> str:
    """Returns the folder with a copy of a repository on the Hugging Face hub.

    Args:
      setting: key and value that name the repository, for messages.
      repo: owner and name.
      **options: of `huggingface_hub.snapshot_download`.

    Raises:
      UserError: it does not exist, or there is neither network nor a copy.
    """
    import huggingface_hub
    from huggingface_hub import errors

    known = (
        *(errors.HfHubHTTPError, errors.LocalEntryNotFoundError),
        *(errors.HFValidationError, OSError),
    )
    try:
        return huggingface_hub.snapshot_download(repo, **options)
    except known as error:
        raise UserError(
            f"{setting} cannot be downloaded ({str(error).strip().splitlines()[0]}): check "
            "the name and the network, and for a gated set accept its terms and run `hf "
            "auth login`"
        ) from error


@contextlib.contextmanager
def lock_folder(folder: str | os.PathLike, busy: str) -> Iterator[int]:
    """Holds the lock of a folder, which ends with the process; yields its handle.

    File systems without locks, as some network file systems, do not lock.

    Raises:
      UserError: another process holds it; the message is `busy`.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(busy) from error
        yield handle
    finally:
        os.close(handle)


def read_json(path: epath.Path) -> dict:
    """Returns the content of a JSON file that this package wrote.

    Raises:
      UserError: it cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            return content
        reason = "it holds no object"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
    raise UserError(f"{path} is damaged ({reason}): remove it and repeat the command")


def replace_text(path: epath.Path | pathlib.Path, text: str) -> None:
    """Writes a file so that it is the old one or the new one, never half of it."""
    replace_bytes(path, text.encode())


def replace_bytes(path: epath.Path | pathlib.Path, content: bytes) -> None:
    """Replaces a file by bytes, see `replace_text`."""
    with replacing(path) as file:
        file.write(content)


def replace_image(
    path: epath.Path | pathlib.Path, image: "Image.Image", form: str, **options
) -> None:
    """Replaces a file by a picture, see `replace_text`.

    Args:
      path: path of the file.
      image: the picture.
      form: format, as "PNG".
      **options: of Pillow's writer of the format.
    """
    # Pillow's encoders do not notice when a full disk takes a part of what they write.
    stream = io.BytesIO()
    image.save(stream, form, **options)
    replace_bytes(path, stream.getvalue())


def unique_stem(stem: str, taken: dict[str, int]) -> str:
    """Returns a stem of a file name that is not taken: itself, or with a number added.

    Args:
      stem: preferred stem.
      taken: stems in lower case, since some file systems ignore case, with the last
        number added to each; the result is added.
    """
    name, plain = stem, stem.lower()
    while name.lower() in taken:
        taken[plain] += 1
        name = f"{stem}_{taken[plain]}"
    taken[name.lower()] = 1
    return name


@contextlib.contextmanager
def replacing(path: epath.Path | pathlib.Path) -> Iterator[IO[bytes]]:
    """Yields a file that takes the place of `path` at the end, unless there is an error."""
    new = path.parent / f".{path.name}.new"
    try:
        with new.open("wb") as file:
            yield file
        new.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = os.fspath(path)  # A failing write names no file.
        raise

"""Checks paths that a user gives, reads files, and replaces files atomically."""

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
      The kind of the path, such as "a pipe (FIFO)"; "" for files, folders and paths
      that do not exist.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # Opening it raises the same error.
        return ""
    return _KINDS.get(stat.S_IFMT(mode), "")


def check(thing: str, path: str | os.PathLike) -> None:
    """Refuses a path that is a pipe, a device or a socket.

    Args:
      thing: flag or key that the path was given for, such as "--labels".
      path: file or folder; it need not exist.

    Raises:
      UserError: it is one of these.
    """
    if kind := not_a_file(path):
        raise UserError(
            f"{thing}={path}: is {kind}, not a file; copy its content to a file and "
            "give that"
        )


def cache_folder() -> pathlib.Path:
    """Returns the folder of files that can be made again: $VIT_JAX_CACHE or a default."""
    folder = os.environ.get("VIT_JAX_CACHE") or "~/.cache/vit_jax"
    return pathlib.Path(folder).expanduser()


def new_workdir(name: str) -> str:
    """Returns a folder under runs/ that does not exist yet."""
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{i}" for i in range(2, 100))]
    return next(name for name in names if not os.path.exists(name))


def default_workdir(job: str, *words: str) -> str:
    """Returns a folder under runs/ for a job; equal words give the same folder.

    Args:
      job: first part of the folder's path, such as "finetune".
      *words: inputs of the job, such as weights and data; passwords in URLs are left
        out.
    """
    shown = map(masked, filter(None, words))
    parts = (re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-.") for word in shown)
    return f"runs/{job}/{'_'.join(parts)}"


def refuse_scheme(thing: str, path: str | os.PathLike, *, local: bool = False) -> None:
    """Refuses a path that is neither local nor in a Google bucket (gs://).

    Otherwise a local folder named "s3:" would be created.

    Args:
      thing: flag or key that the path was given for, such as "--out".
      path: path to check.
      local: whether to refuse Google buckets too.

    Raises:
      UserError: the path is refused.
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
    """Converts a failure to write to the folder of --out to a UserError of one line.

    Raises:
      UserError: a file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--out={folder} cannot be written ({error.strerror or error}): choose "
            "another folder"
        ) from error


def download_snapshot(setting: str, repo: str, **options) -> str:
    """Downloads a repository of the Hugging Face hub and returns its local folder.

    Args:
      setting: key and value that name the repository, for messages.
      repo: owner and name.
      **options: options of `huggingface_hub.snapshot_download`.

    Raises:
      UserError: it does not exist, or there is neither a network nor a local copy.
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
    """Locks a folder until the context, or the process, ends; yields its handle.

    File systems without locks, such as some network file systems, do not lock.

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
        reason = "it is not a JSON object"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
    raise UserError(f"{path} is damaged ({reason}): remove it and repeat the command")


def replace_text(path: epath.Path | pathlib.Path, text: str) -> None:
    """Replaces a text file atomically: it is the old or the new one, never a part."""
    replace_bytes(path, text.encode())


def replace_bytes(path: epath.Path | pathlib.Path, content: bytes) -> None:
    """Replaces a file of bytes atomically."""
    with replacing(path) as file:
        file.write(content)


def replace_image(
    path: epath.Path | pathlib.Path, image: "Image.Image", form: str, **options
) -> None:
    """Replaces an image file atomically.

    Args:
      path: path of the file.
      image: image to write.
      form: format, such as "PNG".
      **options: options of Pillow's writer of this format.
    """
    # Pillow's encoders do not notice when a full disk stores only a part.
    stream = io.BytesIO()
    image.save(stream, form, **options)
    replace_bytes(path, stream.getvalue())


def unique_stem(stem: str, taken: dict[str, int]) -> str:
    """Returns a file stem that is not taken: `stem`, or `stem` with a number added.

    Args:
      stem: preferred stem.
      taken: stems in lower case, since some file systems ignore case, each with the
        last number that was added to it. The result is added to this dict.
    """
    name, plain = stem, stem.lower()
    while name.lower() in taken:
        taken[plain] += 1
        name = f"{stem}_{taken[plain]}"
    taken[name.lower()] = 1
    return name


@contextlib.contextmanager
def replacing(path: epath.Path | pathlib.Path) -> Iterator[IO[bytes]]:
    """Yields a file that replaces `path` when the context ends without an error."""
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

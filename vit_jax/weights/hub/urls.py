"""Downloads, verifies and caches single files from https:// and gs://."""

import hashlib
import importlib.util
import os
import pathlib
from collections.abc import Iterable, Iterator
from urllib.parse import quote, urlsplit

from etils import epath

from vit_jax.command_line import files, progress
from vit_jax.errors import UserError
from vit_jax.weights.hub import mirrors

_CHUNK_BYTES = 2**24


class DownloadError(UserError):
    """A source that could not be downloaded.

    Args:
      source: name or address that the user gave.
      reason: predicate of a sentence whose subject is the source.
      remedy: advice to the user.
    """

    def __init__(self, source: str, reason: str, remedy: str):
        super().__init__(f"{source} {reason}: {remedy}")
        self.source, self.reason, self.remedy = source, reason, remedy


class _AnonymousReadRefused(DownloadError):
    """A bucket refuses anonymous reads, or does not reveal whether the object exists."""


def download(
    source: str,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    local_only: bool = False,
) -> pathlib.Path | epath.Path:
    """Downloads https://... or gs://bucket/file, which never change, unless cached.

    A bucket is first read anonymously. If that is refused and the `gcs` extra is
    installed, the user's credentials are tried. They come second because gcsfs takes a
    minute and a half to notice that there is no network.

    Returns:
      The cached file, or the path of a folder in a bucket, such as a workdir.

    Raises:
      DownloadError: the file cannot be downloaded, or has another hash.
      UserError: the source does not name a file, or the cache cannot be written.
    """
    url = source
    if source.startswith("gs://"):
        source = source.rstrip("/")
        name = source.removeprefix("gs://")
        if "/" not in name:
            raise UserError(f"{source} is a whole bucket: give gs://bucket/file")
        # Google's clients read this variable, which names an emulator.
        server = os.environ.get("STORAGE_EMULATOR_HOST")
        url = f"{server or 'https://storage.googleapis.com'}/{quote(name)}"
    path = _cache_path(url, cache_dir)
    if is_complete(path, sha256):
        return path
    if local_only:
        reason = f"is not in the cache ({path})"
        raise DownloadError(source, reason, "fetch it first")
    try:
        _store(path, _receive(url, source), source, sha256)
    except _AnonymousReadRefused as refused:
        return _read_with_credentials(source, path, sha256, refused)
    return path


def file_hash(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_complete(path: pathlib.Path, sha256: str = "") -> bool:
    """Returns whether a file exists and its hash starts as expected."""
    return path.is_file() and (not sha256 or file_hash(path).startswith(sha256.lower()))


def check_hash(source: str, actual: str, expected: str, remedy: str) -> None:
    """Raises DownloadError unless a SHA-256 starts as expected."""
    if not actual.startswith(expected):
        reason = f"has the SHA-256 {actual}, not {expected}"
        raise DownloadError(source, reason, remedy)


def one_line(error: BaseException) -> str:
    """Returns the start of an error's text, without line breaks."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def not_written(path: str | os.PathLike, error: OSError) -> UserError:
    """Returns the error for a cache that cannot be written."""
    return UserError(
        f"{path} cannot be written ({error.strerror or one_line(error)}): free "
        "space, or choose another cache folder with VIT_JAX_CACHE (hf://: HF_HOME)"
    )


def _cache_path(url: str, cache_dir: str | os.PathLike | None) -> pathlib.Path:
    """Returns the cache path for a URL: host, then path."""
    folder = cache_dir or files.cache_folder()
    parts = urlsplit(url)
    steps = [s for s in parts.path.split("/") if s]
    if not parts.hostname or not steps or ".." in steps or parts.path.endswith("/"):
        raise UserError(f"{url} names no file: give the address of one")
    host = parts.netloc.rpartition("@")[2]  # Without the password.
    if parts.query:  # It may be long, or contain a key.
        host += f"/{hashlib.sha256(parts.query.encode()).hexdigest()[:16]}"
    return pathlib.Path(folder).expanduser() / host / pathlib.Path(*steps)


def _store(
    path: pathlib.Path, chunks: Iterable[bytes], source: str, sha256: str
) -> None:
    """Writes a file that appears under its name when it is complete and verified."""
    from huggingface_hub.utils import WeakFileLock

    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(path.with_name(path.name + ".lock")):
            if is_complete(path, sha256):
                return
            try:
                with part.open("wb") as sink:
                    sink.writelines(chunks)
                if sha256:
                    remedy = "it was deleted; fetch it again, or correct the hash"
                    check_hash(source, file_hash(part), sha256, remedy)
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise not_written(path, error) from error


def _receive(url: str, source: str) -> Iterator[bytes]:
    """Yields the content of a URL.

    All servers are accessed with the HTTP client of huggingface_hub: it is a dependency
    anyway, and users configure proxies, certificates and HF_HUB_OFFLINE for it.
    """
    import httpx2
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    received = 0
    try:
        with get_session().stream(
            "GET",
            url,
            headers={"Accept-Encoding": "identity"},
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response:
            if response.is_error:
                raise _refusal(source, response.status_code)
            total = int(response.headers.get("Content-Length", 0)) or None
            with progress.bar(total, source.rpartition("/")[2], "B") as bar:
                for chunk in response.iter_bytes():
                    received += len(chunk)
                    bar.update(len(chunk))
                    yield chunk
    except httpx2.InvalidURL as error:
        reason = f"is not a URL ({one_line(error)})"
        raise DownloadError(source, reason, "correct it") from error
    except (httpx2.RequestError, OfflineModeIsEnabled) as error:
        why = one_line(error)
        if isinstance(error, OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE is set"
        reason = f"is not in the cache and cannot be reached ({why})"
        if received:
            reason = f"stopped after {received} bytes ({why})"
        remedy = f"open {url} in a browser and give the path of the saved file"
        raise DownloadError(source, reason, remedy) from error


def _refusal(source: str, status: int) -> DownloadError:
    """Returns the error for a response of status 400 or more."""
    if not source.startswith("gs://"):
        reason = {404: "does not exist", 401: "is refused", 403: "is refused"}
        return DownloadError(
            source,
            f"{reason.get(status, 'is not available')} ({status})",
            "check the address, or give the path of a copy",
        )
    if status in (401, 403):
        copies = mirrors.copies(source)
        remedy = "`gcloud auth application-default login` and the gcs extra may help"
        remedy += f"; copies: {', '.join(copies)}" if copies else ""
        reason = f"refuses anonymous reads ({status})"
        return _AnonymousReadRefused(source, reason, remedy)
    if status == 404:
        remedy = "check the name; a folder needs pip install -e '.[gcs]' in the clone"
        return _AnonymousReadRefused(source, "does not exist as a file (404)", remedy)
    return DownloadError(source, f"is not available ({status})", "try again later")


def _read_with_credentials(
    source: str, path: pathlib.Path, sha256: str, refused: _AnonymousReadRefused
) -> pathlib.Path | epath.Path:
    """Returns an object or folder that an anonymous read could not get."""
    remote = _remote_path(source)
    if remote is None:
        raise refused
    try:
        is_folder, exists = remote.is_dir(), remote.exists()
    except Exception as error:  # gcsfs raises the exceptions of four libraries.
        reason = f"{refused.reason}; with credentials: {one_line(error)}"
        raise DownloadError(source, reason, refused.remedy) from error
    if is_folder:
        return remote
    if not exists:
        raise refused
    _store(path, _read(remote, source), source, sha256)
    return path


def _remote_path(source: str) -> epath.Path | None:
    """Returns a path that reads with credentials, if the library for it is installed."""
    installed = any(importlib.util.find_spec(n) for n in ("gcsfs", "tensorflow"))
    return epath.Path(source) if installed else None


def _read(remote: epath.Path, source: str) -> Iterator[bytes]:
    try:
        with remote.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except Exception as error:
        reason = f"stopped ({one_line(error)})"
        raise DownloadError(source, reason, "try again later") from error

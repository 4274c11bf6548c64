"""Downloads over https:// and from gs:// buckets: resumed, verified and cached."""

import functools
import hashlib
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import quote, urlsplit

from etils import epath

from vit_jax import progress
from vit_jax.errors import UserError
from vit_jax.weights.hub import mirrors

_CHUNK_BYTES = 2**24
_RETRY_SECONDS = (1.0, 5.0, 20.0)  # Before retries of requests that brought no bytes.


class DownloadError(UserError):
    """A source that could not be downloaded.

    Args:
      source: as the user named it.
      reason: predicate of a sentence with the source as its subject.
      remedy: what the user can do about it.
    """

    def __init__(self, source: str, reason: str, remedy: str):
        super().__init__(f"{source} {reason}: {remedy}")
        self.source, self.reason, self.remedy = source, reason, remedy


def download_url(
    url: str,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    local_only: bool = False,
) -> pathlib.Path:
    """Downloads a file unless it is cached.

    Args:
      url: of the file, whose content is assumed never to change.
      sha256: hash of the content, or its beginning.
      cache_dir: $VIT_JAX_CACHE or ~/.cache/vit_jax if None.
      local_only: make no request.

    Returns:
      The file in the cache.

    Raises:
      DownloadError: the file cannot be downloaded, or has another hash.
    """

    def refuse(response):
        status = response.status_code
        reason = {404: "is not there", 401: "is refused", 403: "is refused"}
        raise DownloadError(
            url,
            f"{reason.get(status, 'is not given')} ({status})",
            "check the address, or give the path of a copy",
        )

    path = _cache_path(url, cache_dir)
    if not is_complete(path, sha256):
        if local_only:
            raise _not_cached(url, path)
        download_http(url, path, source=url, refuse=refuse, expected_hash=sha256)
    return path


def download_gcs(
    source: str,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    local_only: bool = False,
) -> pathlib.Path | epath.Path:
    """Downloads a file from a bucket unless it is cached.

    The read is anonymous first. Where that is refused and the `gcs` extra is installed,
    the user's credentials are tried. (In that order, because gcsfs takes a minute and a
    half to notice that there is no network.) A folder, such as the workdir of a run, is
    not copied.

    Args:
      source: gs://bucket/name.
      sha256: hash of the content, or its beginning.
      cache_dir: $VIT_JAX_CACHE or ~/.cache/vit_jax if None.
      local_only: make no request.

    Returns:
      The file in the cache, or the folder in the bucket.

    Raises:
      DownloadError: the file cannot be downloaded, or has another hash.
    """
    source = source.rstrip("/")
    if "/" not in source.removeprefix("gs://"):
        raise UserError(f"{source} is a whole bucket: give gs://bucket/file")
    # Google's own clients honour this variable, which names an emulator.
    server = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    url = f"{server}/{quote(source.removeprefix('gs://'))}"
    path = _cache_path(url, cache_dir)
    if is_complete(path, sha256):
        return path
    if local_only:
        raise _not_cached(source, path)

    def refuse(response):
        raise _gcs_error(source, response.status_code)

    try:
        download_http(url, path, source=source, refuse=refuse, expected_hash=sha256)
    except _AnonymousReadRefused as refused:
        return _read_with_credentials(source, path, sha256, refused)
    return path


def download_http(
    url: str,
    path: pathlib.Path,
    *,
    source: str,
    refuse: Callable,
    expected_hash: str = "",
    git: bool = False,
    immutable: bool = False,
    lock: pathlib.Path | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Downloads a file, resuming an interrupted download.

    The HTTP client is that of huggingface_hub for every server: it is a dependency
    anyway, and users configure proxies, certificates and HF_HUB_OFFLINE there.

    Args:
      url: of the file.
      path: of the complete file.
      source: where the content comes from, for messages.
      refuse: called with a response of status 400 or more; raises.
      expected_hash: hash of the content, or its beginning; not checked if empty.
      git: whether the hash is the one that git gives a blob.
      immutable: whether the content at this URL can never change.
      lock: file that processes lock; beside `path` if None.
      headers: additional request headers.

    Raises:
      DownloadError: the content did not arrive completely, or has another hash.
      UserError: the folder cannot be written.
    """
    receive = functools.partial(
        _receive,
        url,
        source=source,
        refuse=refuse,
        immutable=immutable,
        headers=headers or {},
    )
    write_verified(
        path, receive, source=source, expected_hash=expected_hash, git=git, lock=lock
    )


def write_verified(
    path: pathlib.Path,
    receive: Callable[[pathlib.Path], None],
    *,
    source: str,
    expected_hash: str = "",
    git: bool = False,
    lock: pathlib.Path | None = None,
) -> None:
    """Fills a partial file beside `path` and renames it once it is complete.

    One process at a time works on a file; the waiting ones find it complete.

    Args:
      path: of the complete file.
      receive: called with the path of the partial file, which may hold a beginning.
      source: where the content comes from, for messages.
      expected_hash: hash of the content, or its beginning; not checked if empty.
      git: whether the hash is the one that git gives a blob.
      lock: file that processes lock; beside `path` if None.

    Raises:
      DownloadError: the content has another hash; it is deleted.
      UserError: the folder cannot be written.
    """
    from huggingface_hub.utils import WeakFileLock

    part = path.with_name(path.name + ".part")
    lock = lock or path.with_name(path.name + ".lock")
    try:
        for folder in (path.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if is_complete(path, expected_hash, git=git):
                return
            receive(part)
            if not is_complete(part, expected_hash, git=git):
                found = file_hash(part, git=git)
                _discard(part)
                raise DownloadError(
                    source,
                    f"has the {'SHA-1' if git else 'SHA-256'} {found}, not "
                    f"{expected_hash}",
                    "it was deleted; fetch it again, or correct the hash",
                )
            os.replace(part, path)
            _etag_path(part).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or one_line(error)}): free "
            "space, or choose another cache folder by VIT_JAX_CACHE (hf://: HF_HOME)"
        ) from error


def file_hash(path: pathlib.Path, *, git: bool = False) -> str:
    """Returns the SHA-256 of a file, or the SHA-1 that git gives its content."""
    with path.open("rb") as stream:
        if not git:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        head = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: head).hexdigest()


def is_complete(
    path: pathlib.Path, expected_hash: str = "", *, git: bool = False
) -> bool:
    """Returns whether a file exists and its hash begins as expected."""
    return path.is_file() and (
        not expected_hash or file_hash(path, git=git).startswith(expected_hash.lower())
    )


def one_line(error: BaseException) -> str:
    """Returns the text of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _receive(url: str, part: pathlib.Path, *, source: str, **options) -> None:
    """Calls `_stream` until the file is complete or no more bytes arrive."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    waits, most, progressed = iter(_RETRY_SECONDS), _size(part), False
    while True:
        try:
            if _stream(url, part, source=source, **options):
                return
        except OfflineModeIsEnabled as error:
            raise _unreachable(source, url, "HF_HUB_OFFLINE is set") from error
        except (httpx2.TransportError, httpx2.TooManyRedirects) as error:
            size = _size(part)
            if size > most:
                most, progressed, waits = size, True, iter(_RETRY_SECONDS)
                continue
            wait = next(waits, None)
            if not progressed:  # No connection at all: waiting would not help the user.
                raise _unreachable(source, url, one_line(error)) from error
            if wait is None:
                raise DownloadError(
                    source,
                    f"broke off after {size} bytes ({one_line(error)})",
                    "start again later; it resumes from there",
                ) from error
            time.sleep(wait)
        except httpx2.InvalidURL as error:
            raise DownloadError(
                source, f"is no URL ({one_line(error)})", "correct it"
            ) from error


def _unreachable(source: str, url: str, why: str) -> DownloadError:
    return DownloadError(
        source,
        f"is not in the cache and cannot be reached ({why})",
        f"open {url} in a browser and give the path of what you saved",
    )


def _stream(
    url: str,
    part: pathlib.Path,
    *,
    source: str,
    refuse: Callable,
    immutable: bool,
    headers: Mapping[str, str],
) -> bool:
    """Sends a request, writes its body; returns whether the file is complete."""
    from huggingface_hub import constants, get_session

    have, etag_path = _size(part), _etag_path(part)
    stored = etag_path.read_text() if etag_path.exists() else ""
    request_headers = {**headers, "Accept-Encoding": "identity"}
    if have and (immutable or stored):
        request_headers["Range"] = f"bytes={have}-"
        if not immutable:  # The server sends all of a file that has changed since.
            request_headers["If-Range"] = stored
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream(
        "GET", url, headers=request_headers, timeout=timeout
    ) as response:
        span = response.headers.get("Content-Range", "")
        resumes = response.status_code == 206 and span.startswith(f"bytes {have}-")
        resumes = resumes and (immutable or _validator(response.headers) == stored)
        if response.status_code == 416 and span == f"bytes */{have}":
            return True  # Everything had arrived when the process was interrupted.
        if (
            "Range" in request_headers
            and response.status_code in (206, 416)
            and not resumes
        ):
            _discard(part)  # The partial file is not a beginning of the remote one.
            return False
        if response.is_error:
            response.read()
            refuse(response)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise DownloadError(
                source, "comes compressed", "download it with a browser"
            )
        length = response.headers.get("Content-Length")
        start = have if resumes else 0
        total = None if length is None else start + int(length)
        bar = progress.bar(total, source.rpartition("/")[2], "B", initial=start)
        with part.open("ab" if resumes else "wb") as stream, bar:
            if not resumes:
                etag_path.write_text(_validator(response.headers))
            # Unbuffered, so that an interruption loses nothing.
            for chunk in response.iter_raw():
                stream.write(chunk)
                bar.update(len(chunk))
    return total is None or _size(part) == total


def _validator(headers: Mapping[str, str]) -> str:
    """Returns a strong ETag or the modification date of a response, or ""."""
    etag = headers.get("ETag", "W/")
    # If-Range accepts strong ETags only.
    return headers.get("Last-Modified", "") if etag.startswith("W/") else etag


def _size(part: pathlib.Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _etag_path(part: pathlib.Path) -> pathlib.Path:
    """Returns the path that stores the ETag of a partial file."""
    return part.with_name(part.name + ".etag")


def _discard(part: pathlib.Path) -> None:
    """Deletes a partial file and its ETag."""
    part.unlink(missing_ok=True)
    _etag_path(part).unlink(missing_ok=True)


class _AnonymousReadRefused(DownloadError):
    """A bucket refuses an anonymous read, or hides whether the object exists."""


def _gcs_error(source: str, status: int) -> DownloadError:
    if status in (401, 403):
        copies = mirrors.copies(source)
        remedy = "`gcloud auth application-default login` and the gcs extra may help"
        remedy += f"; copies: {', '.join(copies)}" if copies else ""
        reason = f"refuses anonymous reads ({status})"
        return _AnonymousReadRefused(source, reason, remedy)
    if status == 404:
        remedy = "check the name; a folder needs pip install -e '.[gcs]' in the clone"
        return _AnonymousReadRefused(source, "is not a file there (404)", remedy)
    return DownloadError(source, f"is not given ({status})", "try again later")


def _read_with_credentials(
    source: str, path: pathlib.Path, sha256: str, refused: _AnonymousReadRefused
) -> pathlib.Path | epath.Path:
    """Returns an object that an anonymous read could not get, or its folder."""
    remote = _remote_path(source)
    if remote is None:
        raise refused
    try:
        if remote.is_dir():
            return remote
        if not remote.exists():
            raise refused
        _copy(remote, path, source, sha256)
    except UserError:
        raise
    except Exception as error:  # gcsfs raises the exceptions of four libraries.
        reason = f"{refused.reason}; with credentials: {one_line(error)[:200]}"
        raise _AnonymousReadRefused(source, reason, refused.remedy) from error
    return path


def _remote_path(source: str) -> epath.Path | None:
    """Returns a path that reads with credentials, if a library for it is installed."""
    found = any(importlib.util.find_spec(n) for n in ("gcsfs", "tensorflow"))
    return epath.Path(source) if found else None


def _copy(remote: epath.Path, path: pathlib.Path, source: str, sha256: str) -> None:
    def receive(part: pathlib.Path) -> None:
        with part.open("wb") as sink:
            for chunk in _read_chunks(remote, source):
                sink.write(chunk)

    write_verified(path, receive, source=source, expected_hash=sha256)


def _read_chunks(remote: epath.Path, source: str) -> Iterator[bytes]:
    try:
        with remote.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except Exception as error:
        raise DownloadError(
            source, f"broke off ({one_line(error)[:200]})", "try again later"
        ) from error


def _cache_path(url: str, cache_dir: str | os.PathLike | None) -> pathlib.Path:
    """Returns the path of a URL's content in the cache: host, then path."""
    folder = cache_dir or os.environ.get("VIT_JAX_CACHE") or "~/.cache/vit_jax"
    parts = urlsplit(url)
    steps = [s for s in parts.path.split("/") if s]
    if not parts.hostname or not steps or ".." in steps or parts.path.endswith("/"):
        raise UserError(f"{url} names no file: give the address of one")
    host = parts.netloc.rpartition("@")[2]  # Without a password.
    if parts.query:  # It may be long, or hold a key.
        host += f"/{hashlib.sha256(parts.query.encode()).hexdigest()[:16]}"
    return pathlib.Path(folder).expanduser() / host / pathlib.Path(*steps)


def _not_cached(source: str, path: pathlib.Path) -> DownloadError:
    return DownloadError(source, f"is not in the cache ({path})", "fetch it first")

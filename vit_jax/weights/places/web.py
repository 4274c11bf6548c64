"""Weights at https:// and gs:// places."""

import hashlib
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

from etils import epath

from vit_jax.errors import UserError
from vit_jax.weights.places import cache, mirrors, transfer

_PIECE = 2**24  # Bytes.


def fetch_url(
    url: str,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    local_only: bool = False,
) -> pathlib.Path:
    """Downloads a file unless the cache has it.

    Args:
      url: of the file; what it holds is taken to stay the same.
      sha256: hash of the content, or its beginning.
      cache_dir: of the downloads; $VIT_JAX_CACHE or ~/.cache/vit_jax if None.
      local_only: make no request.

    Returns:
      The file in the cache.

    Raises:
      FetchError: it cannot be had, or its hash is another.
    """

    def refuse(response):
        status = response.status_code
        reason = {404: "is not there", 401: "is refused", 403: "is refused"}
        raise cache.FetchError(
            url,
            f"{reason.get(status, 'is not given')} ({status})",
            "check the address, or give the path of a copy",
        )

    path = _kept_at(url, cache_dir)
    if not cache.is_whole(path, sha256):
        if local_only:
            raise _not_cached(url, path)
        transfer.over_http(url, path, place=url, refuse=refuse, wanted=sha256)
    return path


def fetch_object(
    place: str,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    local_only: bool = False,
) -> pathlib.Path | epath.Path:
    """Copies a file out of a bucket unless the cache has it.

    The read is anonymous; where that is refused and the `gcs` extra is installed, with
    the user's credentials. (In that order, because gcsfs takes a minute and a half to
    see that there is no network.) A folder, such as a run's workdir, is not copied.

    Args:
      place: gs://bucket/name.
      sha256: hash of the content, or its beginning.
      cache_dir: of the downloads; $VIT_JAX_CACHE or ~/.cache/vit_jax if None.
      local_only: make no request.

    Returns:
      The file in the cache, or the folder in the bucket.

    Raises:
      FetchError: it cannot be had, or its hash is another.
    """
    place = place.rstrip("/")
    if "/" not in place.removeprefix("gs://"):
        raise UserError(f"{place} is a whole bucket: give gs://bucket/file")
    # The variable that Google's own clients honour, for servers that stand in.
    server = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    url = f"{server}/{quote(place.removeprefix('gs://'))}"
    path = _kept_at(url, cache_dir)
    if cache.is_whole(path, sha256):
        return path
    if local_only:
        raise _not_cached(place, path)

    def refuse(response):
        raise _refused(place, response.status_code)

    try:
        transfer.over_http(url, path, place=place, refuse=refuse, wanted=sha256)
    except _Refused as refused:
        return _with_credentials(place, path, sha256, refused)
    return path


class _Refused(cache.FetchError):
    """An anonymous read is refused, or shows nothing."""


def _refused(place: str, status: int) -> cache.FetchError:
    if status in (401, 403):
        others = mirrors.copies(place)
        remedy = "`gcloud auth application-default login` and the gcs extra may help"
        remedy += f"; copies: {', '.join(others)}" if others else ""
        return _Refused(place, f"refuses anonymous reads ({status})", remedy)
    if status == 404:
        remedy = "check the name; a folder needs pip install -e '.[gcs]' in the clone"
        return _Refused(place, "is not a file there (404)", remedy)
    return cache.FetchError(place, f"is not given ({status})", "try again later")


def _with_credentials(
    place: str, path: pathlib.Path, sha256: str, refused: _Refused
) -> pathlib.Path | epath.Path:
    """Returns what the user's credentials give of what an anonymous read did not."""
    remote = _remote(place)
    if remote is None:
        raise refused
    try:
        if remote.is_dir():
            return remote
        if not remote.exists():
            raise refused
        _copy(remote, path, place, sha256)
    except UserError:
        raise
    except Exception as error:  # gcsfs raises those of four libraries.
        reason = f"{refused.reason}; with credentials: {cache.one_line(error)[:200]}"
        raise _Refused(place, reason, refused.remedy) from error
    return path


def _remote(place: str) -> epath.Path | None:
    """Returns a path that reads with credentials, if a library is there that can."""
    found = any(importlib.util.find_spec(n) for n in ("gcsfs", "tensorflow"))
    return epath.Path(place) if found else None


def _copy(remote: epath.Path, path: pathlib.Path, place: str, sha256: str) -> None:
    def receive(part: pathlib.Path) -> None:
        with part.open("wb") as sink:
            for piece in _pieces(remote, place):
                sink.write(piece)

    cache.land(path, receive, place=place, wanted=sha256)


def _pieces(remote: epath.Path, place: str) -> Iterator[bytes]:
    try:
        with remote.open("rb") as source:
            while piece := source.read(_PIECE):
                yield piece
    except Exception as error:
        raise cache.FetchError(
            place, f"broke off ({cache.one_line(error)[:200]})", "try again later"
        ) from error


def _kept_at(url: str, cache_dir: str | os.PathLike | None) -> pathlib.Path:
    """Returns where the cache keeps a URL's content: host, then path."""
    folder = cache_dir or os.environ.get("VIT_JAX_CACHE") or "~/.cache/vit_jax"
    parts = urlsplit(url)
    steps = [s for s in parts.path.split("/") if s]
    if not parts.hostname or not steps or ".." in steps or parts.path.endswith("/"):
        raise UserError(f"{url} names no file: give the address of one")
    host = parts.netloc.rpartition("@")[2]  # Without a password.
    if parts.query:  # It may be long, or hold a key.
        host += f"/{hashlib.sha256(parts.query.encode()).hexdigest()[:16]}"
    return pathlib.Path(folder).expanduser() / host / pathlib.Path(*steps)


def _not_cached(place: str, path: pathlib.Path) -> cache.FetchError:
    return cache.FetchError(place, f"is not in the cache ({path})", "fetch it first")

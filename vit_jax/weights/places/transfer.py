"""Downloads that go on where an earlier attempt broke off."""

import functools
import pathlib
import time
from collections.abc import Callable, Mapping

from vit_jax.weights.places import cache

_WAITS = (1.0, 5.0, 20.0)  # Seconds between attempts that bring nothing new.


def over_http(
    url: str,
    path: pathlib.Path,
    *,
    place: str,
    refuse: Callable,
    wanted: str = "",
    git: bool = False,
    fixed: bool = False,
    lock: pathlib.Path | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Downloads a file, going on where an earlier attempt broke off.

    The HTTP client is the one of huggingface_hub, for hubs and other servers alike: it
    comes with that package, and users set proxies, certificates and HF_HUB_OFFLINE
    there.

    Args:
      url: of the file.
      path: of the file to be.
      place: where the content is from, for messages.
      refuse: called with a response of status 400 or more; raises.
      wanted: hash of the content, or its beginning; not checked if empty.
      git: whether the hash is git's.
      fixed: whether the content at this URL can never change.
      lock: file that processes lock; beside `path` if None.
      headers: more request headers.

    Raises:
      FetchError: nothing or not everything came, or with another hash.
      UserError: the folder cannot be written.
    """
    receive = functools.partial(
        _receive,
        url,
        place=place,
        refuse=refuse,
        fixed=fixed,
        headers=headers or {},
    )
    cache.land(path, receive, place=place, wanted=wanted, git=git, lock=lock)


def _receive(url: str, part: pathlib.Path, *, place: str, **how) -> None:
    """Calls `_stream` until the file is whole or nothing more comes."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    waits, most, began = iter(_WAITS), _size(part), False
    while True:
        try:
            if _stream(url, part, place=place, **how):
                return
        except OfflineModeIsEnabled as error:
            raise unreachable(place, url, "HF_HUB_OFFLINE is set") from error
        except (httpx2.TransportError, httpx2.TooManyRedirects) as error:
            size = _size(part)
            if size > most:
                most, began, waits = size, True, iter(_WAITS)
                continue
            wait = next(waits, None)
            if not began:  # Not even a connection: the user should not wait.
                raise unreachable(place, url, cache.one_line(error)) from error
            if wait is None:
                raise cache.FetchError(
                    place,
                    f"broke off after {size} bytes ({cache.one_line(error)})",
                    "start again later; it goes on from there",
                ) from error
            time.sleep(wait)
        except httpx2.InvalidURL as error:
            raise cache.FetchError(
                place, f"is no URL ({cache.one_line(error)})", "correct it"
            ) from error


def unreachable(place: str, url: str, why: str) -> cache.FetchError:
    """Returns the error of a place that is neither in the cache nor within reach."""
    return cache.FetchError(
        place,
        f"is not in the cache and cannot be reached ({why})",
        f"open {url} in a browser and give the path of what you saved",
    )


def _stream(
    url: str,
    part: pathlib.Path,
    *,
    place: str,
    refuse: Callable,
    fixed: bool,
    headers: Mapping[str, str],
) -> bool:
    """Makes one request and writes what comes; returns whether that was the rest."""
    from huggingface_hub import constants, get_session
    from tqdm import tqdm

    have, tag = _size(part), cache.tag_of(part)
    mark = tag.read_text() if tag.exists() else ""
    ask = {**headers, "Accept-Encoding": "identity"}
    if have and (fixed or mark):
        ask["Range"] = f"bytes={have}-"
        if not fixed:  # The server sends all of a file that has changed since.
            ask["If-Range"] = mark
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=ask, timeout=timeout) as response:
        span = response.headers.get("Content-Range", "")
        goes_on = response.status_code == 206 and span.startswith(f"bytes {have}-")
        goes_on = goes_on and (fixed or _mark(response.headers) == mark)
        if response.status_code == 416 and span == f"bytes */{have}":
            return True  # All had come, but the process ended before the renaming.
        if "Range" in ask and response.status_code in (206, 416) and not goes_on:
            cache.discard(part)  # What is here does not fit what is there.
            return False
        if response.is_error:
            response.read()
            refuse(response)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise cache.FetchError(
                place, "comes compressed", "download it with a browser"
            )
        length = response.headers.get("Content-Length")
        start = have if goes_on else 0
        total = None if length is None else start + int(length)
        bar = tqdm(
            desc=place.rpartition("/")[2],
            initial=start,
            total=total,
            unit="B",
            unit_scale=True,
            disable=None,  # Shown on terminals only.
        )
        with part.open("ab" if goes_on else "wb") as stream, bar:
            if not goes_on:
                tag.write_text(_mark(response.headers))
            # Raw, as it comes: nothing is lost in a buffer.
            for chunk in response.iter_raw():
                stream.write(chunk)
                bar.update(len(chunk))
    return total is None or _size(part) == total


def _mark(headers: Mapping[str, str]) -> str:
    """Returns what tells whether a file on a server is still the same, if anything."""
    etag = headers.get("ETag", "W/")
    # If-Range takes strong tags only.
    return headers.get("Last-Modified", "") if etag.startswith("W/") else etag


def _size(part: pathlib.Path) -> int:
    return part.stat().st_size if part.exists() else 0

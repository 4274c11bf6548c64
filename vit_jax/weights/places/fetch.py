"""From a place that names weights to a file or folder at hand."""

import logging
import os
import pathlib
import re
from collections.abc import Callable

from etils import epath

from vit_jax import files
from vit_jax.errors import UserError
from vit_jax.weights.places import cache, hub, mirrors, web

_FORMS = (
    "the workdir of a finished run, a file or folder with weights, "
    "hf://owner/name[@revision][/file], timm/name, https://..., gs://bucket/file"
)
_HASH = "#sha256="


def fetch(
    place: str | os.PathLike,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    say: Callable[[str], None] | None = None,
) -> pathlib.Path | epath.Path:
    """Gets published weights to where they can be read.

    What was downloaded once is taken from the cache: the hub's for hf:// places,
    $VIT_JAX_CACHE or ~/.cache/vit_jax for the others. Downloads that broke off go on
    where they were, and are checked before they count.

    Args:
      place: a path; hf://owner/name[@revision][/file] or timm/name, its short form;
        https://... or gs://bucket/file; or a name of `mirrors`, such as augreg:B/16,
        whose places are tried in turn. A URL may end in #sha256=...
      sha256: hash of the file, or its beginning (8 digits or more).
      cache_dir: takes the place of both caches.
      say: called with a line on what a place turned out to be; logged if None.

    Returns:
      A local file or folder, or a folder in a bucket (a run's workdir).

    Raises:
      UserError: no such place, or it cannot be had, or its hash is another.
    """
    place = os.fspath(place)
    say = say or logging.getLogger(__name__).info
    sha256 = _checked(sha256)
    local = pathlib.Path(place).expanduser()
    try:
        here = bool(place) and local.exists()
    except OSError as error:  # As its name is too long.
        raise UserError(f"{place} cannot be read: {error.strerror}") from error
    if here:
        files.check("weights", place)
        if sha256 and not cache.is_whole(local, sha256):
            found = "a folder" if local.is_dir() else f"of {cache.digest(local)}"
            raise UserError(f"{place} is {found}, not of the SHA-256 {sha256}")
        return local
    family, colon, _ = place.partition(":")
    if colon and family in mirrors.families():
        if sha256:
            raise UserError(
                f"{place} stands for several files, of different hashes: leave out the "
                "SHA-256, or name a place"
            )
        return _first_of(place, family, cache_dir, say)
    return _from(place, sha256, cache_dir, say)


def _first_of(
    name: str,
    family: str,
    cache_dir: str | os.PathLike | None,
    say: Callable[[str], None],
) -> pathlib.Path | epath.Path:
    """Returns what the first place of a name gives, cached ones before the others."""
    places = mirrors.places(name)
    if not places:
        raise UserError(f"{name!r} is none of {', '.join(mirrors.names(family))}")
    reasons = {}
    for local_only in (True, False):
        for place in places:
            try:
                path = _from(place, "", cache_dir, say, local_only=local_only)
            except cache.FetchError as error:
                reasons[place] = error.reason
            else:
                say(f"{name}: from {place}")
                return path
    tried = "; ".join(f"{place} {reason}" for place, reason in reasons.items())
    raise UserError(
        f"{name} is to be had at none of its places ({tried}): try again later, or "
        "open one of them in a browser and give the path of what you saved"
    )


def _from(
    place: str,
    sha256: str,
    cache_dir: str | os.PathLike | None,
    say: Callable[[str], None],
    *,
    local_only: bool = False,
) -> pathlib.Path | epath.Path:
    """Returns what is at one place."""
    if place.startswith("timm/"):
        place = f"hf://{place}"
    place, mark, given = place.partition(_HASH)
    if mark:
        given = _checked(given, missing=True)
        if not given.startswith(sha256) and not sha256.startswith(given):
            raise UserError(f"{place} is given two SHA-256: {given} and {sha256}")
        sha256 = max(given, sha256, key=len)
    scheme, separator, _ = place.partition("://")
    how = {"sha256": sha256, "cache_dir": cache_dir, "local_only": local_only}
    if scheme == "hf" or (separator and hub.is_page(place)):
        path = hub.fetch(place, **how)
    elif separator and scheme in ("http", "https"):
        path = web.fetch_url(place, **how)
    elif separator and scheme == "gs":
        path = web.fetch_object(place, **how)
    else:
        examples = ", ".join(mirrors.names(f)[0] for f in mirrors.families())
        raise UserError(
            f"{place!r} is not here and is no place that weights come from: give "
            f"{_FORMS}, or a name such as {examples}"
        )
    say(f"{place}: {path}")
    return path


def _checked(sha256: str, *, missing: bool = False) -> str:
    """Returns a hash in lower case; "" stays unless it must not be missing."""
    sha256 = sha256.lower()
    if (sha256 or missing) and not re.fullmatch("[0-9a-f]{8,64}", sha256):
        raise UserError(
            f"{sha256!r} is no SHA-256: give its 64 hexadecimal digits, or the first 8 "
            "or more"
        )
    return sha256

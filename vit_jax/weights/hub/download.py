"""Downloads, verifies and caches published weights by name or address."""

import logging
import os
import pathlib
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from etils import epath

from vit_jax.command_line import files
from vit_jax.errors import UserError
from vit_jax.weights.hub import hugging_face_hub, mirrors, urls

_FORMS = (
    "the workdir of a finished run, a file or folder with weights, "
    "hf://owner/name[@revision][/file], timm/name, https://..., gs://bucket/file"
)
_HASH = "#sha256="


def download(
    source: str | os.PathLike,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    log: Callable[[str], None] | None = None,
) -> pathlib.Path | epath.Path:
    """Returns a readable path to published weights, downloading them if necessary.

    Downloads are cached: hf:// sources in the cache of huggingface_hub, all others
    under $VIT_JAX_CACHE or ~/.cache/vit_jax. A file enters the cache when it is
    complete.

    Args:
      source: a path; hf://owner/name[@revision][/file], or timm/name as a short form of
        it; https://... or gs://bucket/file; or a name of `mirrors`, such as
        augreg:B/16, whose mirrors are tried in turn. A URL may end in #sha256=...
      sha256: expected hash of the file, or at least its first 8 digits.
      cache_dir: folder that replaces both caches.
      log: function called with one line per resolved source; `logging.info` if None.

    Returns:
      A local file or folder, or a folder in a bucket (the workdir of a run).

    Raises:
      UserError: the source does not exist, cannot be downloaded, or has another hash.
    """
    source = os.fspath(source)
    log = log or logging.getLogger(__name__).info
    sha256 = _check_hash(sha256)
    local = pathlib.Path(source).expanduser()
    try:
        exists = bool(source) and local.exists()
    except OSError as error:  # For example, the name is too long.
        raise UserError(f"{source} cannot be read: {error.strerror}") from error
    if exists:
        files.check("weights", source)
        if sha256 and not urls.is_complete(local, sha256):
            what = "a folder" if local.is_dir() else f"of {urls.file_hash(local)}"
            raise UserError(f"{source} is {what}, not of the SHA-256 {sha256}")
        return local
    family, colon, _ = source.partition(":")
    if colon and family in mirrors.families():
        if sha256:
            raise UserError(
                f"{source} stands for several files with different hashes: leave out "
                "the SHA-256, or give the URL of one"
            )
        return _download_from_mirrors(source, family, cache_dir, log)
    return _download_from(source, sha256, cache_dir, log)


def _download_from_mirrors(
    name: str,
    family: str,
    cache_dir: str | os.PathLike | None,
    log: Callable[[str], None],
) -> pathlib.Path | epath.Path:
    """Returns the path from the first mirror that works; cached ones come first."""
    sources = mirrors.sources(name)
    if not sources:
        raise UserError(f"{name!r} is not one of {', '.join(mirrors.names(family))}")
    reasons = {}
    for local_only in (True, False):
        for source in sources:
            try:
                path = _download_from(source, "", cache_dir, log, local_only=local_only)
            except urls.DownloadError as error:
                reasons[source] = error.reason
            else:
                log(f"{name}: from {source}")
                return path
    tried = "; ".join(f"{source} {reason}" for source, reason in reasons.items())
    raise UserError(
        f"{name} could not be downloaded from any mirror ({tried}): try again later, or "
        "open one of them in a browser and give the path of the saved file"
    )


def _download_from(
    source: str,
    sha256: str,
    cache_dir: str | os.PathLike | None,
    log: Callable[[str], None],
    *,
    local_only: bool = False,
) -> pathlib.Path | epath.Path:
    """Returns the path of one source that is not a local path."""
    if source.startswith("timm/"):
        source = f"hf://{source}"
    source, mark, given = source.partition(_HASH)
    if mark:
        given = _check_hash(given, required=True)
        if not given.startswith(sha256) and not sha256.startswith(given):
            raise UserError(f"{source} is given two SHA-256: {given} and {sha256}")
        sha256 = max(given, sha256, key=len)
    try:
        host = urlsplit(source).hostname
    except ValueError as error:
        raise UserError(f"{source} is not a URL ({error}): correct it") from error
    if source.startswith("hf://") or host in hugging_face_hub.HOSTS:
        fetch = hugging_face_hub.download
    elif source.startswith(("https://", "http://", "gs://")):
        fetch = urls.download
    else:
        examples = ", ".join(mirrors.names(f)[0] for f in mirrors.families())
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
            examples += f"; on the Hugging Face hub it may be hf://{source}"
        raise UserError(
            f"{source!r} does not exist and is not an address of weights: give {_FORMS}, "
            f"or a name such as {examples}"
        )
    path = fetch(source, sha256=sha256, cache_dir=cache_dir, local_only=local_only)
    log(f"{source}: {path}")
    return path


def _check_hash(sha256: str, *, required: bool = False) -> str:
    """Returns a hash in lower case; an empty one stays empty unless required."""
    sha256 = sha256.lower()
    if (sha256 or required) and not re.fullmatch("[0-9a-f]{8,64}", sha256):
        raise UserError(
            f"{sha256!r} is not a SHA-256: give its 64 hexadecimal digits, or at least "
            "the first 8"
        )
    return sha256

"""Weights on the Hugging Face hub, through huggingface_hub and into its cache.

The library finds the revision and the files, keeps the cache and knows the token and
HF_ENDPOINT. Only the bytes of a file come by `transfer`: huggingface_hub 2.4 deletes
what a broken download left, and does not compare hashes.
"""

import glob
import os
import pathlib
import re
from typing import Any
from urllib.parse import urlsplit

from vit_jax.errors import UserError
from vit_jax.weights.places import cache, hub_cache, hub_errors, hub_files

_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")


def is_page(url: str) -> bool:
    """Tells whether a URL is of the hub's website: a page there is not the file."""
    return urlsplit(url).hostname in _HOSTS


def fetch(
    place: str,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    local_only: bool = False,
) -> pathlib.Path:
    """Downloads a file or a model's files from the hub unless its cache has them.

    One request asks which commit a branch is at; a full commit hash and what the cache
    has of it need none. Without an answer the commit that was last seen is taken.

    Args:
      place: hf://owner/name[@revision][/file], or a page of the website.
      sha256: hash of the file, or its beginning.
      cache_dir: of the hub's cache; the library's default if None.
      local_only: make no request.

    Returns:
      The file, or the folder that has the model's weights and what describes them, in
      the folder of the commit.

    Raises:
      FetchError: it cannot be had, or its hash is another.
      UserError: the place is not of a model.
    """
    uri = _parse(place)
    if sha256 and not uri.path_in_repo:
        raise UserError(
            f"{place} is a folder, but a SHA-256 is of a file: name the file"
        )
    commit, error = _commit(uri, place, cache_dir, local_only)
    # A listing of the commit's files is kept beside them: without one, what is here
    # may be incomplete, and is taken only if there is no way to know better.
    guess = local_only or error is not None or _offline()
    folder = hub_cache.find(uri, commit, place, cache_dir, guess)
    if folder is None and (local_only or error is not None):
        raise hub_errors.told(place, uri, error)
    if folder is None:
        folder = _download(uri, commit, place, sha256, cache_dir)
    hub_cache.note_commit(uri, commit, cache_dir)
    path = folder / uri.path_in_repo
    if not path.is_dir() and not cache.is_whole(path, sha256):
        raise cache.FetchError(
            place,
            f"has the SHA-256 {cache.digest(path)}, not {sha256}",
            "correct the hash, or name another revision",
        )
    return path


def _parse(place: str) -> Any:
    from huggingface_hub import parse_hf_uri
    from huggingface_hub.errors import HfUriError

    try:
        uri = parse_hf_uri(place)
    except HfUriError as error:
        raise UserError(
            f"{place} is no place on the hub ({cache.one_line(error)}): write "
            "hf://owner/name, hf://owner/name@revision or hf://owner/name/file"
        ) from error
    if uri.type != "model":
        raise UserError(
            f"{place} is a {uri.type}, not a model: name a model's repository"
        )
    return uri


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name=hub_cache.LIBRARY)


def _offline() -> bool:
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def _commit(
    uri: Any, place: str, cache_dir: str | os.PathLike | None, local_only: bool
) -> tuple[str, Exception | None]:
    """Returns a revision's commit, and the error if it is only the last one seen."""
    from huggingface_hub.errors import RevisionResolutionError

    if uri.revision and re.fullmatch("[0-9a-f]{40}", uri.revision):
        return uri.revision, None
    error = None
    if not local_only:
        try:
            return _ask(uri), None
        except hub_errors.failures() as failed:
            error = failed
    try:
        known = _api().resolve_revision(
            uri.id, revision=uri.revision, cache_dir=cache_dir, local_files_only=True
        )
    except RevisionResolutionError:
        raise hub_errors.told(place, uri, error) from error
    return known.resolved, error


def _ask(uri: Any) -> str:
    """Returns the commit that a revision is at now."""
    from huggingface_hub import constants

    # The library's other requests wait without a limit for a hub that is out of reach.
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    return _api().model_info(uri.id, revision=uri.revision, timeout=timeout).sha


def _download(
    uri: Any,
    commit: str,
    place: str,
    sha256: str,
    cache_dir: str | os.PathLike | None,
) -> pathlib.Path:
    """Brings all that is wanted of a commit into the cache; returns its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.hf_api import RepoFile
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        if uri.revision == commit:  # Else the hub has answered just now.
            _ask(uri)
        tree = _api().list_repo_tree(uri.id, recursive=True, revision=commit)
        listed = {f.path: f for f in tree if isinstance(f, RepoFile)}
        names = hub_files.wanted(list(listed), uri.path_in_repo, place)
        lfs = listed[names[0]].lfs
        if sha256 and lfs and not lfs.sha256.startswith(sha256):
            raise cache.FetchError(
                place,
                f"has the SHA-256 {lfs.sha256}, not {sha256}",
                "correct the hash, or name another revision",
            )
        for name in names:
            hub_cache.bring(uri, commit, place, listed[name], cache_dir)
        # The library finds the files where it would have put them, and links them.
        folder = snapshot_download(
            uri.id,
            revision=commit,
            cache_dir=cache_dir,
            allow_patterns=[glob.escape(name) for name in names],
            library_name=hub_cache.LIBRARY,
            tqdm_class=Silent,
        )
    except hub_errors.failures() as error:
        raise hub_errors.told(place, uri, error) from error
    return pathlib.Path(folder)

"""The cache of huggingface_hub: what it has, and how files come into it.

Layout (docs of huggingface_hub, "Understand caching"): blobs/ has contents by hash,
snapshots/<commit>/ links to them by name, refs/ has the commits of branches.
"""

import contextlib
import functools
import glob
import os
import pathlib
from typing import Any

from vit_jax.weights.places import cache, hub_errors, hub_files, transfer

LIBRARY = "vit_jax"  # In the user agent.


def find(
    uri: Any,
    commit: str,
    place: str,
    cache_dir: str | os.PathLike | None,
    guess: bool,
) -> pathlib.Path | None:
    """Returns the commit's folder if all that is wanted of it is there."""
    from huggingface_hub import errors, get_cached_repo_tree, snapshot_download

    where = {"revision": commit, "cache_dir": cache_dir}
    take = functools.partial(snapshot_download, uri.id, local_files_only=True, **where)
    try:
        try:
            listed = [f.path for f in get_cached_repo_tree(uri.id, **where)]
        except errors.CachedRepoTreeNotFoundError:
            if not guess:
                return None
            folder = pathlib.Path(take())
            files = (p for p in folder.rglob("*") if p.is_file())
            here = [p.relative_to(folder).as_posix() for p in files]
            try:
                hub_files.wanted(here, uri.path_in_repo, place)
            except cache.FetchError:
                return None
            return folder
        names = hub_files.wanted(listed, uri.path_in_repo, place)
        return pathlib.Path(take(allow_patterns=[glob.escape(n) for n in names]))
    except errors.LocalEntryNotFoundError:
        return None


def bring(
    uri: Any,
    commit: str,
    place: str,
    file: Any,
    cache_dir: str | os.PathLike | None,
) -> None:
    """Downloads one file to where the library keeps the content of that hash."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    def refuse(response):
        try:
            hf_raise_for_status(response)
        except HfHubHTTPError as error:
            raise hub_errors.told(place, uri, error) from error

    # Large files are named by SHA-256, the others by git's hash.
    name = file.lfs.sha256 if file.lfs else file.blob_id
    folder = _repository(uri, cache_dir)
    transfer.over_http(
        hf_hub_url(uri.id, file.path, revision=commit),
        folder / "blobs" / name,
        place=f"hf://{uri.id}@{commit[:8]}/{file.path}",
        refuse=refuse,
        wanted=name,
        git=not file.lfs,
        fixed=True,
        lock=folder.parent / ".locks" / folder.name / f"{name}.lock",  # The library's.
        headers=build_hf_headers(library_name=LIBRARY),
    )


def _repository(uri: Any, cache_dir: str | os.PathLike | None) -> pathlib.Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = pathlib.Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
    return folder / repo_folder_name(repo_id=uri.id, repo_type="model")


def note_commit(uri: Any, commit: str, cache_dir: str | os.PathLike | None) -> None:
    """Keeps which commit a branch is at, for when the hub cannot be asked."""
    ref = _repository(uri, cache_dir) / "refs" / (uri.revision or "main")
    if uri.revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    with contextlib.suppress(OSError):  # A cache may be read-only.
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = _repository(uri, cache_dir) / f"ref.{os.getpid()}.tmp"
        fresh.write_text(commit)
        os.replace(fresh, ref)

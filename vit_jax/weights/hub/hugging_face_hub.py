"""Weights on the Hugging Face hub, through huggingface_hub and into its cache.

The library resolves the revision, lists the files, keeps the cache, and handles tokens
and HF_ENDPOINT. Only file contents are downloaded by `transfer`: huggingface_hub 2.4
deletes partial downloads and does not verify hashes.

Layout of the cache (docs of huggingface_hub, "Understand caching"): blobs/ has contents
by hash, snapshots/<commit>/ links to them by name, refs/ has the commits of branches.
"""

import contextlib
import fnmatch
import functools
import glob
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from vit_jax.errors import UserError
from vit_jax.weights.hub import transfer
from vit_jax.weights.hub.transfer import DownloadError

_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_LIBRARY = "vit_jax"  # In the user agent.

# Best first. Other frameworks' (flax_model.msgpack, tf_model.h5) are not read.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "*.safetensors",
    "*.npz",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "*.bin",
    "*.pth",
    "*.pt",
)
_SIDECARS = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "open_clip_config.json",
    "adapter_config.json",
)
_INDEX = ".index.json"
_MAX_LISTED = 12


def is_hub_url(url: str) -> bool:
    """Returns whether a URL is on the hub's website, whose pages are not the files."""
    return urlsplit(url).hostname in _HOSTS


def download(
    source: str,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    local_only: bool = False,
) -> pathlib.Path:
    """Downloads a file or a model's files from the hub unless they are cached.

    One request resolves a branch to its commit; a full commit hash whose files are
    cached needs none. Without an answer the commit that was last seen is used.

    Args:
      source: hf://owner/name[@revision][/file], or a page of the website.
      sha256: hash of the file, or its beginning.
      cache_dir: of huggingface_hub; the library's default if None.
      local_only: make no request.

    Returns:
      The file, or the folder with the model's weights and their JSON files, in the
      snapshot folder of the commit.

    Raises:
      DownloadError: the file cannot be downloaded, or has another hash.
      UserError: the source is not a model.
    """
    uri = _parse(source)
    if sha256 and not uri.path_in_repo:
        raise UserError(
            f"{source} is a folder, but a SHA-256 is of a file: name the file"
        )
    commit, error = _resolve_commit(uri, source, cache_dir, local_only)
    # Downloads store a listing of the commit's files. Without one the cached files may
    # be incomplete, so they are used only if the hub cannot be asked.
    allow_unlisted = local_only or error is not None or _is_offline()
    folder = _find_cached(uri, commit, source, cache_dir, allow_unlisted)
    if folder is None and (local_only or error is not None):
        raise _explain(source, uri, error)
    if folder is None:
        folder = _download_snapshot(uri, commit, source, sha256, cache_dir)
    _record_commit(uri, commit, cache_dir)
    path = folder / uri.path_in_repo
    if not path.is_dir() and not transfer.is_complete(path, sha256):
        raise DownloadError(
            source,
            f"has the SHA-256 {transfer.file_hash(path)}, not {sha256}",
            "correct the hash, or name another revision",
        )
    return path


def select_files(listed: Sequence[str], path: str, source: str) -> list[str]:
    """Returns the files of one model: weights first, their shards, then JSON files.

    Args:
      listed: all files of a repository.
      path: of a file or folder in the repository; "" is all of it.
      source: for messages.

    Returns:
      Paths in the repository.

    Raises:
      DownloadError: no such file, no weights, or more than one model.
    """
    if path in listed:
        first = path
        folder = path.rpartition("/")[0]
    else:
        first, folder = "", path
    start = f"{folder}/" if folder else ""
    inside = [f.removeprefix(start) for f in listed if f.startswith(start)]
    if not inside:
        raise DownloadError(
            source, f"has no file {path!r}", f"it has {_shorten(listed) or 'none'}"
        )
    first = first.removeprefix(start) or _find_weights(inside, source)
    names = [first, *_find_shards(first, inside, source)]
    names += [c for c in _SIDECARS if c in inside and c != first]
    return [start + name for name in names]


def _find_weights(inside: Sequence[str], source: str) -> str:
    top_level = [name for name in inside if "/" not in name]
    for pattern in _WEIGHTS:
        found = fnmatch.filter(top_level, pattern)
        if len(found) > 1:
            raise DownloadError(
                source,
                f"has more than one model ({_shorten(found)})",
                "name a file of it",
            )
        if found:
            return found[0]
    raise DownloadError(
        source,
        "has no weights that are read (safetensors, npz or PyTorch)",
        f"it has {_shorten(inside) or 'no files'}",
    )


def _find_shards(index: str, inside: Sequence[str], source: str) -> list[str]:
    """Returns the files that an index lists: model-00001-of-00002.safetensors, ..."""
    if not index.endswith(_INDEX):
        return []
    stem = pathlib.PurePosixPath(index.removesuffix(_INDEX))
    shards = fnmatch.filter(inside, f"{stem.with_suffix('')}-*-of-*{stem.suffix}")
    if not shards:
        raise DownloadError(
            source, f"has {index} but no part of it", f"it has {_shorten(inside)}"
        )
    return sorted(shards)


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_MAX_LISTED])
    more = len(names) - _MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def _parse(source: str) -> Any:
    from huggingface_hub import parse_hf_uri
    from huggingface_hub.errors import HfUriError

    try:
        uri = parse_hf_uri(source)
    except HfUriError as error:
        raise UserError(
            f"{source} is no place on the hub ({transfer.one_line(error)}): write "
            "hf://owner/name, hf://owner/name@revision or hf://owner/name/file"
        ) from error
    if uri.type != "model":
        raise UserError(
            f"{source} is a {uri.type}, not a model: name a model's repository"
        )
    return uri


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name=_LIBRARY)


def _is_offline() -> bool:
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def _resolve_commit(
    uri: Any, source: str, cache_dir: str | os.PathLike | None, local_only: bool
) -> tuple[str, Exception | None]:
    """Returns the commit of a revision, and the error if it is only the last one seen."""
    from huggingface_hub.errors import RevisionResolutionError

    if uri.revision and re.fullmatch("[0-9a-f]{40}", uri.revision):
        return uri.revision, None
    error = None
    if not local_only:
        try:
            return _request_commit(uri), None
        except _request_errors() as failed:
            error = failed
    try:
        known = _api().resolve_revision(
            uri.id, revision=uri.revision, cache_dir=cache_dir, local_files_only=True
        )
    except RevisionResolutionError:
        raise _explain(source, uri, error) from error
    return known.resolved, error


def _request_commit(uri: Any) -> str:
    """Returns the current commit of a revision."""
    from huggingface_hub import constants

    # The library's other requests wait without a limit for an unreachable hub.
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    return _api().model_info(uri.id, revision=uri.revision, timeout=timeout).sha


def _download_snapshot(
    uri: Any,
    commit: str,
    source: str,
    sha256: str,
    cache_dir: str | os.PathLike | None,
) -> pathlib.Path:
    """Downloads the selected files of a commit into the cache; returns its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.hf_api import RepoFile
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        if uri.revision == commit:  # Otherwise the hub has answered just now.
            _request_commit(uri)
        tree = _api().list_repo_tree(uri.id, recursive=True, revision=commit)
        listed = {f.path: f for f in tree if isinstance(f, RepoFile)}
        names = select_files(list(listed), uri.path_in_repo, source)
        lfs = listed[names[0]].lfs
        if sha256 and lfs and not lfs.sha256.startswith(sha256):
            raise DownloadError(
                source,
                f"has the SHA-256 {lfs.sha256}, not {sha256}",
                "correct the hash, or name another revision",
            )
        for name in names:
            _download_blob(uri, commit, source, listed[name], cache_dir)
        # The library finds the blobs where it would have put them, and links them.
        folder = snapshot_download(
            uri.id,
            revision=commit,
            cache_dir=cache_dir,
            allow_patterns=[glob.escape(name) for name in names],
            library_name=_LIBRARY,
            tqdm_class=Silent,
        )
    except _request_errors() as error:
        raise _explain(source, uri, error) from error
    return pathlib.Path(folder)


def _find_cached(
    uri: Any,
    commit: str,
    source: str,
    cache_dir: str | os.PathLike | None,
    allow_unlisted: bool,
) -> pathlib.Path | None:
    """Returns the snapshot folder of a commit if all selected files are in it."""
    from huggingface_hub import errors, get_cached_repo_tree, snapshot_download

    where = {"revision": commit, "cache_dir": cache_dir}
    find = functools.partial(snapshot_download, uri.id, local_files_only=True, **where)
    try:
        try:
            listed = [f.path for f in get_cached_repo_tree(uri.id, **where)]
        except errors.CachedRepoTreeNotFoundError:
            if not allow_unlisted:
                return None
            folder = pathlib.Path(find())
            files = (p for p in folder.rglob("*") if p.is_file())
            cached = [p.relative_to(folder).as_posix() for p in files]
            try:
                select_files(cached, uri.path_in_repo, source)
            except DownloadError:
                return None
            return folder
        names = select_files(listed, uri.path_in_repo, source)
        return pathlib.Path(find(allow_patterns=[glob.escape(n) for n in names]))
    except errors.LocalEntryNotFoundError:
        return None


def _download_blob(
    uri: Any,
    commit: str,
    source: str,
    file: Any,
    cache_dir: str | os.PathLike | None,
) -> None:
    """Downloads one file to the blob where the library keeps content of that hash."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    def refuse(response):
        try:
            hf_raise_for_status(response)
        except HfHubHTTPError as error:
            raise _explain(source, uri, error) from error

    # Large files are named by SHA-256, the others by git's hash.
    name = file.lfs.sha256 if file.lfs else file.blob_id
    folder = _repository_folder(uri, cache_dir)
    transfer.download_http(
        hf_hub_url(uri.id, file.path, revision=commit),
        folder / "blobs" / name,
        source=f"hf://{uri.id}@{commit[:8]}/{file.path}",
        refuse=refuse,
        expected_hash=name,
        git=not file.lfs,
        immutable=True,
        lock=folder.parent / ".locks" / folder.name / f"{name}.lock",  # The library's.
        headers=build_hf_headers(library_name=_LIBRARY),
    )


def _repository_folder(uri: Any, cache_dir: str | os.PathLike | None) -> pathlib.Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = pathlib.Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
    return folder / repo_folder_name(repo_id=uri.id, repo_type="model")


def _record_commit(uri: Any, commit: str, cache_dir: str | os.PathLike | None) -> None:
    """Stores the commit of a branch, to be used while the hub cannot be asked."""
    ref = _repository_folder(uri, cache_dir) / "refs" / (uri.revision or "main")
    if uri.revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    with contextlib.suppress(OSError):  # A cache may be read-only.
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = _repository_folder(uri, cache_dir) / f"ref.{os.getpid()}.tmp"
        fresh.write_text(commit)
        os.replace(fresh, ref)


def _request_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that huggingface_hub raises when a request fails."""
    import httpx2
    from huggingface_hub import errors

    return (
        httpx2.HTTPError,
        httpx2.InvalidURL,
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        json.JSONDecodeError,  # HF_ENDPOINT is not a hub.
    )


def _explain(source: str, uri: Any, error: Exception | None) -> DownloadError:
    """Returns the error to raise for a failed request.

    Args:
      source: as the user named it.
      uri: the source as huggingface_hub parsed it.
      error: one of `_request_errors`; None if no request was made.
    """
    from huggingface_hub import constants, errors

    page = uri.to_url()
    response = getattr(error, "response", None)
    code = response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if error is None:
        reason, remedy = "is not in the hub's cache", "fetch it first"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        reason, remedy = _absent("HF_HUB_OFFLINE is set", page)
    elif isinstance(error, json.JSONDecodeError):
        reason = f"cannot be had: {constants.ENDPOINT} does not answer as a hub does"
        remedy = "correct HF_ENDPOINT"
    elif not code:
        reason, remedy = _absent(transfer.one_line(error)[:200], page)
    elif isinstance(error, errors.GatedRepoError):
        reason = f"is gated ({code})"
        remedy = f"ask for access at {page}, then set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = f"has no revision {uri.revision or 'main'!r} ({code})"
        remedy = f"see {page.partition('/tree/')[0].partition('/blob/')[0]}/commits"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = f"does not exist or is private ({code})"
        remedy = "check owner and name, or set HF_TOKEN to a token that may read it"
    elif code in (401, 403):
        reason = f"is refused ({code})"
        remedy = "set HF_TOKEN to a token that may read it"
    else:
        reason, remedy = f"is not given ({code})", f"try again later, or see {page}"
    return DownloadError(source, reason, remedy)


def _absent(why: str, page: str) -> tuple[str, str]:
    remedy = (
        f"open {page} in a browser, save the weights and the .json files in one folder "
        "and give its path"
    )
    return f"is not in the cache and cannot be reached ({why})", remedy

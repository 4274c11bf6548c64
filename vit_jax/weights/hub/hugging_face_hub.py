"""Downloads weights from the Hugging Face hub into huggingface_hub's cache."""

import fnmatch
import functools
import glob
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.errors import UserError
from vit_jax.weights.hub import urls
from vit_jax.weights.hub.urls import DownloadError

HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_CHECK_HASH = "correct the hash, or give another revision"

# Best first. Files of TensorFlow (tf_model.h5) are not read.
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
    "flax_model.msgpack",
    "flax_model.msgpack.index.json",
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


def download(
    source: str,
    *,
    sha256: str = "",
    cache_dir: str | os.PathLike | None = None,
    local_only: bool = False,
) -> pathlib.Path:
    """Downloads a file or the files of a model from the hub, unless they are cached.

    One request determines the commit of a branch; a full commit hash whose files are
    cached needs no request. Without an answer, the latest known commit is used.

    Returns:
      The path of the file, or of the folder with the weights and JSON files of the
      commit.

    Raises:
      DownloadError: the file cannot be downloaded, or has another hash.
      UserError: the source is not a model, or the cache cannot be written.
    """
    from huggingface_hub import constants, is_offline_mode

    uri = _parse(source)
    is_folder = f"{source} is a folder, but a SHA-256 is for a file: give its path"
    if sha256 and not uri.path_in_repo:
        raise UserError(is_folder)
    commit = error = None
    folder = _find_cached(uri, cache_dir, unlisted=local_only or is_offline_mode())
    pinned = re.fullmatch("[0-9a-f]{40}", uri.revision or "")
    if not local_only and not (pinned and folder):
        # The library's other requests wait without a limit for an unreachable hub.
        wait = constants.HF_HUB_ETAG_TIMEOUT
        try:
            commit = _api().model_info(uri.id, revision=uri.revision, timeout=wait).sha
        except _request_errors() as failed:
            error = failed
            folder = folder or _find_cached(uri, cache_dir, unlisted=True)
    if commit and (folder is None or folder.name != commit):
        folder = _fetch(uri, source, sha256, cache_dir)
    if folder is None:
        raise _explain(source, uri, error)
    path = folder / uri.path_in_repo
    if sha256 and path.is_dir():
        raise UserError(is_folder)
    if sha256:
        urls.check_hash(source, urls.file_hash(path), sha256, _CHECK_HASH)
    return path


def _select_files(listed: Sequence[str], path: str, source: str) -> list[str]:
    """Returns the weights, shards and sidecars of the model at a path in a repository."""
    folder = path.rpartition("/")[0] if path in listed else path
    start = f"{folder}/" if folder else ""
    inside = [f.removeprefix(start) for f in listed if f.startswith(start)]
    if not inside:
        reason, has = f"has no file {path!r}", _shorten(listed) or "none"
        raise DownloadError(source, reason, f"it has {has}")
    named = path.removeprefix(start) if path in listed else ""
    first = named or _best_weights(inside, source)
    sidecars = [name for name in _SIDECARS if name in inside and name != first]
    return [start + n for n in (first, *_find_shards(first, inside, source), *sidecars)]


def _best_weights(inside: Sequence[str], source: str) -> str:
    top_level = [name for name in inside if "/" not in name]
    for pattern in _WEIGHTS:
        matches = fnmatch.filter(top_level, pattern)
        if len(matches) > 1:
            reason = f"has more than one model ({_shorten(matches)})"
            raise DownloadError(source, reason, "give the path of one file")
        if matches:
            return matches[0]
    reason = "has no weights in a known format (safetensors, npz, PyTorch or Flax)"
    raise DownloadError(source, reason, f"it has {_shorten(inside) or 'no files'}")


def _find_shards(index: str, inside: Sequence[str], source: str) -> list[str]:
    """Returns the files that an index lists: model-00001-of-00002.safetensors, ..."""
    if not index.endswith(_INDEX):
        return []
    stem = pathlib.PurePosixPath(index.removesuffix(_INDEX))
    shards = fnmatch.filter(inside, f"{stem.with_suffix('')}-*-of-*{stem.suffix}")
    if not shards:
        reason = f"has {index} but none of its parts"
        raise DownloadError(source, reason, f"it has {_shorten(inside)}")
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
            f"{source} is not an address on the hub ({urls.one_line(error)}): write "
            "hf://owner/name, hf://owner/name@revision or hf://owner/name/file"
        ) from error
    if uri.type != "model":
        raise UserError(
            f"{source} is a {uri.type}, not a model: give the repository of a model"
        )
    return uri


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="vit_jax")  # Part of the user agent.


def _find_cached(
    uri: Any, cache_dir: str | os.PathLike | None, *, unlisted: bool
) -> pathlib.Path | None:
    """Returns the snapshot folder of a revision if all selected files are in it.

    Downloads store a listing of the commit's files. Without a listing, the cached files
    may be incomplete; they are used only if `unlisted`, when the hub cannot be reached.
    """
    from huggingface_hub import errors, get_cached_repo_tree, snapshot_download

    where = {"revision": uri.revision, "cache_dir": cache_dir}
    find = functools.partial(snapshot_download, uri.id, local_files_only=True, **where)
    try:
        try:
            listed = [f.path for f in get_cached_repo_tree(uri.id, **where)]
        except errors.CachedRepoTreeNotFoundError:
            if not unlisted:
                return None
            folder = pathlib.Path(find())
            files = (p for p in folder.rglob("*") if p.is_file())
            listed = [p.relative_to(folder).as_posix() for p in files]
        names = _select_files(listed, uri.path_in_repo, uri.id)
        return pathlib.Path(find(allow_patterns=[glob.escape(n) for n in names]))
    except (errors.LocalEntryNotFoundError, DownloadError):
        return None


def _fetch(
    uri: Any, source: str, sha256: str, cache_dir: str | os.PathLike | None
) -> pathlib.Path:
    """Downloads the selected files of a revision to the cache; returns their folder."""
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import tqdm
    from huggingface_hub.utils.sha import git_hash

    try:
        tree = _api().list_repo_tree(uri.id, recursive=True, revision=uri.revision)
        listed = {f.path: f for f in tree if isinstance(f, RepoFile)}
        names = _select_files(list(listed), uri.path_in_repo, source)
        if lfs := listed[names[0]].lfs:
            urls.check_hash(source, lfs.sha256, sha256, _CHECK_HASH)
        folder = _api().snapshot_download(
            uri.id,
            revision=uri.revision,
            cache_dir=cache_dir,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=functools.partial(tqdm, disable=None),  # Only on terminals.
        )
    except _request_errors() as error:
        raise _explain(source, uri, error) from error
    for name in names:  # The library compares only sizes.
        path, lfs = pathlib.Path(folder, name), listed[name].lfs
        digest = urls.file_hash(path) if lfs else git_hash(path.read_bytes())
        expected = lfs.sha256 if lfs else listed[name].blob_id
        if digest != expected:
            blob = path.resolve()
            path.unlink(missing_ok=True)
            blob.unlink(missing_ok=True)
            raise DownloadError(
                f"hf://{uri.id}/{name}",
                f"has the {'SHA-256' if lfs else 'SHA-1'} {digest}, not {expected}",
                "it was deleted; fetch it again",
            )
    return pathlib.Path(folder)


def _request_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that huggingface_hub raises when a request fails."""
    import httpx2

    # JSONDecodeError: HF_ENDPOINT is not a hub. RuntimeError: hf_xet failed.
    requests = httpx2.HTTPError, httpx2.InvalidURL, json.JSONDecodeError
    return *requests, OSError, RuntimeError


def _explain(source: str, uri: Any, error: Exception | None) -> UserError:
    """Returns an error that explains one of `_request_errors`; None: no request made."""
    from huggingface_hub import constants, errors

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # The request failed before the cache was read.
    page = uri.to_url()
    absent = "is not in the cache and cannot be reached"
    by_hand = (
        f"open {page} in a browser, save the weights and the .json files in one folder "
        "and give its path"
    )
    code = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    match error:
        case None:
            reason, remedy = "is not in the hub's cache", "fetch it first"
        case errors.OfflineModeIsEnabled():
            reason, remedy = f"{absent} (HF_HUB_OFFLINE is set)", by_hand
        case json.JSONDecodeError():
            reason = f"cannot be fetched: {constants.ENDPOINT} does not answer as a hub"
            remedy = "correct HF_ENDPOINT"
        case errors.GatedRepoError():
            reason = f"is gated ({code})"
            remedy = f"ask for access at {page}, then set HF_TOKEN"
        case errors.RevisionNotFoundError():
            reason = f"has no revision {uri.revision or 'main'!r} ({code})"
            remedy = f"see {page.partition('/tree/')[0].partition('/blob/')[0]}/commits"
        case errors.RepositoryNotFoundError():
            reason = f"does not exist or is private ({code})"
            remedy = "check owner and name, or set HF_TOKEN to a token with access"
        case errors.HfHubHTTPError() if code in (401, 403):
            reason = f"is refused ({code})"
            remedy = "set HF_TOKEN to a token with access"
        case errors.HfHubHTTPError():
            reason, remedy = f"is not available ({code})", f"try later, or see {page}"
        case RuntimeError():
            reason = f"{absent} ({urls.one_line(error)})"
            remedy = "set HF_HUB_DISABLE_XET=1 to use plain HTTP"
        case OSError() if error.errno:
            return urls.not_written(error.filename or constants.HF_HUB_CACHE, error)
        case _:
            reason, remedy = f"{absent} ({urls.one_line(error)})", by_hand
    return DownloadError(source, reason, remedy)

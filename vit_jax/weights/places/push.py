"""Uploading converted weights to the Hugging Face hub."""

import os
import pathlib
from collections.abc import Iterable

from vit_jax.errors import UserError


def check(repo: str) -> None:
    """Raises UserError unless a name is that of a repository on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            f"--push={repo!r} is no name on the hub ({error}): write owner/name"
        ) from error
    if repo.count("/") != 1:
        raise UserError(f"--push={repo!r} has no owner: write owner/name")


def upload(
    files: Iterable[str | os.PathLike],
    repo: str,
    card: str,
    *,
    private: bool = False,
    endpoint: str | None = None,
) -> str:
    """Uploads files and a model card as one commit; makes the repository if need be.

    Args:
      files: local paths; each keeps its name.
      repo: "owner/name".
      card: content of README.md.
      private: whether a new repository is private.
      endpoint: URL of the hub; the library's default (HF_ENDPOINT) if None.

    Returns:
      URL of the commit.

    Raises:
      UserError: not allowed, or the hub cannot be reached.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi(endpoint=endpoint, library_name="vit_jax")
    operations = [CommitOperationAdd("README.md", card.encode())]
    operations += [
        CommitOperationAdd(pathlib.Path(path).name, str(path)) for path in files
    ]
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        commit = api.create_commit(
            repo, operations, commit_message="Add weights, converted by vit_jax"
        )
    except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise UserError(_explain(error, repo)) from error
    # What goes wrong while a file is on its way comes wrapped.
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(_explain(error.__cause__ or error, repo)) from error
    return commit.commit_url


def _explain(error: BaseException, repo: str) -> str:
    response = getattr(error, "response", None)
    status = response.status_code if response is not None else 0
    remedy = {
        401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
        403: f"the token may not write to {repo}: give one that may in HF_TOKEN",
        404: f"no such repository, or it is hidden from this token: check {repo}",
    }.get(status, "try again; what was converted is kept")
    line = " ".join(str(error).split()) or type(error).__name__
    return f"{repo} was not uploaded: {line[:200]}; {remedy}"

"""What a user should know when the Hugging Face hub does not give a file."""

import json
from typing import Any

from vit_jax.weights.places import cache


def failures() -> tuple[type[Exception], ...]:
    """Returns what huggingface_hub raises when a request fails."""
    import httpx2
    from huggingface_hub import errors

    return (
        httpx2.HTTPError,
        httpx2.InvalidURL,
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        json.JSONDecodeError,  # HF_ENDPOINT is no hub.
    )


def told(place: str, uri: Any, error: Exception | None) -> cache.FetchError:
    """Puts an error into a line.

    Args:
      place: as it was asked for.
      uri: the place as huggingface_hub parsed it.
      error: one of `failures`; None if the hub was not asked.

    Returns:
      The error to raise.
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
        reason, remedy = _absent(cache.one_line(error)[:200], page)
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
    return cache.FetchError(place, reason, remedy)


def _absent(why: str, page: str) -> tuple[str, str]:
    remedy = (
        f"open {page} in a browser, save the weights and the .json files in one folder "
        "and give its path"
    )
    return f"is not in the cache and cannot be reached ({why})", remedy

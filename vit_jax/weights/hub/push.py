"""Uploads converted weights and their model card to the Hugging Face hub."""

import math
import os
import pathlib
from collections.abc import Iterable, Mapping

import jax

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights.formats.registry import WRITERS
from vit_jax.weights.hub.urls import one_line
from vit_jax.weights.pretrained import Pretrained

# Options shown in a model card, for encoders and ResNets.
_SHOWN = ("width", "depth", "num_heads", "mlp_dim", "pool", "num_register_tokens")
_SHOWN += ("activation", "layer_norm_eps", "stage_depths", "stem_width")


def check_repository(repo: str) -> None:
    """Raises UserError unless a name is a valid owner/name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            f"--push={repo!r} is not a valid name on the hub ({error}): write owner/name"
        ) from error
    if repo.count("/") != 1:
        raise UserError(f"--push={repo!r} has no owner: write owner/name")


def upload(
    files: Iterable[str | os.PathLike],
    repo: str,
    card: str,
    *,
    private: bool = False,
) -> str:
    """Uploads files and a model card in one commit, creating the repository if needed.

    Args:
      files: local paths; each keeps its name.
      repo: "owner/name".
      card: content of README.md.
      private: whether a new repository is private.

    Returns:
      URL of the commit.

    Raises:
      UserError: the hub refuses the upload, or cannot be reached.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="vit_jax")
    content = {pathlib.Path(path).name: str(path) for path in files}
    content = {"README.md": card.encode()} | content
    operations = [CommitOperationAdd(name, data) for name, data in content.items()]
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        commit = api.create_commit(
            repo, operations, commit_message="Add weights, converted by vit_jax"
        )
    except httpx2.HTTPError as error:
        raise UserError(_explain(error, repo)) from error
    # The library wraps errors that occur while it uploads a file.
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(_explain(error.__cause__ or error, repo)) from error
    return commit.commit_url


def _explain(error: BaseException, repo: str) -> str:
    """Returns the message for a failed upload."""
    response = getattr(error, "response", None)
    status = response.status_code if response is not None else 0
    remedy = {
        401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
        403: f"the token may not write to {repo}: set HF_TOKEN to one that may",
        404: f"no such repository, or it is hidden from this token: check {repo}",
    }.get(status, "try again; the converted files are kept")
    return f"{repo} was not uploaded: {one_line(error)}; {remedy}"


def model_card(
    pretrained: Pretrained,
    repo: str,
    *,
    to: str,
    usage: str,
    license: str = "",
    scores: Mapping[str, float] | None = None,
) -> str:
    """Returns a model card, the README.md of a repository on the hub.

    Args:
      pretrained: the published checkpoint.
      repo: "owner/name" on the hub.
      to: format, as for the flag `--to` of `vit_jax.convert`.
      usage: Python lines that load the weights.
      license: identifier on the hub, such as "apache-2.0"; "" if unknown.
      scores: metrics by name, between 0 and 1, from the report of a run.

    Returns:
      Markdown that starts with the metadata for the hub.
    """
    from huggingface_hub.utils import yaml_dump

    options = models.create(**pretrained.options).options
    targets = pretrained.targets
    num_classes = 0 if targets else options["num_classes"]
    task = "image-classification" if num_classes else "image-feature-extraction"
    meta = {"pipeline_tag": task, "tags": ["vit_jax", "vision-transformer"]}
    if library := WRITERS[to].library:
        meta["library_name"] = library
    if license:
        meta["license"] = license
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pretrained.params))
    height, width = options["image_size"]
    facts = {
        "Variant": options["variant"],
        "Parameters": f"{size:,}",
        "Input": f"{height}x{width} pixels, {options['channels']} channels",
        **(
            {"Numbers": targets.describe()}
            if targets
            else {"Classes": num_classes or "none: features only"}
        ),
        **{k: options[k] for k in _SHOWN if options.get(k)},
        "Converted from": f"{pretrained.format} weights",
        "License": license or "unknown",
    }
    parts = [
        f"---\n{yaml_dump(meta, sort_keys=False)}---",
        f"# {repo.split('/')[-1]}",
        "A Vision Transformer ([paper](https://arxiv.org/abs/2010.11929))"
        if "depth" in options
        else "A ResNet of BiT ([paper](https://arxiv.org/abs/1912.11370))",
        "## Model",
        _table(("", ""), facts.items()),
        "## Images",
        pretrained.preprocess.explain()
        if pretrained.preprocess
        else "The preprocessing of images is unknown.",
        "## Loading",
        f"```python\n{usage}\n```",
    ]
    if scores:
        rows = [(name, f"{value:.2%}") for name, value in scores.items()]
        parts += ["## Results", _table(("evaluation", "value"), rows)]
    if pretrained.class_names:
        shown = ", ".join(pretrained.class_names[:10])
        more = ", ..." if len(pretrained.class_names) > 10 else ""
        parts += ["## Classes", f"{num_classes}, in this order: {shown}{more}"]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, str], rows) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {name} | {value} |" for name, value in lines)

"""Model cards: the README.md that goes with weights to the hub."""

import math
from collections.abc import Mapping

import jax

from vit_jax import models
from vit_jax.weights.preprocess import edges
from vit_jax.weights.pretrained import Preprocess, Pretrained

LIBRARIES = {"timm": "timm", "hf": "transformers"}  # By --to; those the hub knows.

_ENCODER = ("width", "depth", "heads", "mlp_dim", "head", "gelu", "epsilon")
_RESNET = ("blocks", "stem_width")


def write(
    pretrained: Pretrained,
    repo: str,
    *,
    to: str,
    usage: str,
    license: str = "",
    scores: Mapping[str, float] | None = None,
) -> str:
    """Writes a model card.

    Args:
      pretrained: what is published.
      repo: "owner/name" on the hub.
      to: the format, as of `vit_jax.convert`.
      usage: Python lines that load it.
      license: identifier of the hub, as "apache-2.0"; none is stated if empty.
      scores: name to value between 0 and 1, of a run's report.

    Returns:
      Markdown, with the metadata that the hub reads in front.
    """
    options = models.create(**pretrained.options).options
    classes = options["classes"]
    task = "image-classification" if classes else "image-feature-extraction"
    meta = {"pipeline_tag": task, "tags": ["vit_jax", "vision-transformer"]}
    if to in LIBRARIES:
        meta["library_name"] = LIBRARIES[to]
    if license:
        meta["license"] = license
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pretrained.params))
    height, width = options["image_size"]
    facts = {
        "Variant": options["variant"],
        "Parameters": f"{size:,}",
        "Input": f"{height}x{width} pixels, {options['channels']} channels",
        "Classes": classes or "none: features only",
        **{k: options[k] for k in _ENCODER + _RESNET if options.get(k)},
        "Converted from": f"{pretrained.format} weights",
        "License": license or "not stated",
    }
    parts = [
        _front_matter(meta),
        f"# {repo.split('/')[-1]}",
        "A Vision Transformer ([paper](https://arxiv.org/abs/2010.11929))"
        if "depth" in options
        else "A ResNet of BiT ([paper](https://arxiv.org/abs/1912.11370))",
        "## Model",
        _table(("", ""), facts.items()),
        "## Images",
        _preprocessing(pretrained.preprocess),
        "## Loading",
        f"```python\n{usage}\n```",
    ]
    if scores:
        rows = [(name, f"{value:.2%}") for name, value in scores.items()]
        parts += ["## Results", _table(("evaluation", "value"), rows)]
    if pretrained.class_names:
        shown = ", ".join(pretrained.class_names[:10])
        more = ", ..." if len(pretrained.class_names) > 10 else ""
        parts += ["## Classes", f"{classes}, in this order: {shown}{more}"]
    return "\n\n".join(parts) + "\n"


def _front_matter(meta: Mapping) -> str:
    lines = ["---"]
    for key, value in meta.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {item}" for item in value)]
        else:
            lines.append(f"{key}: {value}")
    return "\n".join([*lines, "---"])


def _table(head: tuple[str, str], rows) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {name} | {value} |" for name, value in lines)


def _preprocessing(preprocess: Preprocess | None) -> str:
    if preprocess is None:
        return "Nothing is known about how images were prepared."
    target, resized = (
        f"{height}x{width}"
        for height, width in (preprocess.image_size, edges(preprocess))
    )
    how = f"The whole image is resized to {resized}"
    if not preprocess.squash:
        how = f"The image is resized until it just covers {resized}"
    if target != resized or not preprocess.squash:
        how += f", and the central {target} are cut out"
    mean, std = (
        ", ".join(f"{v:g}" for v in values)
        for values in (preprocess.mean, preprocess.std)
    )
    return f"{how} ({preprocess.interpolation}). Mean {mean}; standard deviation {std}."

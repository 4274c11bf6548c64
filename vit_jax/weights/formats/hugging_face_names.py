"""Names and layouts of Hugging Face's ViT and DeiT."""

import re
from collections.abc import Collection

import numpy as np

from vit_jax.weights.formats.torch_layout import (
    CONV,
    SAME,
    Entry,
    dense,
    from_heads,
    norm,
    to_heads,
)
from vit_jax.weights.pretrained import POSITIONS

_ANCHOR = "embeddings.patch_embeddings.projection.weight"
_PREFIXES = ("vit.", "deit.", "")  # Of models with a classifier, and without.

# Names in memory of transformers 5 to names in files, in this order.
_NEW = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def find_prefix(names: Collection[str]) -> str | None:
    """Returns what stands in front of the encoder's names, or None without them."""
    return next((p for p in _PREFIXES if p + _ANCHOR in names), None)


def rename(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Takes the model's name off and gives all the names of files."""
    prefix = find_prefix(flat) or ""
    renamed = {}
    for name, value in flat.items():
        name = name.removeprefix(prefix)
        for new, old in _NEW:
            name = re.sub(new, old, name)
        renamed[name] = value
    return renamed


def table(options: dict) -> list[Entry]:
    """Lists the arrays of an encoder, without the prefix.

    Args:
      options: depth, heads, classes, distillation and representation, as of
        `models.Model`.
    """
    heads, embed = options["heads"], "embeddings"
    table = [
        *dense(f"{embed}.patch_embeddings.projection", "embedding", CONV),
        Entry(f"{embed}.cls_token", ("cls",), SAME),
        Entry(f"{embed}.position_embeddings", (POSITIONS,), SAME),
        *norm("layernorm", "Transformer/encoder_norm"),
    ]
    for i in range(options["depth"]):
        theirs, ours = f"encoder.layer.{i}", f"Transformer/encoderblock_{i}"
        attention = f"{ours}/MultiHeadDotProductAttention_1"
        table += norm(f"{theirs}.layernorm_before", f"{ours}/LayerNorm_0")
        for name in ("query", "key", "value"):
            table += [
                Entry(
                    f"{theirs}.attention.attention.{name}.{kind}",
                    (f"{attention}/{name}/{leaf}",),
                    to_heads(heads),
                )
                for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
            ]
        table += dense(
            f"{theirs}.attention.output.dense", f"{attention}/out", from_heads(heads)
        )
        table += norm(f"{theirs}.layernorm_after", f"{ours}/LayerNorm_2")
        table += dense(f"{theirs}.intermediate.dense", f"{ours}/MlpBlock_3/Dense_0")
        table += dense(f"{theirs}.output.dense", f"{ours}/MlpBlock_3/Dense_1")
    if options["representation"]:
        table += dense("pooler.dense", "pre_logits")
    if options["distillation"]:
        table.append(Entry(f"{embed}.distillation_token", ("dist",), SAME))
    if options["classes"] and options["distillation"]:
        table += dense("cls_classifier", "head")
        table += dense("distillation_classifier", "head_dist")
    elif options["classes"]:
        table += dense("classifier", "head")
    return table

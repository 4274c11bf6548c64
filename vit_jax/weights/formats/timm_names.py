"""Names and layouts of timm's VisionTransformer, its hybrids and its BiT ResNets."""

from vit_jax.weights.formats.torch_layout import (
    CONV,
    POINTWISE,
    SAME,
    Entry,
    dense,
    from_heads,
    norm,
    to_heads,
)
from vit_jax.weights.pretrained import POSITIONS

_STEM = "patch_embed.backbone"


def transformer(options: dict) -> list[Entry]:
    """Lists the arrays of an encoder or hybrid.

    Args:
      options: depth, heads, stem_width, blocks, classes, head, class_token,
        distillation, representation, pooled_norm and posemb, as of `models.Model`.
    """
    table = dense("patch_embed.proj", "embedding", CONV)
    if options["stem_width"]:
        table += _stem(options["blocks"])
    if options["head"] == "token" or options["class_token"]:
        table.append(Entry("cls_token", ("cls",), SAME))
    if options["distillation"]:
        table.append(Entry("dist_token", ("dist",), SAME))
    if options["posemb"] != "none":
        table.append(Entry("pos_embed", (POSITIONS,), SAME))
    for i in range(options["depth"]):
        table += _block(i, options["heads"])
    if options["pooled_norm"]:
        table += norm("fc_norm", "fc_norm")
    else:
        table += norm("norm", "Transformer/encoder_norm")
    if options["head"] == "map":
        table += _map_head(options["heads"])
    if options["representation"]:  # In files of timm before 0.6 only.
        table += dense("pre_logits.fc", "pre_logits")
    if options["classes"]:
        table += dense("head", "head")
        table += dense("head_dist", "head_dist") if options["distillation"] else []
    return table


def resnet(options: dict) -> list[Entry]:
    """Lists the arrays of a BiT ResNet.

    Args:
      options: blocks and classes, as of `models.Model`.
    """
    table = [_conv("stem.conv", "root_block/conv_root")]
    for stage, units in enumerate(options["blocks"]):
        for unit in range(units):
            theirs = f"stages.{stage}.blocks.{unit}"
            ours = f"block{stage + 1}/unit{unit + 1:02}"
            for i in (1, 2, 3):
                table += norm(f"{theirs}.norm{i}", f"{ours}/gn{i}")
                table.append(_conv(f"{theirs}.conv{i}", f"{ours}/conv{i}"))
            if unit == 0:
                table.append(_conv(f"{theirs}.downsample.conv", f"{ours}/conv_proj"))
    table += norm("norm", "norm-pre-head")
    if options["classes"]:
        table += dense("head.fc", "head", POINTWISE)
    return table


def _stem(blocks: tuple[int, ...]) -> list[Entry]:
    # Without stages the root is the backbone itself.
    root = f"{_STEM}.stem" if blocks else _STEM
    table = [_conv(f"{root}.conv", "conv_root"), *norm(f"{root}.norm", "gn_root")]
    for stage, units in enumerate(blocks):
        for unit in range(units):
            theirs = f"{_STEM}.stages.{stage}.blocks.{unit}"
            ours = f"block{stage + 1}/unit{unit + 1}"
            for i in (1, 2, 3):
                table.append(_conv(f"{theirs}.conv{i}", f"{ours}/conv{i}"))
                table += norm(f"{theirs}.norm{i}", f"{ours}/gn{i}")
            if unit == 0:
                table.append(_conv(f"{theirs}.downsample.conv", f"{ours}/conv_proj"))
                table += norm(f"{theirs}.downsample.norm", f"{ours}/gn_proj")
    return table


def _block(i: int, heads: int) -> list[Entry]:
    theirs, ours = f"blocks.{i}", f"Transformer/encoderblock_{i}"
    attention = f"{ours}/MultiHeadDotProductAttention_1"
    return [
        *norm(f"{theirs}.norm1", f"{ours}/LayerNorm_0"),
        *_heads(f"{theirs}.attn.qkv", attention, ("query", "key", "value"), heads),
        *dense(f"{theirs}.attn.proj", f"{attention}/out", from_heads(heads)),
        *norm(f"{theirs}.norm2", f"{ours}/LayerNorm_2"),
        *dense(f"{theirs}.mlp.fc1", f"{ours}/MlpBlock_3/Dense_0"),
        *dense(f"{theirs}.mlp.fc2", f"{ours}/MlpBlock_3/Dense_1"),
    ]


def _map_head(heads: int) -> list[Entry]:
    theirs, ours = "attn_pool", "MAPHead_0"
    attention = f"{ours}/MultiHeadDotProductAttention_0"
    return [
        Entry(f"{theirs}.latent", (f"{ours}/probe",), SAME),
        *_heads(f"{theirs}.q", attention, ("query",), heads),
        *_heads(f"{theirs}.kv", attention, ("key", "value"), heads),
        *dense(f"{theirs}.proj", f"{attention}/out", from_heads(heads)),
        *norm(f"{theirs}.norm", f"{ours}/LayerNorm_0"),
        *dense(f"{theirs}.mlp.fc1", f"{ours}/MlpBlock_0/Dense_0"),
        *dense(f"{theirs}.mlp.fc2", f"{ours}/MlpBlock_0/Dense_1"),
    ]


def _heads(theirs: str, ours: str, names: tuple[str, ...], heads: int) -> list[Entry]:
    """Lists the arrays of projections to heads that share a layer."""
    layout = to_heads(heads, len(names))
    return [
        Entry(f"{theirs}.{kind}", tuple(f"{ours}/{n}/{leaf}" for n in names), layout)
        for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
    ]


def _conv(theirs: str, ours: str) -> Entry:
    return Entry(f"{theirs}.weight", (f"{ours}/kernel",), CONV)

"""Which of timm's networks compute what a model here computes.

Most differences show in a file's parameters. Some do not (rotary embeddings, the place
of the LayerNorms): the `architecture` and `model_args` of config.json tell those, so
only architectures that are known to be equal are read.
"""

import re
from collections.abc import Collection, Mapping

import numpy as np

from vit_jax.errors import UserError

# All of timm 1.0.31 with equal logits, by family, and the names that timm has replaced by
# these. tests/weights/test_timm_registry.py compares them with timm.
_OLD = r"(_in21k|_in21ft1k|_sam|_dino|_miil|_miil_in21k)?"
_EQUAL = (
    rf"vit_(tiny|small|base|large|huge|giant|gigantic)_patch(8|14|16|32)_\d+{_OLD}",
    rf"deit3?_(tiny|small|medium|base|large|huge)(_distilled)?_patch1[46]_\d+{_OLD}",
    r"vit_base_patch(16|32)_plus_\d+",
    r"vit_small_patch16_36x1_224",
    r"vit_(small|base|large)_patch14_dinov2",
    r"vit_(medium|betwixt|base|huge|giant)_patch1[46]_gap_\d+",
    r"vit_(base|large|so400m|giantopt)_patch(14|16|32)_siglip(_gap)?_\d+",
    r"flexivit_(small|base|large)",
    r"eva_large_patch14_\d+",
    r"test_vit",
    r"vit_(tiny_r_s16_p8|(small|base)_r26_s32|base_r50_s16|large_r50_s32)_\d+(_in21k)?",
    r"vit_base_resnet50_(224_in21k|384)",
    r"resnetv2_(50x1|50x3|101x1|101x3|152x2|152x4)_bit(m|m_in21k)?",
    r"resnetv2_(50x1_bit_distilled|152x2_bit_teacher|152x2_bit_teacher_384)",
)

# What architectures have whose parameters do not tell it, by their names.
_UNSEEN = (
    (
        r"_rope_|dinov3|lingbot|sapiens2|_pe_(core|lang|spatial)_|^eva02_",
        "rotary position embeddings are",
    ),
    (r"_rpn_", "post-norm (LayerNorms behind the branches of a block) is"),
    (r"quickgelu", "QuickGELU is"),
    (r"_clip_", "pre-norm (norm_pre) is"),
)

# What parameters tell, by their names.
_SEEN = (
    (r"norm_pre\.", "pre-norm (norm_pre) is"),
    (r".*\.attn\.[qk]_norm\.", "norms of queries and keys (q_norm, k_norm) are"),
    (r"blocks\.\d+\.(attn|mlp)\.norm\.", "norms in a branch (attn.norm, mlp.norm) are"),
    (r"(.*\.)?rope\.", "rotary position embeddings (rope) are"),
    (r".*(rel_pos|relative_position)", "relative position biases (rel_pos) are"),
    (r"blocks\.\d+\.mlp\.(fc1_[gx]|w12|w3)\.", "gated MLPs (SwiGLU) are"),
    (r"blocks\.\d+\.attn\.[qv]_bias", "biases of query and value alone (q_bias) are"),
    (r"blocks\.\d+\.(attns|ffns)\.", "parallel branches (attns, ffns) are"),
    (r"blocks\.\d+\.attn\.lambda_", "differential attention (lambda_q1) is"),
    (r"blocks_token_only\.", "class attention (blocks_token_only) is"),
    (r"patch_embed\.norm\.", "a norm of the patches (patch_embed.norm) is"),
    (r".*\.running_mean", "BatchNorm (running_mean) is"),
)

# Parts of a network; an array of one that no table explains changes what it computes.
_PARTS = re.compile(
    r"(blocks|patch_embed|norm|fc_norm|attn_pool|cls_token|dist_token|pos_embed"
    r"|stem|stages)(\.|$)"
)

# Arguments that the parameters show or that do nothing at inference, and those that
# timm_config reads. Others change what a network computes unseen.
_ARGUMENTS = re.compile(
    r"img_size|patch_size|in_chans|num_classes|embed_dim|depth|num_heads|mlp_ratio"
    r"|qkv_bias|qk_norm|scale_attn_norm|scale_mlp_norm|proj_bias|init_values|class_token"
    r"|no_embed_class|reg_tokens|pre_norm|final_norm|fc_norm|dynamic_img_size"
    r"|dynamic_img_pad|strict_img_size|weight_init|fix_init|stem_chs|channels|pos_embed"
    r"|global_pool|act_layer|pool_include_prefix|\w+_rate|pretrained|checkpoint_path"
    r"|cache_dir|scriptable|exportable|no_jit|out_indices"
)
_NONE = (None, False, "", "none")


def check_parameters(flat: Mapping[str, np.ndarray], source: str) -> None:
    """Raises UserError if parameters are of something that no model here has.

    Args:
      flat: arrays by timm's names.
      source: for messages.
    """
    found = [
        what for pattern, what in _SEEN if any(map(re.compile(pattern).match, flat))
    ]
    if "reg_token" in flat:
        count = flat["reg_token"].shape[1]
        words = "register token (reg_token) is" if count == 1 else "register tokens are"
        found.append(f"{count} {words}")
    first, second = (flat.get(f"blocks.0.mlp.fc{i}.weight") for i in (1, 2))
    if first is not None and second is not None and len(first) == 2 * second.shape[-1]:
        found.append(f"a gated MLP ({second.shape[-1]} of {len(first)} features) is")
    if "blocks.0.norm1.weight" in flat:
        if "blocks.0.norm1.bias" not in flat:
            found.append("a norm without bias (RMSNorm) is")
        if not {"norm.weight", "fc_norm.weight"} & flat.keys():
            found.append("an encoder without a final norm is")
    if found:
        raise _unsupported(source, *found)


def check_names(flat: Mapping, known: Collection[str], source: str) -> None:
    """Raises UserError if a part of the network has an array that no table explains.

    Args:
      flat: arrays by timm's names.
      known: names that are read.
      source: for messages.
    """
    for name in sorted(flat.keys() - known):
        if _PARTS.match(name):
            raise _unsupported(source, f"{name} is")


def check_config(config: Mapping) -> None:
    """Raises UserError unless a config is of an architecture that is known to be equal.

    Args:
      config: content of config.json, with an "architecture", whose tag tells only how
        it was trained.
    """
    name, args = architecture(config), config.get("model_args") or {}
    file = f"architecture={name!r} in config.json"
    # Without its first norm, which is how timm_architecture writes epsilon 1e-5.
    plain_clip = name == "vit_base_patch16_clip_224" and args.get("pre_norm") is False
    if not plain_clip and not any(re.fullmatch(p, name) for p in _EQUAL):
        what = next((what for p, what in _UNSEEN if re.search(p, name)), None)
        if what is not None:
            raise _unsupported(file, what)
        raise UserError(
            f"{file}: not an architecture of timm that is known to compute what a model "
            "here computes; give weights of a plain Vision Transformer, hybrid or BiT "
            "ResNet"
        )
    for key, value in args.items():
        if key == "norm_layer" and _same_norm(name, value):
            continue
        if not _ARGUMENTS.fullmatch(key) and value not in _NONE:
            raise _unsupported(file, f"{key}={value!r} in model_args is")


def architecture(config: Mapping) -> str:
    """Returns the name of a config's architecture without the tag behind its dot."""
    return config["architecture"].partition(".")[0]


def _same_norm(name: str, norm: object) -> bool:
    """Returns whether a norm_layer is what an architecture has anyway."""
    # timm's LayerNorm has epsilon 1e-6, which is not that of CLIP.
    own = "_clip_" not in name and not name.startswith("resnetv2_")
    return own and str(norm).replace("_", "").lower() == "layernorm"


def _unsupported(where: str, *what: str) -> UserError:
    """Returns the error; each of `what` ends in the verb."""
    return UserError(
        f"{where}: {' not supported; '.join(what)} not supported: no model here computes "
        "the same; give weights of a network without it"
    )

"""timm's networks by name, and which of them equal a model of this project.

Most differences between networks are visible in a file's parameters. Some are not
(rotary embeddings, the order of the LayerNorms) and are recorded only in `architecture`
and `model_args` of config.json. Therefore only architectures that are known to be equal
are read. Parameters of Eva and Beit are renamed to those of VisionTransformer, and
back. Letter: K head width.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping

import numpy as np

from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.weights.formats.tables import ArrayEntry


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings of a network of timm.

    Attributes:
      kind: key `rope` of `config.model`.
      temperature: key `rope_temperature` of `config.model`.
      reference: key `rope_reference` of `config.model`.
      pairs: whether neighbouring features are rotated together, instead of features
        that are K/2 apart.
      columns_first: whether the first features of a head are rotated by the column.
    """

    kind: str = "none"
    temperature: float = 100.0
    reference: int = 0
    pairs: bool = True
    columns_first: bool = False


NONE = Rotary()


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts from a network's name and config.json; defaults are those of a plain ViT.

    Attributes:
      kind: class in timm: "vit", "eva" or "beit".
      num_heads: number of attention heads; 0 if unknown.
      width: number of features per token; None if unknown.
      depth: number of blocks; None if unknown.
      patch: side of a patch in pixels; None if unknown.
      registers: number of register tokens; None if unknown.
      activation: activation of MLPs without gates.
      layer_norm_eps: epsilon of the LayerNorms.
      layer_scale_init: initial value of LayerScale.
      posemb_resize: method that resized position embeddings during training.
      positions: whether there are absolute position embeddings.
      rotary: rotary position embeddings.
      pre_norm, post_norm, final_norm: keys of `config.model`.
      pool: timm's global_pool; None if the parameters determine it.
      pools_prefix: whether the class token is pooled with the patches.
      image_size: height and width in pixels; None if unknown.
      preprocess: preprocessing of images; None if unknown.
      class_names: class names in label order; empty if unknown.
      notes: a line for each value that is not supported.
    """

    kind: str = "vit"
    num_heads: int = 0
    width: int | None = None
    depth: int | None = None
    patch: int | None = None
    registers: int | None = None
    activation: str = "gelu"
    layer_norm_eps: float = 1e-6
    layer_scale_init: float = 1.0
    posemb_resize: str = "bicubic"
    positions: bool = True
    rotary: Rotary = NONE
    pre_norm: bool = False
    post_norm: bool = False
    final_norm: bool = True
    pool: str | None = None
    pools_prefix: bool = False
    image_size: tuple[int, int] | None = None
    preprocess: Preprocess | None = None
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_TANH = {"activation": "gelu_tanh"}
_CLIP = {"layer_norm_eps": 1e-5, "pre_norm": True}
_EVA02 = {"kind": "eva", "rotary": Rotary("axial", 10_000.0, 16)}
_AXIAL = {"kind": "eva", "rotary": Rotary("axial", 100.0, columns_first=True)}
_MIXED = {"kind": "eva", "rotary": Rotary("mixed", 10.0, columns_first=True)}
_ENORMOUS = {"kind": "eva", "post_norm": True, "num_heads": 16}
_NOT_ADDED = {"positions": False}
_LINGBOT = _NOT_ADDED | {
    "kind": "eva",
    "layer_norm_eps": 1e-5,
    "rotary": Rotary("centered", 100.0, pairs=False),
    "image_size": (512, 512),
}
_DINOV3 = _LINGBOT | {"pool": "avg", "image_size": (256, 256)}
_OLD = r"(_in21k|_in21ft1k|_sam|_dino|_miil|_miil_in21k)?"
GATED = r"vit_giant_patch14_(reg4_)?dinov2|vit_giant_patch14_reg1_tipsv2"
# Facts from timm 1.0.31 that hold for several networks.
_USUAL = (
    (r".*_(huge|giant|gigantic|giantopt|so400m)_.*", {"num_heads": 16}),
    (r".*(_dino|patch14_dinov2)", {"posemb_resize": "bicubic_dino"}),
    (r"vit_(base_patch32|(so400m|giantopt)_patch16)_siglip_.*", _TANH),
    (r"vit_large_patch16_siglip_(gap_)?512.*", _TANH),
)
# Width and depth by a word in the name.
_WORDS = {
    "tiny": (192, 12),
    "wee": (256, 14),
    "xsmall": (256, 10),
    "little": (320, 14),
    "small": (384, 12),
    "medium": (512, 12),
    "mediumd": (512, 20),
    "betwixt": (640, 12),
    "base": (768, 12),
    "so150m2": (832, 21),
    "so150m": (896, 18),
    "large": (1024, 24),
    "intern300m": (1024, 24),
    "so400m": (1152, 27),
    "huge": (1280, 32),
    "giant": (1408, 40),
    "giantopt": (1536, 40),
    "gigantic": (1664, 48),
    "enormous": (1792, 64),
    "7b": (4096, 40),
}
# Sizes by names with another word or another number of registers.
_SIZES = (
    (r".*_base_patch\d+_plus_.*", {"width": 896}),
    (r"vit_giant_\w+_(dinov2|tipsv2|lingbot)|naflexvit_giant_\w+", {"width": 1536}),
    (r".*_36x1_\d+", {"depth": 36}),
    (r"\w+_(dinov3|lingbot)(_qkvb)?", {"registers": 4}),
    (r"naflexvit_\w+", {"registers": None}),
    (r"test_vit", {"width": 64, "depth": 6, "patch": 16, "registers": 0}),
    (r"test_vit2", {"width": 64, "depth": 8, "patch": 16, "registers": 1}),
    (r"test_vit3", {"width": 96, "depth": 9, "patch": 16, "registers": 1}),
)
# ViTs and hybrids with equal logits, including older names, with the facts that only
# timm's code has. If several rows match a name, the last one applies.
# tests/weights/formats/test_timm_registry.py compares them with timm.
NETWORKS = (
    (
        rf"vit_(tiny|small|base|large|huge|giant|gigantic)_patch(8|14|16|32)_\d+{_OLD}",
        {},
    ),
    (
        r"deit3?_(tiny|small|medium|base|large|huge)(_distilled)?_patch1[46]_\d+"
        + _OLD,
        {},
    ),
    (r"vit_base_patch(16|32)_plus_\d+|vit_small_patch16_36x1_224", {}),
    (r"vit_(small|base|large|giant)_patch14(_reg4)?_dinov2", {}),
    (r"vit_(base|large|so400m|giant)_patch14_reg1_tipsv2", {}),
    (GATED, {"num_heads": 24}),
    (r"vit_(betwixt|medium|base)_patch16_reg[14]_gap_\d+", {}),
    (r"vit_(medium|betwixt|base|huge|giant)_patch1[46]_gap_\d+", {}),
    (r"vit_base_patch16_gap_224", {"num_heads": 16}),
    (r"vit_(base|large|so400m|giantopt)_patch(14|16|32)_siglip(_gap)?_\d+", {}),
    (r"flexivit_(small|base|large)|eva_large_patch14_\d+", {}),
    (r"test_vit2?", {"num_heads": 2}),
    (r"test_vit3", {"num_heads": 3, "pools_prefix": True}),
    (r"vit_(tiny_r_s16_p8|(small|base)_r26_s32|base_r50_s16)_\d+(_in21k)?", {}),
    (r"vit_large_r50_s32_\d+(_in21k)?|vit_base_resnet50_(224_in21k|384)", {}),
    (r"vit_\w+_patch\d+(_plus)?_clip_\d+", _CLIP),
    (
        r"vit_\w+_patch\d+(_plus)?_clip_quickgelu_\d+",
        _CLIP | {"activation": "quick_gelu"},
    ),
    (r"beit3_(giant_patch14_\d+|(base|large)_patch16_224)", {"layer_norm_eps": 1e-5}),
    (r"vit_base_patch16_rpn_224", {"post_norm": True}),
    (r"vit_(wee|little|mediumd|so150m2?)_patch16_reg[14]_gap_\d+", {}),
    (r"vit_intern300m_patch14_448", {"final_norm": False}),
    (r"eva02_enormous_patch14_clip_\d+", _ENORMOUS),
    (r"eva_giant_patch14_(clip_)?\d+", {"kind": "eva"}),
    (r"eva02_(tiny|small|base|large)_patch1[46]_(clip_)?\d+", _EVA02),
    (r"vit_\w+_patch16_rope_reg\d_gap_\d+", _EVA02 | _NOT_ADDED),
    (r"vit_\w+_patch16_rope_mixed_\d+", _MIXED | _NOT_ADDED),
    (r"vit_\w+_patch16_rope_mixed_ape_\d+", _MIXED),
    (r"vit_\w+_patch16_rope_\d+", _AXIAL | _NOT_ADDED),
    (r"vit_\w+_patch16_rope_ape_\d+", _AXIAL),
    (r"vit_\w+_patch16_dinov3(_qkvb)?", _DINOV3),
    (r"vit_7b_patch16_dinov3", {"num_heads": 32}),
    (r"vit_huge_plus_patch16_dinov3(_qkvb)?", {"num_heads": 20}),
    (r"vit_\w+_patch16_lingbot", _LINGBOT),
    (r"vit_giant_patch16_lingbot", {"num_heads": 24}),
    (r"beit(v2)?_(base|large)_patch16_\d+", {"kind": "beit", "positions": False}),
)

_RESNETS = (
    r"resnetv2_(50x1|50x3|101x1|101x3|152x2|152x4)_bit(m|m_in21k)?"
    r"|resnetv2_(50x1_bit_distilled|152x2_bit_teacher|152x2_bit_teacher_384)"
)

# Features that are not visible in the parameters, by the name of the architecture.
_UNSEEN = (
    (r"_pe_(core|lang|spatial)_", "rotary position embeddings from 1 on are"),
    (r"sapiens2", "key heads that several query heads share are"),
    (r"_rpn_", "post-norm together with relative position biases is"),
    (r"_reg\d+_", "register tokens of such a network are"),
)

# Features that are visible in the parameters, by the name of the parameter.
_SEEN = (
    (r".*\.rel_pos\.", "relative position biases of such a network (rel_pos) are"),
    (r"blocks\.\d+\.mlp\.(w12|w3)\.", "gated MLPs (SwiGLU) of such a file are"),
    (r".*\.attn\.gate\.", "gated attention (attn.gate) is"),
    (r"blocks\.\d+\.(attns|ffns)\.", "parallel branches (attns, ffns) are"),
    (r"blocks\.\d+\.attn\.lambda_", "differential attention (lambda_q1) is"),
    (r"blocks_token_only\.", "class attention (blocks_token_only) is"),
    (r"patch_embed\.norm\.", "a norm of the patches (patch_embed.norm) is"),
    (r".*\.running_mean", "BatchNorm (running_mean) is"),
)

# Arrays of networks that are identified only by their name: nothing else shows their
# epsilon, activation or rotary embeddings.
_UNSURE = re.compile(
    r"norm_pre\.|(.*\.)?rope\.|blocks\.\d+\.(attn\.([qk]_norm|norm|q_proj)|mlp\.(norm|fc1_g))\."
)
ASK = (
    "keep its config.json in the same folder, or give --architecture=NAME of timm (as "
    '{"architecture": "NAME"} in a config.json)'
)

# Parts of a network; an array in them that has no entry would change the output.
_PARTS = re.compile(
    r"(blocks|patch_embed|norm|fc_norm|attn_pool|cls_token|dist_token|reg_token"
    r"|pos_embed|norm_pre|rope|rel_pos_bias|stem|stages)(\.|$)"
)

# Arguments of any architecture that have no effect at inference.
TRAINING = (
    r"|\w+_rate|weight_init|pretrained|checkpoint_path|cache_dir|scriptable|exportable"
    r"|no_jit|out_indices"
)
_COMMON = (
    r"img_size|patch_size|in_chans|num_classes|embed_dim|depth|num_heads|mlp_ratio"
    r"|qkv_bias|init_values|global_pool|dynamic_img_size|dynamic_img_pad"
)
_EVA_OR_BEIT = (
    r"|\w+_rate|pretrained|head_init_scale|swiglu_mlp|scale_mlp|use_abs_pos_emb"
    r"|use_fc_norm"
)
# Arguments of each class that the parameters show, that do not affect inference, or
# that the format's module handles. Any other argument could change the output
# unnoticed.
_ARGUMENTS = {
    "vit": _COMMON
    + r"|qk_norm|scale_attn_norm|scale_mlp_norm|proj_bias|class_token|no_embed_class"
    + r"|reg_tokens|pre_norm|final_norm|fc_norm|strict_img_size|fix_init|pos_embed"
    + r"|act_layer|pool_include_prefix"
    + TRAINING,
    "eva": _COMMON
    + _EVA_OR_BEIT
    + r"|class_token|num_reg_tokens|no_embed_class|qkv_fused|swiglu_align_to"
    + r"|scale_attn_inner|attn_type|qk_norm|use_rot_pos_emb|rope_type|rope_temperature"
    + r"|rope_rotate_half|rope_grid_indexing|rope_\w+_coords|ref_feat_shape"
    + r"|use_post_norm",
    "beit": _COMMON + _EVA_OR_BEIT + r"|use_rel_pos_bias|use_shared_rel_pos_bias",
}
# Such arguments by a pattern of names of equal architectures; modules of other networks
# add more.
ARCHITECTURES = {
    _RESNETS: r"in_chans|num_classes|global_pool|layers|channels|width_factor|stem_chs"
    + r"|zero_init_last"
    + TRAINING
}
ARCHITECTURES |= {
    names: _ARGUMENTS[facts.get("kind", "vit")] for names, facts in NETWORKS
}
# Arguments that have no effect while they are off.
_OFF = re.compile(
    r"embed_norm_layer|num_kv_heads|attn_only_layer_scale|rope_grid_offset"
    r"|rope_mrope_section|use_pre_transformer_norm|attn_pool_\w+|always_partition"
    r"|head_dim|avg_down|basic|stem_type|stem_norm"
)
_NONE = (None, False, "", "none")

ROPE_TYPES = {"cat": "axial", "dinov3": "centered", "mixed": "mixed"}


def find(name: str) -> Facts:
    """Returns the facts about an architecture that are in timm's code."""
    rows = (*_USUAL, *_SIZES, *NETWORKS)
    rows = [facts for names, facts in rows if re.fullmatch(names, name)]
    facts = (pair for row in (_sizes(name), *rows) for pair in row.items())
    return Facts(**dict(facts))


def _sizes(name: str) -> dict:
    """Returns the sizes that follow from the name of a Vision Transformer."""
    words, patch = set(name.split("_")) & _WORDS.keys(), re.search(r"_patch(\d+)", name)
    if not words or name.startswith("swin"):
        return {}
    width, depth = _WORDS[words.pop()]
    registers = re.search(r"_reg(\d+)_", name)
    return {
        "width": width,
        "depth": depth,
        "patch": int(patch[1]) if patch else None,
        "registers": int(registers[1]) if registers else 0,
    }


def check_sizes(flat: Mapping[str, np.ndarray], config: Mapping, source: str) -> None:
    """Raises UserError if an encoder's sizes differ from its name in config.json.

    Other properties of the name, such as the number of heads, are unknown in that case.
    """
    if "architecture" not in config:
        return
    args, facts = config.get("model_args") or {}, find(architecture_of(config))
    kernel, blocks = flat["patch_embed.proj.weight"], re.compile(r"blocks\.(\d+)\.")
    registers = "num_reg_tokens" if facts.kind == "eva" else "reg_tokens"
    sizes = {
        "embed_dim": (facts.width, len(kernel)),
        "depth": (facts.depth, len({m[1] for m in map(blocks.match, flat) if m})),
        "patch_size": (facts.patch, kernel.shape[-1]),
        registers: (facts.registers, np.shape(flat.get("reg_token", ((),)))[1]),
    }
    wrong = {
        key: (named, actual)
        for key, (named, actual) in sizes.items()
        if args.get(key) is None and named not in (None, actual)
    }
    if wrong:
        named = ", ".join(f"{key}={value}" for key, (value, _) in wrong.items())
        actual = {key: value for key, (_, value) in wrong.items()}
        raise UserError(
            f"architecture={config['architecture']!r} has {named}, but {source} has "
            f"{', '.join(map(str, actual.values()))}: give the architecture of the file; if "
            f'it was made with other arguments, add them as "model_args": '
            f"{json.dumps(actual)} to a config.json"
        )


def check_parameters(
    flat: Mapping[str, np.ndarray], config: Mapping, source: str
) -> None:
    """Raises UserError if arrays show a feature that no model of this project supports."""
    unsupported = [
        what for pattern, what in _SEEN if any(map(re.compile(pattern).match, flat))
    ]
    name = architecture_of(config) if "architecture" in config else ""
    eva = find(name).kind == "eva"
    known = not name or eva or re.fullmatch(GATED, name)
    if is_gated(flat) and not known:
        first, second = (flat[f"blocks.0.mlp.fc{i}.weight"] for i in (1, 2))
        unsupported.append(
            f"a gated MLP ({second.shape[-1]} of {len(first)} features) is"
        )
    if "blocks.0.norm1.weight" in flat and "blocks.0.norm1.bias" not in flat:
        unsupported.append("a norm without bias (RMSNorm) is")
    if unsupported:
        raise unsupported_error(source, *unsupported)
    if name:
        return
    unsure = next(filter(_UNSURE.match, sorted(flat)), None)
    if not any("relative_position_bias" in name for name in flat):
        # Arrays of EVA, or of a network with rotary embeddings; SimMIM has such biases
        # too.
        eva = ("blocks.0.attn.q_bias", "blocks.0.gamma_1")
        unsure = next((name for name in eva if name in flat), unsure)
    if unsure is None and "blocks.0.norm1.weight" in flat:
        # Without these, the number of heads, the activation or the norms may differ.
        # For networks that pool into fc_norm, they differ only with 196 patches.
        positions = np.shape(flat.get("pos_embed"))[1:2]
        pooled = "fc_norm.weight" in flat and positions != (196,)
        usual = ("blocks.0.attn.qkv.bias", *(() if pooled else ("cls_token",)))
        missing = (name for name in usual if name not in flat)
        unsure = next((f"without {name}, it" for name in missing), None)
    if unsure:
        raise UserError(
            f"{source}: {unsure} belongs to a network that its parameters do not identify: "
            f"{ASK}"
        )


def is_gated(flat: Mapping[str, np.ndarray]) -> bool:
    """Returns whether the MLPs store two first layers as one, as for SwiGLU."""
    first, second = (flat.get(f"blocks.0.mlp.fc{i}.weight") for i in (1, 2))
    if first is None or second is None:
        return False
    return len(first) == 2 * second.shape[-1]


def check_names(flat: Mapping, table: Iterable[ArrayEntry], source: str) -> None:
    """Raises UserError if a part of the network has an array that is not in the table."""
    known = {entry.name for entry in table}
    for name in sorted(flat.keys() - known):
        if _PARTS.match(name):
            raise unsupported_error(source, f"{name} is")


def check_config(config: Mapping) -> None:
    """Raises UserError unless an architecture is known to equal a model here."""
    name, args = architecture_of(config), config.get("model_args") or {}
    file = f"architecture={name!r}"
    known = [a for names, a in ARCHITECTURES.items() if re.fullmatch(names, name)]
    if not known:
        if what := next((what for p, what in _UNSEEN if re.search(p, name)), None):
            raise unsupported_error(file, what)
        raise UserError(
            f"{file}: this architecture of timm is not known to be equal to a model "
            "of this project; give weights of a plain Vision Transformer, hybrid or BiT "
            "ResNet"
        )
    for key, value in args.items():
        if key == "norm_layer" and _same_norm(name, value):
            continue
        off = value is None or (value in _NONE and _OFF.fullmatch(key))
        if not off and not re.fullmatch(known[0], key):
            raise unsupported_error(file, f"{key}={value!r} in model_args is")


def architecture_of(config: Mapping) -> str:
    """Returns the name of the architecture without its tag, which describes training."""
    return config["architecture"].partition(".")[0]


def _same_norm(name: str, norm: object) -> bool:
    """Returns whether a norm_layer is the default of an architecture."""
    # timm's LayerNorm has epsilon 1e-6; those of CLIP and Swin differ.
    epsilon = find(name).layer_norm_eps
    other = epsilon != 1e-6 or name.startswith(("resnetv2_", "swin"))
    return not other and str(norm).replace("_", "").lower() == "layernorm"


def check_average(pool: str | None, network: str, source: str) -> None:
    """Raises UserError unless a network without prefix tokens pools by the mean."""
    if pool not in (None, "avg"):
        raise UserError(
            f"{source}: global_pool={pool!r} of {network} is not supported, only 'avg' is"
        )


def unsupported_error(where: str, *what: str) -> UserError:
    """Returns an error for unsupported features, each ending with "is" or "are"."""
    return UserError(
        f"{where}: {' not supported; '.join(what)} not supported: no model here computes "
        "the same; give weights of a network without it"
    )


def read_rotary(args: Mapping, default: Rotary) -> Rotary:
    """Returns the rotary embeddings of model_args, or of the architecture.

    Raises:
      UserError: the embeddings are of another kind, or for a grid that is not square.
    """
    if not args.get("use_rot_pos_emb", default.kind != "none"):
        return NONE
    kind = args.get("rope_type")
    if kind is not None and kind not in ROPE_TYPES:
        raise UserError(
            f"rope_type={kind!r} in config.json is not one of {', '.join(ROPE_TYPES)}, "
            "which models of this project support"
        )
    if default.kind == "none":  # Use the defaults of timm's class Eva.
        default = Rotary("axial", 10_000.0)
    reference = args.get("ref_feat_shape", default.reference) or 0
    sides = {reference} if isinstance(reference, int) else set(reference)
    if len(sides) > 1:
        raise UserError(
            f"ref_feat_shape={reference} in config.json is not square: models of this "
            "project stretch grids to a square"
        )
    kind = ROPE_TYPES[kind] if kind else default.kind
    return Rotary(
        kind,
        float(args.get("rope_temperature", default.temperature)),
        sides.pop() if kind == "axial" else 0,
        not args.get("rope_rotate_half", not default.pairs),
        args.get("rope_grid_indexing", "xy" if default.columns_first else "ij") == "xy",
    )


def to_plain(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames the arrays of any class to those of VisionTransformer.

    Queries, keys and values become one layer with a bias, the two first layers of a
    gated MLP become one layer, and LayerScale becomes a layer.
    """
    flat = {
        re.sub(r"^(blocks\.\d+)\.gamma_(\d)$", r"\1.ls\2.gamma", name): value
        for name, value in flat.items()
    }
    for name in [n for n in flat if re.fullmatch(r"blocks\.\d+\.norm1\.weight", n)]:
        block = name.removesuffix(".norm1.weight")
        attention = f"{block}.attn"
        if f"{attention}.q_proj.weight" in flat:
            _join(flat, attention, ("q_proj", "k_proj", "v_proj"), "qkv")
        if f"{attention}.q_bias" in flat:
            query, value = (flat.pop(f"{attention}.{n}_bias") for n in "qv")
            # Some files have a key bias, which is always 0.
            key = flat.pop(f"{attention}.k_bias", np.zeros_like(query))
            flat[f"{attention}.qkv.bias"] = np.concatenate([query, key, value])
        if f"{block}.mlp.fc1_g.weight" in flat:
            _join(flat, f"{block}.mlp", ("fc1_g", "fc1_x"), "fc1")
        flat.pop(f"{attention}.relative_position_index", None)
    tables = r"rel_pos_bias\.relative_position_index|rope\.(bands|periods|pos_embed)"
    return {name: a for name, a in flat.items() if not re.fullmatch(tables, name)}


def _join(flat: dict, block: str, names: tuple[str, ...], to: str) -> None:
    """Joins layers; if only some have a bias, the missing ones are zeros."""
    kernels = [flat.pop(f"{block}.{name}.weight") for name in names]
    flat[f"{block}.{to}.weight"] = np.concatenate(kernels)
    if any(f"{block}.{name}.bias" in flat for name in names):
        zeros = [np.zeros(len(kernel), kernel.dtype) for kernel in kernels]
        biases = map(flat.pop, (f"{block}.{name}.bias" for name in names), zeros)
        flat[f"{block}.{to}.bias"] = np.concatenate([*biases])


def from_plain(
    flat: dict[str, np.ndarray], kind: str, *, split_gates: bool
) -> dict[str, np.ndarray]:
    """Renames the arrays of VisionTransformer to those of "eva" or "beit".

    With `split_gates`, gated MLPs get two first layers.

    Raises:
      UserError: keys have biases, which timm's Beit does not support.
    """
    renamed = {}
    for name, value in flat.items():
        name = re.sub(r"^(blocks\.\d+)\.ls(\d)\.gamma$", r"\1.gamma_\2", name)
        fc1 = re.fullmatch(r"(blocks\.\d+\.mlp\.fc1)\.(weight|bias)", name)
        if kind == "beit" and name.endswith(".attn.qkv.bias"):
            query, key, value_ = np.split(value, 3)
            if key.any():
                raise UserError(
                    "biases of keys: timm's Beit has none; they do not change attention "
                    "weights, so set them to zeros, or write it with --to=safetensors"
                )
            attention = name.removesuffix("qkv.bias")
            renamed |= {f"{attention}q_bias": query, f"{attention}v_bias": value_}
        elif split_gates and fc1:
            gate, other = np.split(value, 2)
            renamed |= {f"{fc1[1]}_g.{fc1[2]}": gate, f"{fc1[1]}_x.{fc1[2]}": other}
        else:
            renamed[name] = value
    return renamed


def turn_features(
    params: dict[str, np.ndarray], rotary: Rotary, *, back: bool = False
) -> dict[str, np.ndarray]:
    """Reorders the features of queries and keys for this project's rotary embeddings.

    Attention weights are inner products over these features, so their order does not
    matter. With `back`, the features are reordered for timm.
    """
    params = dict(params)
    names = r".*/(query|key)/(kernel|bias)|.*/LayerNorm_(query|key)/\w+"
    for name in [name for name in params if re.fullmatch(names, name)]:
        K = params[name].shape[-1]
        angle = np.arange(K // 2)
        if rotary.columns_first and rotary.kind != "mixed":
            angle = np.roll(angle, K // 4)
        pair = (2 * angle, 2 * angle + 1) if rotary.pairs else (angle, angle + K // 2)
        order = np.concatenate(pair)  # For each feature, its index in timm's order.
        params[name] = params[name][..., np.argsort(order) if back else order]
    name = "Transformer/rope_frequencies"
    if name in params and rotary.columns_first:
        params[name] = params[name][:, ::-1]
    return params

"""What timm's Eva and Beit classes, and further names of its ViTs, have of their own.

Their parameters are renamed to those of timm's VisionTransformer, which timm.py reads, and
back. Letters: D model width, H heads, K head width.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.pretrained import Preprocess


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings as timm has them.

    Attributes:
      kind, temperature, reference: `rope`, `rope_temperature` and `rope_reference` of our
        models.
      pairs: whether neighbouring features are turned together, not those K/2 apart.
      columns_first: whether a head's first features are turned by the column.
    """

    kind: str = "none"
    temperature: float = 100.0
    reference: int = 0
    pairs: bool = True
    columns_first: bool = False


NONE = Rotary()


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the name of a network and its config.json say; the defaults are a plain ViT's.

    Attributes:
      kind: class in timm: "vit", "eva" or "beit".
      num_heads: attention heads; 0 if unknown.
      activation: of the MLPs that are not gated.
      layer_norm_eps: of the LayerNorms.
      layer_scale_init: what LayerScale began with.
      posemb_resize: how position embeddings were resized in training.
      positions: whether there are embeddings that are added.
      rotary: position embeddings that turn features.
      pre_norm, post_norm, final_norm: see vit.VisionTransformer.
      pool: timm's global_pool; None if the parameters show it.
      pools_prefix: whether the class token is pooled with the patches.
      image_size: height and width; None if unknown.
      preprocess: how images are prepared, or None.
      class_names: in label order.
      notes: a line for each value that is not supported.
    """

    kind: str = "vit"
    num_heads: int = 0
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
# Facts of timm 1.0.31 that hold for names beyond one network.
_USUAL = (
    (r".*_(huge|giant|gigantic|giantopt|so400m)_.*", {"num_heads": 16}),
    (r".*(_dino|patch14_dinov2)", {"posemb_resize": "bicubic_dino"}),
    (r"vit_(base_patch32|(so400m|giantopt)_patch16)_siglip_.*", _TANH),
    (r"vit_large_patch16_siglip_(gap_)?512.*", _TANH),
)
# ViTs and hybrids with equal logits, with their older names, and what only their code says.
# Of rows that match a name the last one holds. tests/weights/formats/test_timm_registry.py
# compares them with timm.
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

ROPE_TYPES = {"cat": "axial", "dinov3": "centered", "mixed": "mixed"}


def find(name: str) -> Facts:
    """Returns what timm's code says of an architecture."""
    rows = (facts for names, facts in (*_USUAL, *NETWORKS) if re.fullmatch(names, name))
    return Facts(**{key: value for facts in rows for key, value in facts.items()})


def read_rotary(args: Mapping, own: Rotary) -> Rotary:
    """Returns the rotary embeddings that model_args and the network's name state."""
    if not args.get("use_rot_pos_emb", own.kind != "none"):
        return NONE
    kind = args.get("rope_type")
    if kind is not None and kind not in ROPE_TYPES:
        raise UserError(
            f"rope_type={kind!r} in config.json is not one of {', '.join(ROPE_TYPES)}, "
            "which models of this project have"
        )
    if own.kind == "none":  # Eva's own defaults.
        own = Rotary("axial", 10_000.0)
    reference = args.get("ref_feat_shape", own.reference) or 0
    sides = {reference} if isinstance(reference, int) else set(reference)
    if len(sides) > 1:
        raise UserError(
            f"ref_feat_shape={reference} in config.json is not square: models of this "
            "project stretch grids to a square"
        )
    kind = ROPE_TYPES[kind] if kind else own.kind
    return Rotary(
        kind,
        float(args.get("rope_temperature", own.temperature)),
        sides.pop() if kind == "axial" else 0,
        not args.get("rope_rotate_half", not own.pairs),
        args.get("rope_grid_indexing", "xy" if own.columns_first else "ij") == "xy",
    )


def to_plain(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames the parameters of any class as those of VisionTransformer.

    Queries, keys and values become one layer with a bias, as do the two first layers of a
    gated MLP, and LayerScale a layer.
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
            # Some files hold what is always 0.
            key = flat.pop(f"{attention}.k_bias", np.zeros_like(query))
            flat[f"{attention}.qkv.bias"] = np.concatenate([query, key, value])
        if f"{block}.mlp.fc1_g.weight" in flat:
            _join(flat, f"{block}.mlp", ("fc1_g", "fc1_x"), "fc1")
        flat.pop(f"{attention}.relative_position_index", None)
    tables = r"rel_pos_bias\.relative_position_index|rope\.(bands|periods|pos_embed)"
    return {name: a for name, a in flat.items() if not re.fullmatch(tables, name)}


def _join(flat: dict, block: str, names: tuple[str, ...], to: str) -> None:
    """Joins layers; a missing bias beside others is zeros."""
    kernels = [flat.pop(f"{block}.{name}.weight") for name in names]
    flat[f"{block}.{to}.weight"] = np.concatenate(kernels)
    if any(f"{block}.{name}.bias" in flat for name in names):
        zeros = [np.zeros(len(kernel), kernel.dtype) for kernel in kernels]
        biases = map(flat.pop, (f"{block}.{name}.bias" for name in names), zeros)
        flat[f"{block}.{to}.bias"] = np.concatenate([*biases])


def from_plain(
    flat: dict[str, np.ndarray], kind: str, *, split_gates: bool
) -> dict[str, np.ndarray]:
    """Renames the parameters of VisionTransformer as those of "eva" or "beit".

    `split_gates` tells whether the first layers of gated MLPs are two.
    """
    renamed = {}
    for name, value in flat.items():
        name = re.sub(r"^(blocks\.\d+)\.ls(\d)\.gamma$", r"\1.gamma_\2", name)
        fc1 = re.fullmatch(r"(blocks\.\d+\.mlp\.fc1)\.(weight|bias)", name)
        if kind == "beit" and name.endswith(".attn.qkv.bias"):
            query, key, value_ = np.split(value, 3)
            if key.any():
                raise UserError(
                    "biases of keys: timm's Beit has none; they change no attention "
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
    ours: dict[str, np.ndarray], rotary: Rotary, *, back: bool = False
) -> dict[str, np.ndarray]:
    """Orders the features of queries and keys as our rotary embeddings turn them.

    Attention weights are products over these features, so their order is free.

    Args:
      ours: our arrays by name.
      rotary: order that they have.
      back: whether they have ours and get that one.
    """
    ours, names = (
        dict(ours),
        r".*/(query|key)/(kernel|bias)|.*/LayerNorm_(query|key)/\w+",
    )
    for name in [name for name in ours if re.fullmatch(names, name)]:
        K = ours[name].shape[-1]
        angle = np.arange(K // 2)
        if rotary.columns_first and rotary.kind != "mixed":
            angle = np.roll(angle, K // 4)
        pair = (2 * angle, 2 * angle + 1) if rotary.pairs else (angle, angle + K // 2)
        order = np.concatenate(pair)  # The place in theirs of each feature of ours.
        ours[name] = ours[name][..., np.argsort(order) if back else order]
    name = "Transformer/rope_frequencies"
    if name in ours and rotary.columns_first:
        ours[name] = ours[name][:, ::-1]
    return ours

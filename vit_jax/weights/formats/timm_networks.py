"""What timm's Eva and Beit classes, and further names of its ViTs, have of their own.

Their parameters are renamed to those of timm's VisionTransformer, which timm.py reads, and
back. Letters: D model width, H heads, K head width.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError


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
class Defaults:
    """What only timm's code says of an architecture.

    Attributes:
      pattern: of the names of architectures.
      kind: class in timm: "vit", "eva" or "beit".
      epsilon: of the LayerNorms.
      activation: of the MLPs that are not gated.
      rotary: its position embeddings.
      positions: whether there are also embeddings that are added.
      post_norm: see vit.VisionTransformer.
      num_heads: 0 if it is one per 64 features.
      pre_norm, final_norm: see vit.VisionTransformer.
      pool: timm's global_pool, None where the parameters show it.
      image_size: side in pixels, 0 if the name or the positions tell it.
    """

    pattern: str
    kind: str = "vit"
    epsilon: float = 1e-6
    activation: str = "gelu"
    rotary: Rotary = NONE
    positions: bool = True
    post_norm: bool = False
    num_heads: int = 0
    pre_norm: bool = False
    final_norm: bool = True
    pool: str | None = None
    image_size: int = 0


_EVA02 = Rotary("axial", 10_000.0, 16)
_AXIAL = Rotary("axial", 100.0, columns_first=True)
_MIXED = Rotary("mixed", 10.0, columns_first=True)
_DINOV3 = Rotary("centered", 100.0, pairs=False)

# Networks of timm 1.0.31; tests/weights/formats/test_timm_registry.py compares them with it.
_CLIP = {"epsilon": 1e-5, "pre_norm": True}
_LINGBOT = {"kind": "eva", "epsilon": 1e-5, "rotary": _DINOV3, "positions": False}
_OF_DINOV3 = _LINGBOT | {"pool": "avg", "image_size": 256}
_LINGBOT |= {"image_size": 512}
NETWORKS = (
    Defaults(
        r"vit_(huge|giant|gigantic)_patch14_clip_quickgelu_\d+",
        **_CLIP,
        activation="quick_gelu",
        num_heads=16,
    ),
    Defaults(
        r"vit_\w+_patch\d+(_plus)?_clip_quickgelu_\d+", **_CLIP, activation="quick_gelu"
    ),
    Defaults(r"vit_(huge|giant|gigantic)_patch14_clip_\d+", **_CLIP, num_heads=16),
    Defaults(r"vit_\w+_patch\d+(_plus)?_clip_\d+", **_CLIP),
    Defaults(r"beit3_giant_patch14_\d+", "vit", 1e-5, num_heads=16),
    Defaults(r"beit3_(base|large)_patch16_224", "vit", 1e-5),
    Defaults(r"vit_base_patch16_rpn_224", post_norm=True),
    Defaults(r"vit_(wee|little|mediumd|so150m2?)_patch16_reg[14]_gap_\d+"),
    Defaults(r"test_vit3", num_heads=3),
    Defaults(r"vit_intern300m_patch14_448", final_norm=False),
    Defaults(r"eva02_enormous_patch14_clip_\d+", "eva", post_norm=True, num_heads=16),
    Defaults(r"eva_giant_patch14_(clip_)?\d+", "eva", num_heads=16),
    Defaults(
        r"eva02_(tiny|small|base|large)_patch1[46]_(clip_)?\d+", "eva", rotary=_EVA02
    ),
    Defaults(
        r"vit_\w+_patch16_rope_reg\d_gap_\d+", "eva", rotary=_EVA02, positions=False
    ),
    Defaults(r"vit_\w+_patch16_rope_mixed_\d+", "eva", rotary=_MIXED, positions=False),
    Defaults(r"vit_\w+_patch16_rope_mixed_ape_\d+", "eva", rotary=_MIXED),
    Defaults(r"vit_\w+_patch16_rope_\d+", "eva", rotary=_AXIAL, positions=False),
    Defaults(r"vit_\w+_patch16_rope_ape_\d+", "eva", rotary=_AXIAL),
    Defaults(r"vit_7b_patch16_dinov3", **_OF_DINOV3, num_heads=32),
    Defaults(r"vit_huge_plus_patch16_dinov3(_qkvb)?", **_OF_DINOV3, num_heads=20),
    Defaults(r"vit_\w+_patch16_dinov3(_qkvb)?", **_OF_DINOV3),
    Defaults(r"vit_giant_patch16_lingbot", **_LINGBOT, num_heads=24),
    Defaults(r"vit_\w+_patch16_lingbot", **_LINGBOT),
    Defaults(r"beit(v2)?_(base|large)_patch16_\d+", "beit", positions=False),
)

_COMMON = (
    r"img_size|patch_size|in_chans|num_classes|embed_dim|depth|num_heads|mlp_ratio"
    r"|qkv_bias|init_values|global_pool|dynamic_img_size|dynamic_img_pad|head_init_scale"
    r"|\w+_rate|swiglu_mlp|scale_mlp|use_abs_pos_emb|pretrained"
)
_OF_EVA = (
    r"|class_token|num_reg_tokens|no_embed_class|use_fc_norm|qkv_fused|swiglu_align_to"
    r"|scale_attn_inner|attn_type|qk_norm|use_rot_pos_emb|rope_type|rope_temperature"
    r"|rope_rotate_half|rope_grid_indexing|rope_\w+_coords|ref_feat_shape|use_post_norm"
)
_OF_BEIT = r"|use_rel_pos_bias|use_shared_rel_pos_bias|use_fc_norm"

# Arguments of each class that this module or the parameters account for.
ARGUMENTS = {"eva": _COMMON + _OF_EVA, "beit": _COMMON + _OF_BEIT}

_ROPE_TYPES = {"cat": "axial", "dinov3": "centered", "mixed": "mixed"}


def find(name: str) -> Defaults | None:
    """Returns what timm's code says of an architecture, None if it is not listed."""
    return next((d for d in NETWORKS if re.fullmatch(d.pattern, name)), None)


def read_rotary(args: Mapping, own: Defaults) -> Rotary:
    """Returns the rotary embeddings of a network.

    Args:
      args: model_args of config.json.
      own: of its architecture.

    Raises:
      UserError: no model here has them.
    """
    if not args.get("use_rot_pos_emb", own.rotary.kind != "none"):
        return NONE
    kind = args.get("rope_type")
    if kind is not None and kind not in _ROPE_TYPES:
        raise UserError(
            f"rope_type={kind!r} in config.json is not one of {', '.join(_ROPE_TYPES)}, "
            "which models of this project have"
        )
    rotary = own.rotary
    if rotary.kind == "none":  # Eva's own defaults.
        rotary = Rotary("axial", 10_000.0)
    reference = args.get("ref_feat_shape", rotary.reference) or 0
    sides = {reference} if isinstance(reference, int) else set(reference)
    if len(sides) > 1:
        raise UserError(
            f"ref_feat_shape={reference} in config.json is not square: models of this "
            "project stretch grids to a square"
        )
    kind = _ROPE_TYPES[kind] if kind else rotary.kind
    return Rotary(
        kind,
        float(args.get("rope_temperature", rotary.temperature)),
        sides.pop() if kind == "axial" else 0,
        not args.get("rope_rotate_half", not rotary.pairs),
        args.get("rope_grid_indexing", "xy" if rotary.columns_first else "ij") == "xy",
    )


def to_plain(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames the parameters of any class as those of VisionTransformer.

    Args:
      flat: arrays by name.

    Returns:
      Queries, keys and values as one layer with a bias, the two first layers of a gated
      MLP as one, LayerScale as a layer, and a bias of the patches.
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
    biases = [flat.pop(f"{block}.{name}.bias", None) for name in names]
    if any(bias is not None for bias in biases):
        flat[f"{block}.{to}.bias"] = np.concatenate(
            [
                np.zeros(len(kernel), kernel.dtype) if bias is None else bias
                for kernel, bias in zip(kernels, biases, strict=True)
            ]
        )


def from_plain(
    flat: dict[str, np.ndarray], kind: str, *, split_gates: bool
) -> dict[str, np.ndarray]:
    """Renames the parameters of VisionTransformer as those of another class.

    Args:
      flat: arrays by name.
      kind: "eva" (with attn_type="rope") or "beit".
      split_gates: whether the first layers of gated MLPs are two.

    Raises:
      UserError: the class has no bias of keys, and these are not 0.
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
    ours = dict(ours)
    names = re.compile(r".*/(query|key)/(kernel|bias)|.*/LayerNorm_(query|key)/\w+")
    for name in filter(names.fullmatch, ours):
        order = _order(ours[name].shape[-1], rotary)
        ours[name] = ours[name][..., np.argsort(order) if back else order]
    name = "Transformer/rope_frequencies"
    if name in ours and rotary.columns_first:
        ours[name] = ours[name][:, ::-1]
    return ours


def _order(K: int, rotary: Rotary) -> np.ndarray:
    """Returns the place in their order of each feature in ours."""
    angle = np.arange(K // 2)
    if rotary.columns_first and rotary.kind != "mixed":
        angle = np.roll(angle, K // 4)
    if rotary.pairs:
        return np.concatenate([2 * angle, 2 * angle + 1])
    return np.concatenate([angle, angle + K // 2])

"""Backbones of facebookresearch/dinov3: to timm's names and back; dino.py reads files.

They have rotary positions, whose periods are in the file. `local_cls_norm`, which
training applies to small crops only, is read separately from the network, like the mask
token.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats import tables
from vit_jax.weights.formats.timm_networks import Rotary

PERIODS = "rope_embed.periods"
SMALL_NORM = "local_cls_norm."
# Parameters of the task `dinov2`, see tasks/dinov2.py.
_SMALL_NORM = {"weight": "small_norm_scale", "bias": "small_norm_bias"}
_TO_TIMM = (
    (r"^storage_tokens$", "reg_token"),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)
_BIAS = ".attn.qkv.bias"
_MASK = f"{_BIAS}_mask"


def to_timm(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a backbone under timm's names, with its periods and the small norm."""
    flat = tables.rename(flat, _TO_TIMM)
    for name in [name for name in flat if name.endswith(_MASK)]:
        bias = name.removesuffix("_mask")  # The mask is 0 for keys.
        flat[bias] = flat[bias] * flat.pop(name)
    return flat


def from_timm(
    flat: Mapping[str, np.ndarray], options: Mapping
) -> dict[str, np.ndarray]:
    """Returns a backbone under dinov3's names; `options` are complete."""
    flat = tables.rename(flat, [(r"^reg_token$", "storage_tokens")])
    if options["activation"] == "swiglu":
        flat = tables.rename(flat, [(r"\.mlp\.fc2\.", ".mlp.w3.")])
        for name in [name for name in flat if ".mlp.fc1." in name]:
            gate, other = np.split(flat.pop(name), 2)
            flat[name.replace(".fc1.", ".w1.")] = gate
            flat[name.replace(".fc1.", ".w2.")] = other
    if options["layer_norm_eps"] == 1e-5:  # See `epsilon`.
        for name in [name for name in flat if name.endswith(_BIAS)]:
            mask = np.ones_like(flat[name]).reshape(3, -1)
            mask[1] = flat[name].reshape(3, -1)[1].any()
            flat[f"{name}_mask"] = mask.reshape(-1)
    n = options["width"] // options["num_heads"] // 4
    periods = options["rope_temperature"] ** (np.arange(n) / n)
    return flat | {PERIODS: periods.astype(np.float32)}


def config(flat: Mapping[str, np.ndarray], source: str) -> dict:
    """Returns the config.json of the timm network that is equal to a backbone.

    Raises:
      UserError: the periods are not powers of one base.
    """
    periods = flat[PERIODS].astype(np.float64)
    n, width = len(periods), len(flat["patch_embed.proj.weight"])
    estimate = periods[-1] ** (n / (n - 1)) if n > 1 else 100.0
    # In float32 they determine the base; in bfloat16 (0.4 % error) it must be round.
    for digits, error in ((6, 1e-5), (2, 0.005)):
        base = float(f"{estimate:.{digits}g}")
        if np.allclose(periods, base ** (np.arange(n) / n), rtol=error):
            break
    else:
        raise UserError(
            f"{source}: {PERIODS} are not the powers of a base, unlike in published "
            "networks: give weights of a network with pos_embed_rope_base"
        )
    args = {
        "num_heads": width // (4 * n),
        "rope_temperature": base,
        "global_pool": "token",
        "embed_dim": width,
        "depth": tables.count_blocks(flat, "blocks."),
        "patch_size": flat["patch_embed.proj.weight"].shape[-1],
        "num_reg_tokens": np.shape(flat.get("reg_token", ((),)))[1],
    }
    return {"architecture": "vit_base_patch16_dinov3_qkvb", "model_args": args}


def epsilon(names: Iterable[str]) -> float:
    """Returns the epsilon of a backbone's norms, guessed from the names of its arrays.

    Published networks have 1e-5, and no biases of keys. Networks trained with the
    defaults of the code, as in vitl_im1k_lin834.yaml, have 1e-6, and biases without a
    mask.
    """
    names = list(names)
    has = lambda end: any(name.endswith(end) for name in names)
    return 1e-6 if has(_BIAS) and not has(_MASK) else 1e-5


def rotary(options: Mapping) -> Rotary:
    """Returns a network's rotary positions, in these backbones' order of features."""
    return Rotary("centered", options["rope_temperature"], pairs=False)


def read_small_norm(backbone: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the task's parameters for a backbone's `local_cls_norm`, if any."""
    arrays = tables.below(backbone, SMALL_NORM)
    return {_SMALL_NORM[name]: value for name, value in arrays.items()}


def write_small_norm(params: Mapping) -> dict[str, np.ndarray]:
    """Returns a backbone's `local_cls_norm` arrays from the parameters of a task."""
    names = {param: f"{SMALL_NORM}{name}" for name, param in _SMALL_NORM.items()}
    return {names[name]: params[name] for name in names if name in params}

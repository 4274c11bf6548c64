"""Which of timm's architectures, with which arguments, is a network of ours."""

import math
from collections.abc import Mapping

from vit_jax.errors import UserError

_POOLS = {"token": "token", "gap": "avg", "map": "map", "none": ""}
_SIZES = {
    192: ("tiny", (16,)),
    384: ("small", (8, 16, 32)),
    768: ("base", (8, 16, 32)),
    1024: ("large", (14, 16, 32)),
    1280: ("huge", (14,)),
    1408: ("giant", (14,)),
    1664: ("gigantic", (14,)),
}
# By the units of each stage; the width of their encoder can be any.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def choose(options: Mapping) -> tuple[str, dict, dict]:
    """Chooses an architecture.

    Args:
      options: all of them, as of `models.Model`.

    Returns:
      Its name, its arguments, and what loading needs to know about its layers.

    Raises:
      UserError: timm has none.
    """
    return _transformer(options) if "depth" in options else _resnet(options)


def _transformer(options: Mapping) -> tuple[str, dict, dict]:
    name = _architecture(options)
    width, mlp_dim = options["width"], options["mlp_dim"]
    ratio = mlp_dim / width
    if int(width * ratio) != mlp_dim:  # timm cuts the product off.
        ratio = math.nextafter(ratio, math.inf)
    args = {
        "img_size": list(options["image_size"]),
        "patch_size": options["patch"],
        "in_chans": options["channels"],
        "embed_dim": width,
        "depth": options["depth"],
        "num_heads": options["heads"],
        "mlp_ratio": ratio,
        "global_pool": _POOLS[options["head"]],
        "class_token": options["head"] == "token" or options["class_token"],
        "fc_norm": options["pooled_norm"],
        "pos_embed": "none" if options["posemb"] == "none" else "learn",
        "act_layer": "gelu_tanh" if options["gelu"] == "tanh" else "gelu",
    }
    if options["head"] == "map":
        args["pool_include_prefix"] = True
    if options["epsilon"] == 1e-5:
        args["pre_norm"] = False
    first = "patch_embed.proj"
    if options["stem_width"]:
        stem = "stem." if options["blocks"] else ""
        first = f"patch_embed.backbone.{stem}conv"
    heads = ["head", "head_dist"] if options["distillation"] else "head"
    return (
        name,
        args,
        {"fixed_input_size": True, "first_conv": first, "classifier": heads},
    )


def _architecture(options: Mapping) -> str:
    """Returns the architecture whose arguments make the network."""
    size, patches = _SIZES.get(options["width"], ("", ()))
    odd = options["epsilon"] != 1e-6
    if options["stem_width"]:
        if options["blocks"] not in _HYBRIDS or options["stem_width"] != 64 or odd:
            raise UserError(
                f"timm has no hybrid with blocks={options['blocks']}, "
                f"stem_width={options['stem_width']} and epsilon={options['epsilon']}: "
                "write it with --to=google or --to=safetensors"
            )
        return _HYBRIDS[options["blocks"]]
    if odd and (options["epsilon"] != 1e-5 or options["distillation"]):
        raise UserError(
            f"epsilon={options['epsilon']} cannot be stated in timm's config.json "
            "(1e-6 can, and 1e-5 without distillation): write it with --to=hf"
        )
    if options["distillation"]:
        size = size if size in ("tiny", "small") else "base"
        return f"deit_{size}_distilled_patch16_224"
    if odd:  # The only plain encoders there with that epsilon, but for a first norm.
        return "vit_base_patch16_clip_224"
    if options["patch"] in patches:
        return f"vit_{size}_patch{options['patch']}_224"
    return "vit_base_patch16_224"


def _resnet(options: Mapping) -> tuple[str, dict, dict]:
    layers = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
    blocks, stem_width = options["blocks"], options["stem_width"]
    if blocks not in layers:
        raise UserError(
            f"timm has no BiT ResNet with blocks={blocks}, only with "
            f"{', '.join(map(str, layers))}: write it with --to=google or "
            "--to=safetensors"
        )
    factor = 2 if layers[blocks] == 152 else 1
    args = {"in_chans": options["channels"]}
    if stem_width != 64 * factor:
        # Over the factor of the architecture, which cannot be replaced.
        args["stem_chs"] = stem_width // factor
        args["channels"] = [stem_width * 4 * 2**i // factor for i in range(4)]
    traits = {
        "fixed_input_size": False,
        "first_conv": "stem.conv",
        "classifier": "head.fc",
    }
    return f"resnetv2_{layers[blocks]}x{factor}_bit", args, traits

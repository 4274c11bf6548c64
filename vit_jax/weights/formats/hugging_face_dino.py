"""DINOv2 and DINOv3 of transformers.

DINOv2 (arXiv:2304.07193) is Dinov2Model, or Dinov2WithRegistersModel if it has
registers. DINOv3 (arXiv:2508.10104) has rotary positions.
"""

from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats import dino, hugging_face
from vit_jax.weights.formats.hugging_face import KEYS, MASK_TOKEN, Arrays, Family
from vit_jax.weights.formats.hugging_face_vit import ATTENTION, IN_MEMORY
from vit_jax.weights.formats.tables import SAME, ArrayEntry, block, name_entries
from vit_jax.weights.pretrained import POSITIONS

_REGISTERS = "embeddings.register_tokens"
_DINOV2_TYPES = ("dinov2", "dinov2_with_registers")
_GATE = "layer.0.mlp.gate_proj.weight"  # Only DINOv3 has this array.
_TOKENS = {
    "cls": ("embeddings.cls_token", SAME),
    "register_tokens": (_REGISTERS, SAME),
}
_BLOCK = {
    "norm1": "norm1",
    "scale1": "layer_scale1.lambda1",
    "norm2": "norm2",
    "scale2": "layer_scale2.lambda1",
}


def _usage(options: Mapping) -> tuple[str, str]:
    output = "logits" if options["num_classes"] else "pooler_output: the features"
    return "", f"  # .{output}"


def _is_dinov2(flat: Arrays, kind: str | None) -> bool:
    needed = {
        "embeddings.patch_embeddings.projection.weight",
        "encoder.layer.0.layer_scale1.lambda1",
    }
    return needed <= flat.keys() and kind in (None, *_DINOV2_TYPES)


def _dinov2_mlp(options: Mapping) -> list[ArrayEntry]:
    parts = {"Dense_0": "fc1", "Dense_1": "fc2"}
    if options["activation"] == "swiglu":
        parts = {"gate,Dense_0": "weights_in", "Dense_1": "weights_out"}
    mlp = "Transformer/encoderblock_#/MlpBlock_3"
    names = {f"{mlp}/{k}": f"encoder.layer.#.mlp.{v}" for k, v in parts.items()}
    return name_entries(names, options)


def _dinov2_options(flat: Arrays, config: Mapping) -> dict:
    options = {
        "pool": "token_gap" if "classifier.weight" in flat else "token",
        "posemb_resize": "bicubic" if _REGISTERS in flat else "bicubic_dino",
    }
    swiglu = "encoder.layer.0.mlp.weights_in.weight" in flat
    return options | ({"activation": "swiglu"} if swiglu else {})


def _dinov2_config(options: Mapping) -> dict:
    width, mlp_dim = options["width"], options["mlp_dim"]
    swiglu = options["activation"] == "swiglu"
    registers = options["num_register_tokens"]

    def hidden(ratio):
        # Gated MLPs have two thirds as many units, rounded up to a multiple of 8.
        return (width * ratio * 2 // 3 + 7) // 8 * 8 if swiglu else width * ratio

    ratio = next((r for r in range(1, 65) if hidden(r) == mlp_dim), None)
    if ratio is None:
        raise UserError(
            f"mlp_dim={mlp_dim}: Dinov2Model of transformers has {hidden(4)}, or another "
            f"multiple of the width, {width}: write it with --to=timm"
        )
    config = {"qkv_bias": True, "mlp_ratio": ratio, "use_swiglu_ffn": swiglu}
    if not registers:
        return config | {"use_mask_token": False}
    return config | {
        "architectures": [hugging_face.architecture("Dinov2WithRegisters", options)],
        "model_type": "dinov2_with_registers",
        "num_register_tokens": registers,
    }


def _finish_dinov2(arrays: Arrays, options: Mapping) -> list[str]:
    if options["num_register_tokens"]:  # Dinov2WithRegisters always has a mask token.
        arrays[MASK_TOKEN] = np.zeros((1, options["width"]), np.float32)
    return []


DINOV2 = Family(
    name="Hugging Face DINOv2",
    format="dinov2",
    to="hf_dinov2",
    network="Dinov2",
    model_types=_DINOV2_TYPES,
    claims=_is_dinov2,
    renames=((r"^(dinov2|dinov2_with_registers)\.", ""),),
    in_memory=IN_MEMORY[1:6],  # Of attention.
    names={
        "embedding": "embeddings.patch_embeddings.projection",
        POSITIONS: ("embeddings.position_embeddings", SAME),
        **_TOKENS,
        **block("encoder.layer", **_BLOCK, **ATTENTION),
        "Transformer/encoder_norm": "layernorm",
        "head": "classifier",
    },
    more_names=_dinov2_mlp,
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-6, "layerscale_value": 1.0},
    keys={k: v for k, v in KEYS.items() if k != "intermediate_size"}
    | {"layerscale_value": "layer_scale_init"},
    prepare=lambda flat, config: hugging_face.drop_pretraining(flat),
    finish=_finish_dinov2,
    options=_dinov2_options,
    has=lambda options: {
        "pool": ("token_gap",) if options["num_classes"] else ("token",),
        "activation": (*hugging_face.ACTIVATIONS, "swiglu"),
    },
    others="--to=timm, --to=hf or --to=safetensors",
    config=_dinov2_config,
    usage=_usage,
    square=True,
    any_size=True,
    preprocess=dino.preprocess,
)


def _prepare_dinov3(flat: Arrays, config: Mapping) -> list[str]:
    if _REGISTERS in flat and not flat[_REGISTERS].size:
        del flat[_REGISTERS]
    notes = hugging_face.drop_pretraining(flat)
    return notes + hugging_face.add_biases(flat, r"^layer\..*(_proj)$")


def _finish_dinov3(arrays: Arrays, options: Mapping) -> list[str]:
    width = options["width"]
    arrays.setdefault(_REGISTERS, np.zeros((1, 0, width), np.float32))
    arrays[MASK_TOKEN] = np.zeros((1, 1, width), np.float32)
    return []


def _dinov3_options(flat: Arrays, config: Mapping) -> dict:
    return {"activation": "swiglu"} if _GATE in flat else {}


def _dinov3_config(options: Mapping) -> dict:
    gate = options["activation"] == "swiglu"
    biases = ("query", "key", "value", "proj", "mlp")
    return {
        "use_gated_mlp": gate,
        **({"hidden_act": "silu"} if gate else {}),
        "num_register_tokens": options["num_register_tokens"],
        **{f"{name}_bias": True for name in biases},
    }


DINOV3 = Family(
    name="Hugging Face DINOv3",
    format="dinov3",
    to="hf_dinov3",
    network="DINOv3ViT",
    model_types=("dinov3_vit",),
    claims=lambda flat, kind: (
        {
            "embeddings.patch_embeddings.weight",
            "layer.0.layer_scale1.lambda1",
        }
        <= flat.keys()
    ),
    in_memory=((r"^layer\.", "model.layer."),),
    names={
        "embedding": "embeddings.patch_embeddings",
        **_TOKENS,
        **block(
            "layer",
            **_BLOCK,
            query="attention.q_proj",
            key="attention.k_proj",
            value="attention.v_proj",
            out="attention.o_proj",
            fc1="mlp.up_proj",
            fc2="mlp.down_proj",
            gate="mlp.gate_proj",
        ),
        "Transformer/encoder_norm": "norm",
    },
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "layerscale_value": 1.0,
        "rope_theta": 100.0,
    },
    keys=KEYS
    | {"layerscale_value": "layer_scale_init", "rope_theta": "rope_temperature"},
    must={"hidden_act": ("silu", _GATE)},
    prepare=_prepare_dinov3,
    finish=_finish_dinov3,
    fixed={"num_classes": 0, "pool": "token", "rope": "centered", "posemb": "none"},
    options=_dinov3_options,
    has=lambda options: {
        "activation": (*hugging_face.ACTIVATIONS, "swiglu"),
    },
    config=_dinov3_config,
    usage=_usage,
    any_size=True,
    preprocess=dino.preprocess,
)

hugging_face.register(DINOV2)
hugging_face.register(DINOV3)

"""ViT, DeiT and I-JEPA of transformers.

DeiT may have a distillation token. I-JEPA (arXiv:2301.08243) has no class token and
classifies the mean of the patches. State dicts with the names that transformers 5 uses
in memory (`vit.layers.0.attention.q_proj...`) are read too.
"""

import re
from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats import hugging_face
from vit_jax.weights.formats.hugging_face import RESIZE_KEY, Arrays, Family
from vit_jax.weights.formats.tables import SAME, ArrayEntry, block
from vit_jax.weights.pretrained import POSITIONS

# Names in the memory of transformers 5, and in files; applied in this order.
_NAMES_IN_MEMORY = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
# The inverse, for names of layers; shared with BEiT.
IN_MEMORY = (
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.attention\.(query|key|value)$", r".attention.\1"),
    (r"\.query$", ".q_proj"),
    (r"\.key$", ".k_proj"),
    (r"\.value$", ".v_proj"),
    (r"\.attention\.output\.dense$", ".attention.o_proj"),
    (r"\.intermediate\.dense$", ".mlp.fc1"),
    (r"\.output\.dense$", ".mlp.fc2"),
)
_PATCHES = "embeddings.patch_embeddings.projection"
_QUERY = "encoder.layer.0.attention.attention.query.weight"
_POOLER = "pooler.dense.weight"
_DISTILLATION = "embeddings.distillation_token"

ATTENTION = {part: f"attention.attention.{part}" for part in ("query", "key", "value")}
ATTENTION["out"] = "attention.output.dense"
# Shared with BEiT.
BLOCK = {
    "norm1": "layernorm_before",
    **ATTENTION,
    "norm2": "layernorm_after",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
}
_IJEPA_NAMES = {
    "embedding": _PATCHES,
    POSITIONS: ("embeddings.position_embeddings", SAME),
    **block("encoder.layer", **BLOCK),
    "Transformer/encoder_norm": "layernorm",
    "head": "classifier",  # Named "cls_classifier" in files with two classifiers.
}


def _prepare(flat: Arrays, config: Mapping) -> list[str]:
    notes = []
    if _DISTILLATION in flat:
        for name in [name for name in flat if name.startswith("classifier.")]:
            # The mean of twice the classifier and zeros equals the classifier.
            flat[name] = 2 * flat[name]
            flat[f"distillation_{name}"] = np.zeros_like(flat[name])
            notes = ["classifier: reads only the class token, written as a pair"]
        for name in [name for name in flat if name.startswith("cls_classifier.")]:
            flat[name.removeprefix("cls_")] = flat.pop(name)
    if "classifier.weight" in flat and _POOLER in flat:
        for name in [name for name in flat if name.startswith("pooler.")]:
            del flat[name]
        notes.append("pooler: dropped, because the classifier does not use it")
    notes += hugging_face.drop_pretraining(flat)
    if _is_dino(flat, config) and not config.get(RESIZE_KEY):
        notes.append("no classifier and no pooler: assumed to be a ViT of DINO")
    return notes


def _finish(arrays: Arrays, options: Mapping) -> list[str]:
    if options["distillation"]:
        for name in [name for name in arrays if name.startswith("classifier.")]:
            arrays[f"cls_{name}"] = arrays.pop(name)
    return []


def _is_dino(flat: Arrays, config: Mapping) -> bool:
    # Among published ViTs, only DINO's have neither a classifier nor a pooler.
    plain = not {"classifier.weight", _POOLER} & flat.keys()
    masked = "MaskedImageModeling" in "".join(config.get("architectures") or ())
    return plain and not masked and config.get("model_type") == "vit"


def _options(flat: Arrays, config: Mapping) -> dict:
    return {
        "distillation": _DISTILLATION in flat,
        "representation_layer": _POOLER in flat,
        "posemb_resize": "bicubic_dino" if _is_dino(flat, config) else "bicubic",
    }


def _check(flat: Arrays, table: list[ArrayEntry], config: Mapping, source: str) -> None:
    """Raises UserError for a network that no model here computes, with any head."""
    remedy = "give the whole file of a plain ViT or DeiT"
    if "model_type" not in config:
        remedy = "keep its config.json in the same folder, which names the network"
    needed = ["embeddings.cls_token", "embeddings.position_embeddings", _QUERY]
    needed.append("encoder.layer.0.intermediate.dense.weight")
    if "classifier.weight" in flat:
        needed.append("classifier.bias")
    for name in needed:
        if name not in flat:
            raise UserError(f"{source}: {name} is missing: {remedy}")
    rows, columns = flat[_QUERY].shape
    if rows != columns:
        raise UserError(
            f"{source}: heads with {rows} features in total and a width of {columns} are "
            "not supported: models of this project have the same number of both"
        )
    rows, columns = flat.get(_POOLER, flat[_QUERY]).shape
    if rows != columns:
        raise UserError(
            f"{source}: a pooler with {rows} features (pooler_output_size) is not "
            f"supported: models of this project keep the width, {columns}"
        )
    inside = re.compile(r"(embeddings|encoder|layernorm|pooler)\.")
    known = {entry.name for entry in table}
    for name in sorted(flat.keys() - known):
        if inside.match(name):
            raise UserError(
                f"{source}: {name} is not supported: no model here computes the same; "
                f"{remedy}"
            )


def _has(options: Mapping) -> dict:
    pooled = options["num_classes"] or options.get("distillation")
    return {
        "distillation": (False, True),
        "representation_layer": (False,) if pooled else (False, True),
    }


def _config(options: Mapping) -> dict:
    config = {"qkv_bias": True, "encoder_stride": options["patch"]}
    if not options["distillation"]:
        return config
    name = hugging_face.architecture("DeiT", options)
    name += "WithTeacher" if options["num_classes"] else ""
    return config | {"model_type": "deit", "architectures": [name]}


def _usage(options: Mapping) -> tuple[str, str]:
    plain = not options["num_classes"] and not options["representation_layer"]
    return ", add_pooling_layer=False" if plain else "", ""


VIT = Family(
    name="Hugging Face",
    format="hugging_face",
    to="hf",
    network="ViT",
    # One network trained in different ways; only training masks patches.
    model_types=("vit", "deit", "vit_msn", "vit_mae"),
    claims=lambda flat, kind: f"{_PATCHES}.weight" in flat,
    renames=((r"^(vit|deit)\.", ""), *_NAMES_IN_MEMORY),
    in_memory=IN_MEMORY,
    names=_IJEPA_NAMES
    | {
        "cls": ("embeddings.cls_token", SAME),
        "dist": (_DISTILLATION, SAME),
        "pre_logits": "pooler.dense",
        "head_dist": "distillation_classifier",
    },
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12},
    must={"pooler_act": ("tanh", _POOLER)},
    prepare=_prepare,
    finish=_finish,
    fixed={"pool": "token"},
    options=_options,
    check=_check,
    has=_has,
    others="--to=timm, --to=google or --to=safetensors",
    config=_config,
    usage=_usage,
)


def _prepare_ijepa(flat: Arrays, config: Mapping) -> list[str]:
    unused = [name for name in (_POOLER, "pooler.dense.bias") if name in flat]
    for name in unused:
        del flat[name]
    dropped = [f"{name}: dropped" for name in unused]
    return dropped + hugging_face.drop_pretraining(flat)


IJEPA = Family(
    name="Hugging Face I-JEPA",
    format="ijepa",
    to="hf_ijepa",
    network="IJepa",
    model_types=("ijepa",),
    claims=lambda flat, kind: kind == "ijepa" and f"{_PATCHES}.weight" in flat,
    renames=((r"^(ijepa|vit|deit)\.", ""), *_NAMES_IN_MEMORY),
    in_memory=IN_MEMORY,
    names=_IJEPA_NAMES,
    defaults=VIT.defaults,
    prepare=_prepare_ijepa,
    fixed={"pool": "gap", "class_token": False},
    config=_config,
)

hugging_face.register(VIT, refines=())
hugging_face.register(IJEPA)

"""BEiT and BEiT v2 (arXiv:2106.08254) of transformers."""

from collections.abc import Mapping

from vit_jax.weights.formats import hugging_face
from vit_jax.weights.formats.hugging_face import KEYS, Arrays, Family
from vit_jax.weights.formats.hugging_face_vit import BLOCK, IN_MEMORY
from vit_jax.weights.formats.tables import SAME, block
from vit_jax.weights.pretrained import POSITIONS

_TABLE = "relative_position_bias.relative_position_bias_table"
_SHARED = f"encoder.{_TABLE}"
_EVERY = f"encoder.layer.#.attention.attention.{_TABLE}"
_FIRST = _EVERY.replace("#", "0")


def _claims(flat: Arrays, kind: str | None) -> bool:
    needed = {
        "embeddings.patch_embeddings.projection.weight",
        "encoder.layer.0.attention.attention.query.weight",
    }
    known = kind in BEIT.model_types or {_FIRST, _SHARED} & flat.keys()
    return needed <= flat.keys() and bool(known)


def _prepare(flat: Arrays, config: Mapping) -> list[str]:
    for name in list(flat):
        if name.endswith("relative_position_index") or name.startswith("lm_head."):
            del flat[name]
    hugging_face.add_biases(flat, r"\.(query|key|value)$")  # Keys have no biases.
    return hugging_face.drop_pretraining(flat)


def _options(flat: Arrays, config: Mapping) -> dict:
    mean = "pooler.layernorm.weight" in flat
    shared = "shared" if _SHARED in flat else "none"
    scaled = "encoder.layer.0.lambda_1" in flat
    return {
        "pool": "gap" if mean else "token",
        "class_token": mean,
        "fc_norm": mean,
        "final_norm": mean or "layernorm.weight" in flat,
        "posemb": "learned" if "embeddings.position_embeddings" in flat else "none",
        "relative_bias": "every" if _FIRST in flat else shared,
        **({} if scaled else {"layer_scale_init": 0.0}),
    }


def _finish(arrays: Arrays, options: Mapping) -> list[str]:
    keys = [name for name in arrays if name.endswith(".key.bias")]
    biases = [arrays.pop(name) for name in keys]
    if any(bias.any() for bias in biases):
        return ["biases of keys: left out; they change no attention weights"]
    return []


def _has(options: Mapping) -> dict:
    mean = bool(options.get("fc_norm"))
    return {
        "relative_bias": ("none", "every", "shared"),
        "pool": ("gap",) if mean else ("token",),
        "class_token": (mean,),
    }


def _config(options: Mapping) -> dict:
    return {
        "use_mean_pooling": options["fc_norm"],
        "use_relative_position_bias": options["relative_bias"] == "every",
        "use_shared_relative_position_bias": options["relative_bias"] == "shared",
        "use_absolute_position_embeddings": options["posemb"] != "none",
    }


BEIT = Family(
    name="Hugging Face BEiT",
    format="beit",
    to="hf_beit",
    network="Beit",
    model_types=("beit", "data2vec-vision"),
    claims=_claims,
    renames=((r"^(beit|data2vec_vision)\.", ""),),
    in_memory=IN_MEMORY,
    names={
        "embedding": "embeddings.patch_embeddings.projection",
        "cls": ("embeddings.cls_token", SAME),
        POSITIONS: ("embeddings.position_embeddings", SAME),
        "Transformer/relative_bias": (_SHARED, SAME),
        "Transformer/relative_bias_#": (_EVERY, SAME),
        **block("encoder.layer", **BLOCK, scale1="lambda_1", scale2="lambda_2"),
        "fc_norm": "pooler.layernorm",
        "Transformer/encoder_norm": "layernorm",
        "head": "classifier",
    },
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "layer_scale_init_value": 1.0,
    },
    keys=KEYS | {"layer_scale_init_value": "layer_scale_init"},
    prepare=_prepare,
    finish=_finish,
    options=_options,
    has=_has,
    config=_config,
    square=True,
    optional=True,
    any_size=True,
)

hugging_face.register(BEIT)

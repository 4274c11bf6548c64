"""The text towers of CLIP and SigLIP in transformers, which stand beside an image tower.

Together with the projections they are what the task "contrastive" has beside the network:
`Pretrained.task_params`, under the names of models/text.py.
"""

from collections.abc import Mapping

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.weights.formats import hugging_face, torch_file
from vit_jax.weights.formats.torch_file import (
    LINEAR,
    SAME,
    ArrayEntry,
    dense,
    from_heads,
    norm,
    one_layout,
    to_heads,
)
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.text_tower import config_of

ANCHOR = "text_model.embeddings.token_embedding.weight"
PREFIXES = ("text_model.", "text_projection.", "visual_projection.", "logit_")
ROWS = one_layout(lambda a: a[None], lambda a: a[0])
_NUMBER = one_layout(lambda a: a.reshape(1), lambda a: a)
# What transformers puts for the end of a text in old configs of CLIP; the real one is the
# last of the vocabulary.
_WRONG_END = 2


def read(
    flat: Mapping[str, np.ndarray], config: Mapping, defaults: Mapping, source: str
) -> tuple[dict, dict, list[str]]:
    """Reads a text tower and the projections.

    Args:
      flat: arrays of a whole file, by their names.
      config: content of config.json.
      defaults: of its `text_config`, by the type.
      source: for messages.

    Returns:
      `Pretrained.task`, `Pretrained.task_params`, and a line for what was assumed.

    Raises:
      UserError: this project has no such tower.
    """
    flat = {k: v for k, v in flat.items() if k.startswith(PREFIXES)}
    flat.pop("text_model.embeddings.position_ids", None)  # In files of transformers 4.
    clip = "text_projection.weight" in flat
    stated = config.get("text_config") or {}
    facts = hugging_face.read_config({**defaults, **stated, "model_type": "vit"})
    vocab_size, width = flat[ANCHOR].shape
    num_heads = stated.get("num_attention_heads", 8 if clip else 12)
    notes = []
    if not config:
        num_heads = max(1, width // 64)
        notes = [f"heads of the text tower: taken as {num_heads}, one for 64 features"]
    depth = len(
        {n.split(".")[3] for n in flat if n.startswith("text_model.encoder.layers.")}
    )
    if width % num_heads:
        raise UserError(
            f"{source}: {num_heads} heads do not divide the text tower's width {width}"
        )
    table = _table(depth, num_heads, clip=clip)
    network = "a CLIPModel or SiglipModel"
    part = " of the text tower"
    torch_file.check_names(flat, table, source, part=part, network=network)
    ours = torch_file.to_our_arrays(flat, table, source)
    about = {
        "vocab_size": vocab_size,
        "width": width,
        "depth": depth,
        "num_heads": num_heads,
        "mlp_dim": ours["text/encoderblock_0/MlpBlock_3/Dense_0/bias"].size,
        "causal": clip,
        "pool": "eos" if clip else "last",
        "projection": "plain" if clip else "bias",
        "activation": facts.activation,
        "layer_norm_eps": facts.epsilon,
    }
    if clip:
        end = stated.get("eos_token_id", vocab_size - 1)
        about["eos_id"] = vocab_size - 1 if end == _WRONG_END else end
    loss = "softmax" if clip else "sigmoid"
    task = {"name": "contrastive", "loss": loss, "text": about}
    return task, unflatten_dict(ours, sep="/"), notes


def write(pretrained: Pretrained, *, clip: bool) -> tuple[dict[str, np.ndarray], dict]:
    """Returns the arrays of a text tower and the projections, and what configs say.

    Args:
      pretrained: with a text tower.
      clip: whether the image tower is CLIP's, not SigLIP's.

    Returns:
      Arrays by their names; and `text_config`, with "projection_dim" for the whole
      config in CLIP's case.

    Raises:
      UserError: transformers has no such tower.
    """
    about, params = config_of(pretrained), pretrained.task_params
    name = "CLIP" if clip else "SigLIP"
    wanted = {
        "causal": clip,
        "pool": "eos" if clip else "last",
        "projection": "plain" if clip else "bias",
    }
    for key, value in wanted.items():
        if getattr(about, key) != value:
            raise UserError(
                f"task.text.{key}={getattr(about, key)!r}: the text tower of {name} in "
                f"transformers has {value!r}: write it with --to=safetensors"
            )
    if (text.PROJECTION in params) != clip or "bias" in params.get(text.PROJECTION, {}):
        raise UserError(
            f"{name} of transformers has {'a' if clip else 'no'} projection of the image's "
            "features, without a bias: write it with --to=safetensors"
        )
    flat = flatten_dict(params, sep="/")
    if not clip:  # Which always has a bias.
        flat.setdefault(text.LOGIT_BIAS, np.zeros(1, np.float32))
    table = _table(about.depth, about.num_heads, clip=clip)
    arrays = torch_file.to_their_arrays(flat, table)
    for number in {text.LOGIT_SCALE, text.LOGIT_BIAS} & arrays.keys():
        arrays[number] = arrays[number].reshape(() if clip else 1)
    embed_dim = flat["text/head/kernel"].shape[1]
    config = {
        "model_type": "clip_text_model" if clip else "siglip_text_model",
        "vocab_size": about.vocab_size,
        "hidden_size": about.width,
        "num_hidden_layers": about.depth,
        "num_attention_heads": about.num_heads,
        "intermediate_size": about.mlp_dim or 4 * about.width,
        "max_position_embeddings": flat["text/pos_embedding"].shape[1],
        "hidden_act": hugging_face.write_activation(about.activation),
        "layer_norm_eps": about.layer_norm_eps,
        "projection_dim" if clip else "projection_size": embed_dim,
    }
    if clip:
        config |= {"eos_token_id": about.eos_id, "pad_token_id": about.eos_id}
        config["bos_token_id"] = max(about.eos_id - 1, 0)
    return arrays, config


def _table(depth: int, num_heads: int, *, clip: bool) -> list[ArrayEntry]:
    """Returns the entries of a text tower, and of what stands beside both towers."""
    embed = "text_model.embeddings"
    table = [
        ArrayEntry(f"{embed}.token_embedding.weight", ("text/embedding",), SAME),
        ArrayEntry(f"{embed}.position_embedding.weight", ("text/pos_embedding",), ROWS),
        *norm("text_model.final_layer_norm", "text/encoder_norm"),
        ArrayEntry(text.LOGIT_SCALE, (text.LOGIT_SCALE,), _NUMBER),
    ]
    for i in range(depth):
        theirs, ours = f"text_model.encoder.layers.{i}", f"text/encoderblock_{i}"
        table += block_table(theirs, ours, num_heads)
    if not clip:
        return [
            *table,
            *dense("text_model.head", "text/head"),
            ArrayEntry(text.LOGIT_BIAS, (text.LOGIT_BIAS,), _NUMBER),
        ]
    image = f"{text.PROJECTION}/kernel"
    return [
        *table,
        ArrayEntry("text_projection.weight", ("text/head/kernel",), LINEAR),
        ArrayEntry("visual_projection.weight", (image,), LINEAR),
    ]


def block_table(theirs: str, ours: str, num_heads: int) -> list[ArrayEntry]:
    """Returns the entries of an encoder block, of a text or an image tower.

    Args:
      theirs, ours: names of the block.
      num_heads: of its attention.
    """
    table = norm(f"{theirs}.layer_norm1", f"{ours}/LayerNorm_0")
    attention = f"{ours}/MultiHeadDotProductAttention_1"
    table += attention_table(f"{theirs}.self_attn", attention, num_heads)
    table += norm(f"{theirs}.layer_norm2", f"{ours}/LayerNorm_2")
    for layer in (1, 2):
        name = f"{ours}/MlpBlock_3/Dense_{layer - 1}"
        table += dense(f"{theirs}.mlp.fc{layer}", name)
    return table


def attention_table(
    theirs: str, ours: str, num_heads: int, out: str = "out_proj"
) -> list[ArrayEntry]:
    """Returns the entries of an attention of q_proj, k_proj and v_proj.

    Args:
      theirs, ours: name of the attention.
      num_heads: of it.
      out: their name of the last layer.
    """
    table = dense(f"{theirs}.{out}", f"{ours}/out", from_heads(num_heads))
    return table + [
        ArrayEntry(
            f"{theirs}.{name[0]}_proj.{kind}",
            (f"{ours}/{name}/{leaf}",),
            to_heads(num_heads),
        )
        for name in ("query", "key", "value")
        for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
    ]

"""The text tower of a checkpoint."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from vit_jax.data.tokenizer import Tokenizer, open_tokenizer
from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.models.text_tower import TextTower
from vit_jax.weights.pretrained import Pretrained

_BLOCK = "text/encoderblock_0"
_QUERY = f"{_BLOCK}/MultiHeadDotProductAttention_1/query/kernel"


def read(params: Mapping[str, np.ndarray], **about: object) -> tuple[dict, dict]:
    """Returns `Pretrained.task` and `Pretrained.task_params` of a file's text tower.

    Args:
      params: parameters of the task by name, levels joined by "/".
      about: keys of `config.task.text` that do not follow from shapes.
    """
    vocab_size, width = params["text/embedding"].shape
    blocks = {n.split("/")[1] for n in params if n.startswith("text/encoderblock_")}
    tower = {
        "vocab_size": vocab_size,
        "width": width,
        "depth": len(blocks),
        "num_heads": params[_QUERY].shape[1],
        "mlp_dim": params[f"{_BLOCK}/MlpBlock_3/Dense_0/bias"].size,
        "projection": "bias" if "text/head/bias" in params else "plain",
        **about,
    }
    loss = "sigmoid" if text.LOGIT_BIAS in params else "softmax"
    task = {"name": "contrastive", "loss": loss, "text": tower}
    return task, unflatten_dict(dict(params), sep="/")


def text_tower(pretrained: Pretrained) -> TextTower:
    """Builds the text tower of a checkpoint that was read `with_task`.

    Raises:
      UserError: the checkpoint has no text tower.
    """
    params, source = pretrained.task_params, pretrained.source
    if text.TEXT not in params:
        raise UserError(
            f"{source} has no text tower, which is needed to compare images with "
            "texts: give a checkpoint of CLIP, SigLIP or LiT, or a run with "
            "task.name='contrastive'"
        )
    _, num_tokens, _ = params[text.TEXT]["pos_embedding"].shape
    embed_dim = params[text.TEXT]["head"]["kernel"].shape[-1]
    module = config_of(pretrained).build(num_tokens, embed_dim, "float32")
    text.check_params(module, params[text.TEXT], source)
    return TextTower(
        module,
        jax.device_put({k: v for k, v in params.items() if k in text.PARAMS}),
        functools.partial(_open_tokenizer, pretrained),
        sigmoid=pretrained.task.get("loss") == "sigmoid",
        source=source,
    )


def _open_tokenizer(pretrained: Pretrained) -> Tokenizer:
    if not pretrained.tokenizer:
        raise UserError(
            f"{pretrained.source} does not record its tokenizer: give it with "
            "--tokenizer, such as hf://openai/clip-vit-base-patch32"
        )
    try:
        return open_tokenizer(pretrained.tokenizer)
    except UserError as error:  # Its message names a key of training.
        line = str(error).replace("data.tokenizer=", "tokenizer=")
        raise UserError(line) from error


def config_of(pretrained: Pretrained) -> text.TextConfig:
    """Returns the config of a text tower, with its tokenizer's vocab_size and eos_id."""
    config = text.TextConfig(**pretrained.task["text"])
    vocab_size = len(pretrained.task_params[text.TEXT]["embedding"])
    eos_id = config.eos_id
    if config.pool == "eos" and eos_id < 0:
        eos_id = _open_tokenizer(pretrained).eos_id
    return dataclasses.replace(config, vocab_size=vocab_size, eos_id=eos_id)

"""Masked autoencoders: facebookresearch/mae's files, and ViTMAE of transformers.

Both have the encoder under the names of timm or of transformers' ViT. Pretraining
checkpoints also have a decoder, which becomes `Pretrained.task_params`. Encoders
without a decoder are recognised by their fixed positions, or by their config.json.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models.positions.sincos2d import sincos2d
from vit_jax.weights import rewriting
from vit_jax.weights.formats import dino, hugging_face, tables, timm, torch_file
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.hugging_face_vit import VIT
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.tables import SAME, ArrayEntry, dense, norm
from vit_jax.weights.pretrained import Pretrained

_KIND = "sincos2d_mae"
_CLOSE = 1e-6  # Tolerance for positions computed by other code.
_MASK_TOKEN = "mask_token"
# Names of the blocks in published files, and in files saved by transformers 5.23.
_HF_BLOCKS = ("decoder_layers.", "decoder_encoder.layer.")
# Number of heads by width, for all published decoders.
_PUBLISHED = {512: 16}


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names in a library whose decoders name their blocks like its encoders."""

    read: Callable[[Tensors, int], Pretrained]  # Reads an encoder.
    table: Callable[[dict], list[ArrayEntry]]  # Returns the table of an encoder.
    prefix: str  # Prefix of the decoder's arrays.
    more: str  # Second prefix of the decoder's layers outside the blocks.
    blocks: str  # Prefix of the encoder's blocks.
    network: str

    @property
    def embed(self) -> str:
        return f"{self.more}embed.weight"

    @property
    def positions(self) -> str:
        return f"{self.more}pos_embed"


_FACEBOOK = _Names(
    timm.read, timm.transformer_table, "decoder_", "", "blocks.", "facebookresearch/mae"
)
_HF = _Names(
    functools.partial(hugging_face.read, VIT),
    functools.partial(hugging_face.entries, VIT),
    "decoder.",
    "decoder_",
    "encoder.",
    "ViTMAE of transformers",
)


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    flat, config = tensors.flat, tensors.config
    if hugging_face.recognises(VIT, tensors):
        is_mae = config.get("model_type") == "vit_mae"
        return is_mae or f"{_HF.prefix}{_HF.embed}" in flat
    if not timm.recognises(tensors) or "architecture" in config:
        return False
    if f"{_FACEBOOK.prefix}{_FACEBOOK.embed}" in flat:
        return True
    # Classifiers were trained with learned positions, however close to the fixed ones.
    if "pos_embed" not in flat or "head.weight" in flat:
        return False
    side = math.isqrt(flat["pos_embed"].shape[-2] - 1)
    return _is_fixed(flat["pos_embed"], (side, side))


def _is_fixed(embedding: np.ndarray, grid: tuple[int, int]) -> bool:
    """Returns whether positions (1, 1 + patches, width) are MAE's fixed positions."""
    shape = 1, 1 + math.prod(grid)
    # Fixed positions have zeros for the class token: a quick test for most networks.
    if (
        embedding.shape[:-1] != shape
        or embedding.shape[-1] % 4
        or embedding[0, 0].any()
    ):
        return False
    table = _table(grid, embedding.shape[-1])
    return np.allclose(embedding, table, rtol=0, atol=_CLOSE)


def _table(grid: tuple[int, int], width: int) -> np.ndarray:
    """Returns MAE's fixed positions, with zeros for the class token."""
    table = np.asarray(sincos2d(grid, width, _KIND))
    return rewriting.prepend_zero_rows(table[None], 1)


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads an encoder, and its decoder as the task; see `registry.Reader`."""
    names = _HF if hugging_face.recognises(VIT, tensors) else _FACEBOOK
    prefix = names.prefix
    # facebookresearch's files store the mask token with the arrays of the encoder.
    decoder = {
        name.removeprefix(prefix): value
        for name, value in tensors.flat.items()
        if name.startswith(prefix) or name == _MASK_TOKEN
    }
    rest = {k: v for k, v in tensors.flat.items() if not k.startswith(prefix)}
    rest.pop(_MASK_TOKEN, None)
    tensors = dataclasses.replace(tensors, flat=rest)
    pretrained = names.read(tensors, num_heads)
    options, params = dict(pretrained.options), dict(pretrained.params)
    notes = [*pretrained.notes]
    positions = params["Transformer"]["posembed_input"]["pos_embedding"]
    grid = models.create(**options).grid
    if _is_fixed(positions, grid):
        params["Transformer"] = {
            k: v for k, v in params["Transformer"].items() if k != "posembed_input"
        }
        options["posemb"] = _KIND
        notes.append(f"position embeddings: fixed ones, {_KIND}")
    task, task_params = {}, {}
    if decoder:
        task, task_params, more = _read_decoder(
            decoder, tensors.config, options, tensors.path, names
        )
        notes += more
    preprocess = pretrained.preprocess or dino.preprocess(options["image_size"])
    return dataclasses.replace(
        pretrained,
        params=params,
        options=options,
        format="mae",
        preprocess=preprocess,
        notes=tuple(notes),
        task=task,
        task_params=task_params,
    )


def _read_decoder(
    flat: dict[str, np.ndarray],
    config: dict,
    options: dict,
    source: str,
    names: _Names,
) -> tuple[dict, dict, list[str]]:
    """Returns `config.task`, its parameters, and notes; `options` are the encoder's."""
    notes, encoder = [], models.create(**options)
    if names is _HF:
        blocks = "|".join(map(re.escape, _HF_BLOCKS))
        flat = {re.sub(f"^({blocks})", "encoder.layer.", k): v for k, v in flat.items()}
        flat = hugging_face.rename(VIT, flat)
    blocks = (re.match(r"(?:blocks|encoder\.layer)\.(\d+)\.", name) for name in flat)
    depth = len({match[1] for match in blocks if match})
    width = len(flat[names.embed])
    num_heads = config.get("decoder_num_attention_heads", 0)
    if not num_heads:
        num_heads = _PUBLISHED.get(width, encoder.options["num_heads"])
        if width % num_heads:
            left_out = (
                "decoder: left out, because its number of heads is unknown, and its "
                f"width, {width}, does not divide into {num_heads}"
            )
            return {}, {}, [left_out]
        notes.append(f"decoder's heads: number unknown, assumed {num_heads}")
    table = _decoder_table(width, depth, num_heads, names)
    positions = flat.pop(names.positions)
    tables.check_names(
        flat, table, source, part=" of the decoder", network="a masked autoencoder"
    )
    if not _is_fixed(positions, encoder.grid):
        left_out = (
            "decoder: left out, because its positions are not MAE's fixed ones "
            f"({_KIND})"
        )
        return {}, {}, [left_out]
    params = tables.to_our_arrays(flat, table, source)
    if "norm_pix_loss" not in config:
        notes.append(
            "targets: normalisation unknown, assumed as in MAE "
            "(task.normalize_targets=True)"
        )
    hidden = params["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"].shape[1]
    task = {
        "name": "mae",
        "mask_ratio": config.get("mask_ratio", 0.75),
        "normalize_targets": config.get("norm_pix_loss", True),
        "decoder_width": width,
        "decoder_depth": depth,
        "decoder_num_heads": num_heads,
        "decoder_mlp_dim": hidden,
    }
    return task, {"decoder": unflatten_dict(params, sep="/")}, notes


def _decoder_table(
    width: int, depth: int, num_heads: int, names: _Names
) -> list[ArrayEntry]:
    """Returns the table of a decoder, without its positions and without the prefix."""
    # Only the blocks of this network are used; they do not depend on patches or
    # classes.
    sizes = {"width": width, "depth": depth, "num_heads": num_heads, "mlp_dim": 1}
    options = models.create("Ti/16", num_classes=0, **sizes).options
    options = {"stem_width": 0, **options}
    return [
        *dense(f"{names.more}embed", "embedding"),
        ArrayEntry(_MASK_TOKEN, (_MASK_TOKEN,), SAME),
        *(e for e in names.table(options) if e.name.startswith(names.blocks)),
        *norm(f"{names.more}norm", "Transformer/encoder_norm"),
        *dense(f"{names.more}pred", "head"),
    ]


def write(pretrained: Pretrained, path: str | os.PathLike) -> list[str]:
    """Writes a file that facebookresearch/mae loads; see `registry.Writer`."""
    arrays, notes, options = _encoder(pretrained, _FACEBOOK)
    height, width = options["image_size"]
    if height != width:
        raise UserError(
            f"image_size={height}x{width}: facebookresearch/mae needs square images: "
            "write it with --to=hf_mae or --to=safetensors"
        )
    eps = options["layer_norm_eps"]
    if 0 < eps < 1e-6:
        notes.append(
            f"layer_norm_eps: {eps:g} replaced by 1e-6, facebookresearch/mae's"
        )
    elif eps != 1e-6:
        raise UserError(
            f"layer_norm_eps={eps}: facebookresearch/mae has 1e-6: write it with "
            "--to=hf_mae or --to=safetensors"
        )
    for name, value in _decoder(pretrained, _FACEBOOK).items():
        arrays[name if name == _MASK_TOKEN else f"{_FACEBOOK.prefix}{name}"] = value
    torch_file.write(path, {"model": arrays})
    if pretrained.preprocess:
        notes.append("preprocessing: facebookresearch/mae uses ImageNet's mean and std")
    if pretrained.class_names:
        notes.append("class names: the file has no place for them")
    return notes


def write_hugging_face(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that ViTMAE of transformers loads; see `registry.Writer`."""
    arrays, notes, options = _encoder(pretrained, _HF)
    config = hugging_face.write_config(VIT, options, pretrained)
    for name in ("encoder_stride", "problem_type"):
        config.pop(name, None)
    config |= {"model_type": "vit_mae", "architectures": ["ViTMAEModel"]}
    if decoder := _decoder(pretrained, _HF):
        arrays = {f"vit.{name}": value for name, value in arrays.items()}
        for name, value in decoder.items():
            name = re.sub(r"^encoder\.layer\.", _HF_BLOCKS[0], name)
            arrays[f"{_HF.prefix}{name}"] = value
        task, (*sizes, mlp_dim) = pretrained.objective, _sizes(pretrained)
        config |= {
            "architectures": ["ViTMAEForPreTraining"],
            "mask_ratio": task["mask_ratio"],
            "norm_pix_loss": task["normalize_targets"],
            "decoder_hidden_size": sizes[0],
            "decoder_num_hidden_layers": sizes[1],
            "decoder_num_attention_heads": sizes[2],
            "decoder_intermediate_size": mlp_dim,
        }
    return notes + hugging_face.write_folder(folder, arrays, config, pretrained)


def _encoder(
    pretrained: Pretrained, names: _Names
) -> tuple[dict[str, np.ndarray], list[str], dict]:
    """Returns the encoder's arrays, notes on what was rewritten, and its options."""
    model = models.create(**pretrained.options)
    options = {"stem_width": 0, **model.options}
    has = {
        "pool": ("token", "gap"),
        "class_token": (True, options.get("pool") == "gap"),
        "activation": ("gelu",),
    }
    if names is _HF:
        has = {"pool": ("token",), "num_classes": (0,)}
    rewriting.check_network(model.options, names.network, has)
    flat = flatten_dict(pretrained.params, sep="/")
    notes = rewriting.store_positions(flat, options, model.grid)
    notes += rewriting.fold_layer_scale(flat, options)
    options["patch"] = model.config.patch_size
    return tables.to_their_arrays(flat, names.table(options)), notes, options


def _has_decoder(pretrained: Pretrained) -> bool:
    """Returns whether a checkpoint has the decoder of a masked autoencoder."""
    return pretrained.objective.get("name") == "mae" and bool(pretrained.task_params)


def _sizes(pretrained: Pretrained) -> tuple[int, int, int, int]:
    """Returns width, depth, number of heads and MLP width of a decoder."""
    blocks = pretrained.task_params["decoder"]["Transformer"]
    width, hidden = blocks["encoderblock_0"]["MlpBlock_3"]["Dense_0"]["kernel"].shape
    return width, len(blocks) - 1, pretrained.objective["decoder_num_heads"], hidden


def _decoder(pretrained: Pretrained, names: _Names) -> dict[str, np.ndarray]:
    """Returns the arrays of the decoder without their prefix; {} without a decoder."""
    if not _has_decoder(pretrained):
        return {}
    width, depth, num_heads, _ = _sizes(pretrained)
    flat = flatten_dict(pretrained.task_params["decoder"], sep="/")
    table = _decoder_table(width, depth, num_heads, names)
    positions = _table(models.create(**pretrained.options).grid, width)
    return {names.positions: positions} | tables.to_their_arrays(flat, table)


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    return (
        f'state = torch.load("{path}")["model"]\n'
        "model.load_state_dict(state)  # A model of facebookresearch/mae of this size."
    )


def _hf_usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    name = "ViTMAEForPreTraining" if _has_decoder(pretrained) else "ViTMAEModel"
    return f'from transformers import {name}\nmodel = {name}.from_pretrained("{path}")'


READERS["MAE"] = Reader(recognises, read, refines=("Hugging Face", "timm", "DINO"))
WRITERS["mae"] = Writer(write, suffix=".pth", usage=_usage, with_task=True)
WRITERS["hf_mae"] = Writer(
    write_hugging_face, usage=_hf_usage, library="transformers", with_task=True
)

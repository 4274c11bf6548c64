"""OpenCLIP's files, and OpenAI's files of CLIP, which have the same names.

A file has both towers. The image tower is CLIP's or a network of timm ("visual.trunk"),
as in OpenCLIP's copies of SigLIP; the text tower has no prefix, or "text.".
open_clip_config.json in the same folder has the properties that the arrays do not show.
"""

import dataclasses
import operator
import os
from collections.abc import Mapping, Sequence

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.data import tokenizer
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.transforms.base import pair
from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.weights import rewriting, text_tower
from vit_jax.weights.formats import (
    files,
    hugging_face_clip,
    linen,
    tables,
    timm,
    timm_config,
)
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_VISUAL, _TRUNK, _TEXT = "visual.", "visual.trunk.", "text."
_BLOCKS = "transformer.resblocks"
_CONFIG = "open_clip_config.json"
_WEIGHTS = "open_clip_model.safetensors"
# Entries of OpenAI's files that are not parameters; such networks use QuickGELU.
_OPENAI = ("input_resolution", "context_length", "vocab_size")
_NUMBER = tables.one_layout(lambda a: a.reshape(1), lambda a: a.reshape(()))
_LAYERS = {
    "norm1": "ln_1",
    "heads": "attn.in_proj_",
    "out": "attn.out_proj",
    "norm2": "ln_2",
    "fc1": "mlp.c_fc",
    "fc2": "mlp.c_proj",
}
_IMAGE_NAMES = {
    "embedding": "conv1",
    "cls": ("class_embedding", tables.TOKEN),
    POSITIONS: ("positional_embedding", tables.ROWS),
    "Transformer/pre_norm": "ln_pre",
    "Transformer/encoder_norm": "ln_post",
    **tables.block(_BLOCKS, **_LAYERS),
}
_TEXT_NAMES = {
    "text/embedding": ("token_embedding.weight", tables.SAME),
    "text/pos_embedding": ("positional_embedding", tables.ROWS),
    "text/encoder_norm": "ln_final",
    text.LOGIT_SCALE: (text.LOGIT_SCALE, _NUMBER),
    **tables.block(_BLOCKS, modules="text/encoderblock", **_LAYERS),
}
# Keys of `text_cfg` and `vision_cfg` that have no effect at these values.
_PLAIN = {
    "ls_init_value": None,
    "embed_cls": False,
    "hf_model_name": None,
    "proj_type": "linear",
    "attentional_pool": False,
    "pos_embed_type": "learnable",
    "no_ln_pre": False,
    "final_ln_after_pool": False,
    "qk_norm": False,
    "block_type": None,
    "use_pad_mask": False,
}


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    names = tensors.flat
    image = f"{_VISUAL}conv1.weight" in names or any(
        name.startswith(_TRUNK) for name in names
    )
    return image and "logit_scale" in names


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    whole, source = tensors.sidecars.get(_CONFIG, {}), tensors.path
    config = whole.get("model_cfg", {})
    vision = config.get("vision_cfg", {})
    flat = {k: v for k, v in tensors.flat.items() if k not in _OPENAI}
    openai = len(flat) < len(tensors.flat)
    for part in ("text_cfg", "vision_cfg"):
        for key, allowed in _PLAIN.items():
            if config.get(part, {}).get(key, allowed) != allowed:
                raise UserError(
                    f"{source}: {part}.{key}={config[part][key]!r} in {_CONFIG}: not "
                    "supported by models of this project"
                )
    quick = config.get("quick_gelu", openai)
    notes = []
    if not config:
        which = "OpenAI's, QuickGELU" if openai else "OpenCLIP's, GELU"
        notes = [f"{_CONFIG}: missing, so the activation is assumed to be {which}"]
    image = tables.below(flat, _VISUAL)
    rest = {k: v for k, v in flat.items() if not k.startswith(_VISUAL)}
    if any(name.startswith("trunk.") for name in image):
        pretrained, projection = _read_trunk(source, image, vision, num_heads)
    else:
        projection = {"kernel": image.pop("proj")} if "proj" in image else {}
        num_heads = 0 if config else num_heads
        pretrained = _read_image(source, image, vision, num_heads, quick=quick)
    task, params = _read_text(rest, config.get("text_cfg", {}), source, quick=quick)
    if projection:
        params[text.PROJECTION] = projection
    preprocess = _read_preprocess(
        whole.get("preprocess_cfg", {}),
        vision.get("image_size", 224),
        tuple(pretrained.options["image_size"]),
        len(pretrained.params["embedding"]["kernel"]),
    )
    return dataclasses.replace(
        pretrained,
        format="open_clip",
        source=source,
        notes=(*notes, *pretrained.notes),
        preprocess=preprocess,
        task=task,
        task_params=params,
        tokenizer=source,
    )


def _read_trunk(
    path: str, image: dict, vision: dict, num_heads: int
) -> tuple[Pretrained, dict]:
    """Returns an image tower of timm, and the projection of its features."""
    name = vision.get("timm_model_name")
    sidecars = {}
    if name:
        about = {"architecture": name}
        if pool := vision.get("timm_pool", "avg"):  # "" means the network's default.
            about["global_pool"] = pool
        sidecars = {"config.json": about}
    source = f"{path}: image tower {name or 'of timm'}"
    flat = tables.below(image, "trunk.")
    # OpenCLIP's projection; some files have timm's classifier instead.
    last = {"head.proj.weight": "kernel", "head.proj.bias": "bias"}
    projection = {leaf: image[k].T for k, leaf in last.items() if k in image}
    others = [k for k in image if not k.startswith("trunk.") and k not in last]
    if left := [*others, *(k for k in flat if k == "dist_token")]:
        raise UserError(
            f"{source}: {left[0]} is not supported: this project projects the features "
            "of one token or pool with one layer"
        )
    inner = Tensors(flat, {}, sidecars, source)
    if not timm.recognises(inner):
        raise UserError(f"{source} is not a Vision Transformer of timm")
    pretrained = timm.read(inner, num_heads)
    params = dict(pretrained.params)
    projection = params.pop("head", {}) or projection
    options = pretrained.options | {"num_classes": 0}
    return dataclasses.replace(pretrained, params=params, options=options), projection


def _read_image(
    source: str, flat: dict, vision: dict, num_heads: int, *, quick: bool
) -> Pretrained:
    """Reads CLIP's image tower; if `num_heads` is 0, the config determines it."""
    if any(name.startswith("attnpool.") for name in flat):
        raise UserError(
            f"{source}: its image tower is a ModifiedResNet (attnpool), which this "
            "project does not support: give weights of a CLIP with a Vision Transformer"
        )
    width = len(flat["conv1.weight"])
    num_heads = num_heads or max(1, width // vision.get("head_width", 64))
    flat["conv1.bias"] = np.zeros(width, np.float32)
    params = _convert(
        flat,
        _image_table(tables.count_blocks(flat, f"{_BLOCKS}."), num_heads),
        source,
        "image",
    )
    if vision.get("pool_type", "tok") != "tok":
        raise UserError(
            f"{source}: vision_cfg.pool_type={vision['pool_type']!r} in {_CONFIG} is not "
            "supported: models of this project use the class token"
        )
    sizes = linen.transformer_options(
        {k: v for k, v in params.items() if k != POSITIONS}
    )
    patch = len(params["embedding/kernel"])
    side = patch * round((params[POSITIONS].shape[1] - 1) ** 0.5)
    given = pair(vision.get("image_size", side))
    size = tuple(pixels // patch * patch for pixels in given)
    return Pretrained(
        params=unflatten_dict(params, sep="/"),
        options={
            **sizes,
            "image_size": size,
            "num_classes": 0,
            "pool": "token",
            "pre_norm": True,
            "activation": _activation(vision, quick=quick),
            "posemb_resize": "bicubic",
            "layer_norm_eps": _epsilon(vision),
        },
        format="open_clip",
        source=source,
    )


def _convert(
    flat: dict, table: list[tables.ArrayEntry], source: str, tower: str
) -> dict:
    """Converts the arrays of a tower after checking that none is missing."""
    part, network = f" of the {tower} tower", "a CLIP of OpenCLIP"
    tables.check_names(flat, table, source, part=part, network=network)
    return tables.to_our_arrays(flat, table, source)


def _epsilon(config: Mapping) -> float:
    return float((config.get("norm_kwargs") or {}).get("eps", 1e-5))


def _activation(config: Mapping, *, quick: bool) -> str:
    tanh = (config.get("act_kwargs") or {}).get("approximate") == "tanh"
    return "quick_gelu" if quick else "gelu_tanh" if tanh else "gelu"


def _read_text(
    flat: dict, config: dict, source: str, *, quick: bool
) -> tuple[dict, dict]:
    """Returns `Pretrained.task` and `task_params` of a text tower."""
    flat = {
        k.removeprefix(_TEXT): v for k, v in flat.items() if not k.endswith("attn_mask")
    }
    if "token_embedding.weight" not in flat:
        raise UserError(
            f"{source} has no text tower of OpenCLIP (token_embedding.weight): text "
            "towers from transformers inside OpenCLIP are not supported"
        )
    vocab_size, width = flat["token_embedding.weight"].shape
    num_heads = config.get("heads", max(1, width // 64))
    depth = tables.count_blocks(flat, f"{_BLOCKS}.")
    bias = "text_projection.bias" in flat
    pool = {"argmax": "eos", "eos": "eos", "last": "last"}.get(
        config.get("pool_type", "argmax")
    )
    if pool is None:
        raise UserError(
            f"{source}: text_cfg.pool_type={config['pool_type']!r} in {_CONFIG} is not one "
            "of argmax, eos, last, which text towers of this project support"
        )
    table = _text_table(depth, num_heads, bias=bias, shifted="logit_bias" in flat)
    params = _convert(flat, table, source, "text")
    about = {
        "causal": not config.get("no_causal_mask", False),
        "pool": pool,
        "activation": _activation(config, quick=quick),
        "layer_norm_eps": _epsilon(config),
    }
    if pool == "eos":
        ends = config.get("pool_type") == "eos"
        about["eos_id"] = config.get("eos_id", 2) if ends else vocab_size - 1
    return text_tower.read(params, **about)


def _read_preprocess(
    config: dict, size: int | Sequence[int], image_size: tuple[int, int], patch: int
) -> Preprocess:
    """Reads the preprocessing to `size` for a network of `image_size`."""
    default = hugging_face_clip.clip_preprocess(pair(size))
    if not config:
        return timm_config.fit_patches(default, image_size, patch)
    mode = config.get("resize_mode")
    bilinear = config.get("interpolation") == "bilinear"
    preprocess = Preprocess(
        default.image_size,
        _three(config.get("mean") or default.mean),
        _three(config.get("std") or default.std),
        interpolation="bilinear" if bilinear else "bicubic",  # "random" means bicubic.
        squash=mode == "squash",
        fill=_three(config.get("fill_color", 0)) if mode == "longest" else (),
    )
    return timm_config.fit_patches(preprocess, image_size, patch)


def _three(value) -> tuple:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * 3


def _image_table(depth: int, num_heads: int) -> list[tables.ArrayEntry]:
    options = {"depth": depth, "num_heads": num_heads}
    return tables.name_entries(_IMAGE_NAMES, options)


def _text_table(
    depth: int, num_heads: int, *, bias: bool, shifted: bool
) -> list[tables.ArrayEntry]:
    names = dict(_TEXT_NAMES)
    if bias:
        names["text/head"] = "text_projection"
    else:
        names["text/head/kernel"] = ("text_projection", tables.SAME)
    if shifted:
        names[text.LOGIT_BIAS] = (text.LOGIT_BIAS, _NUMBER)
    return tables.name_entries(names, {"depth": depth, "num_heads": num_heads})


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `open_clip.create_model("local-dir:FOLDER")` loads."""
    model = models.create(**pretrained.options)
    options, params = dict(model.options), pretrained.task_params
    if "text" not in params:
        raise UserError(
            f"{pretrained.source} has no text tower, but OpenCLIP's files need both: write "
            "the image tower with --to=hf_clip or --to=timm"
        )
    about = text_tower.config_of(pretrained)
    projection = params.get(text.PROJECTION, {})
    _check_writable(model, about, projection)
    flat = flatten_dict(pretrained.params, sep="/")
    notes = rewriting.norm_every_token(flat, options)
    notes += rewriting.store_positions(flat, options, model.grid)
    notes += rewriting.fold_layer_scale(flat, options)
    notes += rewriting.note_resize(options, "OpenCLIP")
    notes += rewriting.fold_patch_bias(flat, options, num_prefix_tokens=1)
    table = _image_table(options["depth"], options["num_heads"])
    image = tables.to_their_arrays(flat, table)
    del image["conv1.bias"]
    arrays = {f"{_VISUAL}{name}": value for name, value in image.items()}
    arrays[f"{_VISUAL}proj"] = np.asarray(projection["kernel"])
    others = {k: v for k, v in params.items() if k != text.PROJECTION}
    bias, shifted = about.projection == "bias", text.LOGIT_BIAS in params
    table = _text_table(about.depth, about.num_heads, bias=bias, shifted=shifted)
    arrays |= tables.to_their_arrays(flatten_dict(others, sep="/"), table)
    context_length = len(arrays["positional_embedding"])
    config = _write_config(
        options | {"patch": model.config.patch_size}, about, context_length
    )
    config["embed_dim"] = int(arrays[f"{_VISUAL}proj"].shape[1])
    if shifted:
        config["init_logit_bias"] = float(params[text.LOGIT_BIAS][0])
    whole = {"model_cfg": config}
    if how := pretrained.preprocess:
        how, more = rewriting.replace_filter(how, "OpenCLIP")
        notes += more
        images = whole["preprocess_cfg"] = _write_preprocess(how)
        sides = tuple(map(operator.add, options["image_size"], how.cut))
        config["vision_cfg"]["image_size"] = list(sides)
        written = _read_preprocess(
            images, sides, options["image_size"], model.config.patch_size
        )
        for name in ("interpolation", "crop_fraction", "short_side", "cut", "fill"):
            if (value := getattr(how, name)) != getattr(written, name):
                notes.append(
                    f"preprocessing: OpenCLIP does not support {name}={value!r}"
                )
    files.write_folder(folder, arrays, {_CONFIG: whole}, _WEIGHTS)
    return notes + tokenizer.copy_files(pretrained.tokenizer, folder)


def _check_writable(
    model: models.Model, about: text.TextConfig, projection: Mapping
) -> None:
    """Raises UserError unless OpenCLIP supports both towers."""
    options = model.options
    rewriting.check_network(
        options,
        "CLIP of OpenCLIP",
        {
            "pre_norm": (True,),
            "pool": ("token",),
            "num_classes": (0,),
            "activation": ("gelu", "gelu_tanh", "quick_gelu"),
        },
    )
    quick = [a == "quick_gelu" for a in (options["activation"], about.activation)]
    wrong = {
        "text.activation": quick[0] != quick[1],  # A single key sets both towers.
        "projection": projection.keys() != {"kernel"},
        "grid": model.grid[0] != model.grid[1],
        "channels": options["channels"] != 3,
    }
    if any(wrong.values()):
        raise UserError(
            f"OpenCLIP has no CLIP with this {next(k for k, v in wrong.items() if v)}: "
            "write it with --to=safetensors"
        )


def _write_config(options: dict, about: text.TextConfig, context_length: int) -> dict:
    """Returns model_cfg of both towers, without the width of their embeddings."""
    vision = {
        "image_size": list(options["image_size"]),
        "layers": options["depth"],
        "width": options["width"],
        "head_width": options["width"] // options["num_heads"],
        "mlp_ratio": options["mlp_dim"] / options["width"],
        "patch_size": options["patch"],
        "norm_kwargs": {"eps": options["layer_norm_eps"]},
    }
    words = {
        "context_length": context_length,
        "vocab_size": about.vocab_size,
        "width": about.width,
        "heads": about.num_heads,
        "layers": about.depth,
        "mlp_ratio": (about.mlp_dim or 4 * about.width) / about.width,
        "no_causal_mask": not about.causal,
        "pool_type": about.pool,
        "proj_bias": about.projection == "bias",
        "norm_kwargs": {"eps": about.layer_norm_eps},
    }
    for part, name in ((vision, options["activation"]), (words, about.activation)):
        if name == "gelu_tanh":
            part["act_kwargs"] = {"approximate": "tanh"}
    if about.pool == "eos":
        words["eos_id"] = about.eos_id
    quick = options["activation"] == "quick_gelu"
    towers = {"vision_cfg": vision, "text_cfg": words}
    return {"embed_dim": 0, "quick_gelu": quick} | towers


def _write_preprocess(how: Preprocess) -> dict:
    mode = "longest" if how.fill else "squash" if how.squash else "shortest"
    bilinear = how.interpolation == "bilinear"
    return {
        "mean": list(how.mean),
        "std": list(how.std),
        "interpolation": "bilinear" if bilinear else "bicubic",
        "resize_mode": mode,
        "fill_color": (*how.fill, 0)[0],
    }


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    place = f"hf-hub:{path}" if on_hub else f"local-dir:{path}"
    return f'import open_clip\nmodel = open_clip.create_model("{place}")'


READERS["OpenCLIP"] = Reader(recognises, read)
WRITERS["open_clip"] = Writer(
    write,
    usage=_usage,
    library="open_clip",
    with_task=True,
    files=(_CONFIG, _WEIGHTS, *tokenizer.FILES),
)

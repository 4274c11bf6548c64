"""Hugging Face's format, in and out: ViT and DeiT, with and without a classifier.

Files have the names of transformers 4 (`vit.encoder.layer.0.attention...`), which
version 5 still writes; what it shows in memory (`vit.layers.0.attention...`) is read
too.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Collection

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights.formats import fold, hugging_face_names, linen, torch_layout
from vit_jax.weights.formats import hugging_face_config as configs
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_UNUSED = {"embeddings.mask_token"}  # Stands for patches that training masks.


def recognises(names: Collection[str]) -> bool:
    """Tells whether these are the names of a file in this format."""
    return hugging_face_names.find_prefix(names) is not None


def read(tensors: Tensors, heads: int = 0) -> Pretrained:
    """Reads a checkpoint.

    Args:
      tensors: of the file or folder.
      heads: attention heads if config.json does not tell; 0 is those of the known
        sizes, or one for 64 features.

    Returns:
      The checkpoint in our terms.

    Raises:
      UserError: not a network that this project has.
    """
    facts = configs.read(tensors.sidecars.get("config.json", {}))
    flat, notes = hugging_face_names.rename(tensors.flat), []
    classified = {"classifier.weight", "cls_classifier.weight"} & flat.keys()
    if classified and "pooler.dense.weight" in flat:
        flat = {k: v for k, v in flat.items() if not k.startswith("pooler.")}
        notes.append("pooler: dropped, because the classifier does not see it")
    _check_network(flat, facts, tensors.path)
    if not facts.query_bias:
        flat, more = _zero_biases(flat)
        notes += more
    distilled = "embeddings.distillation_token" in flat
    if distilled and "classifier.weight" in flat:
        flat = fold.one_classifier(flat, "classifier", "distillation_classifier")
        flat = {re.sub("^classifier", "cls_classifier", k): v for k, v in flat.items()}
        notes.append("classifier: of the class token alone, written as a pair")
    classifier = "cls_classifier.weight" if distilled else "classifier.weight"
    depth = len({n.split(".")[2] for n in flat if n.startswith("encoder.layer.")})
    width = len(flat["embeddings.patch_embeddings.projection.weight"])
    heads, more = torch_layout.choose_heads(facts.heads, heads, width, depth)
    notes += more
    form = {
        "depth": depth,
        "heads": heads,
        "classes": len(flat.get(classifier, ())),
        "distillation": distilled,
        "representation": "pooler.dense.weight" in flat,
    }
    if not tensors.sidecars.get("config.json"):
        notes.append("config.json: none, so exact GELU and epsilon 1e-12")
    table = hugging_face_names.table(form)
    _check_names(flat, {entry.theirs for entry in table}, tensors.path)
    ours = torch_layout.read(flat, table, tensors.path)
    preprocess, more = configs.read_preprocess(
        tensors.sidecars.get("preprocessor_config.json", {})
    )
    names = facts.class_names
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options=_options(ours, form, facts, tensors.path),
        format="hugging_face",
        source=tensors.path,
        preprocess=preprocess,
        class_names=names if len(names) == form["classes"] else (),
        loss=facts.loss,
        notes=(*notes, *more),
    )


def _check_network(
    flat: dict[str, np.ndarray], facts: configs.Facts, source: str
) -> None:
    """Raises UserError for a network that no model here is."""
    block = "encoder.layer.0"
    needed = [
        "embeddings.cls_token",
        "embeddings.position_embeddings",
        f"{block}.attention.attention.query.weight",
        f"{block}.intermediate.dense.weight",
    ]
    if "classifier.weight" in flat:
        needed.append("classifier.bias")
    for name in needed:
        if name not in flat:
            raise UserError(
                f"{source}: {name} is missing: give the whole file of a ViT or DeiT"
            )
    rows, columns = flat[f"{block}.attention.attention.query.weight"].shape
    if rows != columns:
        raise UserError(
            f"{source}: heads of {rows} features in all beside a width of {columns} are "
            "not supported: models of this project have as many of both"
        )
    pooler = flat.get("pooler.dense.weight")
    if pooler is None:
        return
    if facts.pooler != "tanh":
        raise UserError(
            f"{source}: pooler_act={facts.pooler!r} in config.json is not supported: "
            "models of this project have tanh there"
        )
    if pooler.shape[0] != pooler.shape[1]:
        raise UserError(
            f"{source}: a pooler of {pooler.shape[0]} features (pooler_output_size) is "
            f"not supported: models of this project keep the width, {pooler.shape[1]}"
        )


def _check_names(flat: dict[str, np.ndarray], known: set[str], source: str) -> None:
    """Raises UserError if the encoder has an array that the table does not explain."""
    for name in sorted(flat.keys() - known - _UNUSED):
        if name.startswith(("embeddings.", "encoder.", "layernorm.", "pooler.")):
            raise UserError(
                f"{source}: {name} is not supported: no model here computes the same; "
                "give weights of a plain ViT or DeiT"
            )


def _zero_biases(
    flat: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Gives queries, keys and values without biases some that are zero."""
    weights = [n for n in flat if re.search(r"\.(query|key|value)\.weight$", n)]
    zeros = {
        f"{name.removesuffix('weight')}bias": np.zeros(len(flat[name]), np.float32)
        for name in weights
    }
    return zeros | flat, ["biases of query, key and value: none in the file, so zeros"]


def _options(
    ours: dict[str, np.ndarray], form: dict, facts: configs.Facts, source: str
) -> dict:
    rest = {name: value for name, value in ours.items() if name != POSITIONS}
    sizes = linen.transformer_options(rest)
    patch = ours["embedding/kernel"].shape[0]
    patches = ours[POSITIONS].shape[1] - 1 - form["distillation"]
    size = facts.image_size
    if size is None or math.prod(side // patch for side in size) != patches:
        side = math.isqrt(patches)
        if side * side != patches:
            raise UserError(
                f"{source} has position embeddings of {patches} patches, which are no "
                "square grid: keep its config.json beside it"
            )
        size = (side * patch, side * patch)
    return {
        **sizes,
        "image_size": size,
        "classes": form["classes"],
        "head": "token",
        "distillation": form["distillation"],
        "representation": form["representation"],
        "gelu": facts.gelu,
        "epsilon": facts.epsilon,
    }


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `AutoModelForImageClassification.from_pretrained` loads.

    Args:
      pretrained: with parameters that fit its options.
      folder: exists; gets model.safetensors, config.json and, if it is known how
        images are prepared, preprocessor_config.json.

    Returns:
      A line for each thing that was rewritten or left out.

    Raises:
      UserError: transformers has no such network or image processor.
    """
    model = models.create(**pretrained.options)
    flat, options = flatten_dict(pretrained.params, sep="/"), dict(model.options)
    _check(options)
    flat, options, notes = fold.norm_each_token(flat, options)
    flat, options, more = fold.plain_positions(flat, options, model.grid)
    notes += more
    options["patch"] = model.patch
    if options["posemb"] == "none":
        tokens = math.prod(model.grid) + 1 + options["distillation"]
        flat[POSITIONS] = np.zeros((1, tokens, options["width"]), np.float32)
        notes.append("position embeddings: none, written as zeros")

    folder = pathlib.Path(folder)
    files = {
        "config.json": configs.write(options, pretrained.class_names, pretrained.loss)
    }
    if pretrained.preprocess:
        files["preprocessor_config.json"] = configs.write_preprocess(
            pretrained.preprocess, options["channels"]
        )
    else:
        notes.append("preprocessing: nothing says how, so no preprocessor_config.json")
    arrays = torch_layout.write(flat, hugging_face_names.table(options))
    prefix = files["config.json"]["model_type"] + "."
    heads = ("classifier.", "cls_classifier.", "distillation_classifier.")
    if options["classes"]:  # The models without a classifier have no prefix.
        arrays = {
            k if k.startswith(heads) else prefix + k: v for k, v in arrays.items()
        }
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return notes


def _check(options: dict) -> None:
    if "depth" not in options or "stem_width" in options:
        raise UserError(
            f"variant={options['variant']!r}: Hugging Face's ViT has no ResNet: write it "
            "with --to=timm or --to=google"
        )
    if options["head"] != "token":
        raise UserError(
            f"head={options['head']!r}: Hugging Face's ViT classifies the class token "
            "only: write it with --to=timm"
        )
    if options["representation"] and (options["classes"] or options["distillation"]):
        raise UserError(
            "representation=True: Hugging Face's ViTForImageClassification has no tanh "
            "layer before the classifier: write it with --to=google or --to=safetensors"
        )

"""Google's npz, out: the names of the published checkpoints.

google-research/vision_transformer reads what it has a network for, big_vision also the
MAP head and the BiT ResNets.
"""

import os
import pathlib

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import preprocess
from vit_jax.weights.formats import fold
from vit_jax.weights.pretrained import Preprocess, Pretrained


def write(pretrained: Pretrained, path: str | os.PathLike) -> list[str]:
    """Writes an .npz file.

    Args:
      pretrained: with parameters that fit its options.
      path: of the file; its folder exists.

    Returns:
      A line for each thing that was rewritten or left out.

    Raises:
      UserError: Google's code has no such network.
    """
    model = models.create(**pretrained.options)
    flat, options = flatten_dict(pretrained.params, sep="/"), dict(model.options)
    notes = ["class names, preprocessing, loss: the format has no place for them"]
    notes += _preprocessing(pretrained.preprocess)
    if "depth" in options:
        _check(options)
        flat, options, more = fold.norm_each_token(flat, options)
        flat, options, written = fold.plain_positions(flat, options, model.grid)
        notes += more + written
        if options["gelu"] != "tanh":
            notes.append(
                "gelu: erf became tanh, Google's: logits differ in the third digit"
            )
        if options["epsilon"] != 1e-6:
            notes.append(f"epsilon: {options['epsilon']:g} became 1e-6, Google's")
        if model.grid[0] != model.grid[1] and options["posemb"] == "learned":
            raise UserError(
                f"a grid of {model.grid[0]}x{model.grid[1]}: readers of Google's npz "
                "take it as a square: write it with --to=timm or --to=safetensors"
            )
    else:
        if options["zero_pool"]:
            notes.append("root pooling: big_vision has no zero_pool=True")
        norms = ("gn1", "gn2", "gn3", "norm-pre-head")
        flat = {
            name: np.reshape(value, (1, 1, 1, -1))
            if name.split("/")[-2] in norms
            else value
            for name, value in flat.items()
        }
    with pathlib.Path(path).open("wb") as stream:
        np.savez(stream, **flat)
    return notes


def _preprocessing(given: Preprocess | None) -> list[str]:
    """Returns a note if images are prepared otherwise than readers take for granted."""
    if given is None:
        return []
    half = (0.5,) * len(given.mean), (0.5,) * len(given.std)
    usual = Preprocess(given.image_size, *half, squash=True)
    if given == usual:
        return []
    note = (
        f"images: readers of the format take it as {preprocess.describe(usual)}, so "
        f"predictions differ unless they are told {preprocess.describe(given)}"
    )
    return [note]


def _check(options: dict) -> None:
    """Raises UserError unless Google's code has such a network."""
    wrong = [
        name
        for name, known in (
            ("head", ("token", "gap", "map")),
            ("class_token", (options["head"] == "token", False)),
            ("distillation", (False,)),
            ("pooled_norm", (options["head"] == "token", False)),
            ("posemb", ("learned", "learned2d", "sincos2d")),
        )
        if options[name] not in known
    ]
    if wrong:
        raise UserError(
            f"{wrong[0]}={options[wrong[0]]!r}: Google's code has no such network: "
            "write it with --to=timm, --to=hf or --to=safetensors"
        )

"""Names of the published Flax parameters, and model options derived from their shapes.

Shared by the npz formats of Google's JAX code, and by the formats whose arrays are
first renamed to these names.
"""

import math
import re
from collections.abc import Collection, Sequence

import numpy as np
from flax.traverse_util import unflatten_dict

from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights.formats import tables
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.pretrained import POSITIONS, Pretrained

# Prefixes of the parameters: none, with optax's state, or in a Flax optimiser; and in
# each of these cases, for the image tower of a model with a text tower.
_PREFIXES = tuple(
    outer + inner for outer in ("", "params/", "opt/target/") for inner in ("", "img/")
)

_PARTS = "(LayerNorm|MultiHeadDotProductAttention|MlpBlock)"
_IN_BLOCK = re.compile(rf"^(Transformer/encoderblock(?:_\d+)?/){_PARTS}_(\d+)(?=/)")
_IN_MAP_HEAD = re.compile(rf"^(MAPHead_0/){_PARTS}_\d+(?=/)")

_ROOT = 4  # Downsampling of a hybrid's root; every later stage halves the size again.


def find_prefix(names: Collection[str], anchor: str) -> str | None:
    """Returns the prefix with which `anchor` is among the names; None if it is not."""
    return next((p for p in _PREFIXES if p + anchor in names), None)


def strip(
    flat: dict[str, np.ndarray], anchor: str
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Selects the parameters with `anchor`'s prefix and removes it; notes the others."""
    prefix = find_prefix(flat, anchor)
    inside = tables.below(flat, prefix)
    outside = [n for n in flat if not n.startswith(prefix)]
    if not outside:
        return inside, ()
    groups = sorted({"/".join(name.split("/")[:2]) for name in outside})
    shown = ", ".join(groups[:3]) + (", ..." if len(groups) > 3 else "")
    return inside, (f"ignored {len(outside)} arrays outside the network: {shown}",)


def rename_blocks(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames the layers of encoder blocks and of the MAP head to the published names.

    The published files number all layers of a block together (LayerNorm_2, MlpBlock_3),
    later files the layers of each class separately (LayerNorm_1, MlpBlock_0).

    Raises:
      UserError: two parameters would get the same name.
    """
    renamed = {}
    for name, value in flat.items():
        new = _IN_MAP_HEAD.sub(r"\1\2_0", _IN_BLOCK.sub(_published, name))
        if new in renamed:
            raise UserError(
                f"{name} is in the checkpoint twice, numbered in two ways: no known "
                "network has such names"
            )
        renamed[new] = value
    return renamed


def _published(match: re.Match) -> str:
    block, part, number = match.groups()
    number = {"MultiHeadDotProductAttention": 1, "MlpBlock": 3}.get(
        part, 2 if int(number) else 0
    )
    return f"{block}{part}_{number}"


def finish(
    tensors: Tensors,
    flat: dict[str, np.ndarray],
    options: dict,
    format: str,
    preprocess: Preprocess,
    notes: Sequence[str] = (),
) -> Pretrained:
    """Builds a checkpoint from parameters; the head determines the number of classes."""
    num_classes = np.shape(flat.get("head/kernel", ()))[-1]
    return Pretrained(
        params=unflatten_dict(flat, sep="/"),
        options=options | {"num_classes": num_classes},
        format=format,
        source=tensors.path,
        preprocess=preprocess,
        notes=tuple(notes),
    )


def whole_image(image_size: tuple[int, int]) -> Preprocess:
    """Returns the usual preprocessing of Google's code: the whole image, to [-1, 1].

    Source: input_pipeline.py of vision_transformer, input_pipeline_tf2_or_jax.py of
    big_transfer, configs/proj/image_text of big_vision.
    """
    return Preprocess(image_size, interpolation="bilinear_plain", squash=True)


def google_options(flat: dict[str, np.ndarray], image_size: tuple | None) -> dict:
    """Returns the options of an encoder of Google's code, except for those of its head."""
    return transformer_options(flat, image_size) | {
        "representation_layer": "pre_logits/kernel" in flat,
        "activation": "gelu_tanh",
        "layer_norm_eps": 1e-6,
    }


def flatten_norms(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Reshapes GroupNorm parameters stored as (1, 1, 1, C) to vectors."""
    return {
        name: value.reshape(-1)
        if value.ndim == 4 and name.endswith(("/scale", "/bias"))
        else value
        for name, value in flat.items()
    }


def transformer_options(
    flat: dict[str, np.ndarray], image_size: tuple[int, int] | None = None
) -> dict:
    """Returns the options of an encoder or hybrid that follow from its parameters.

    Args:
      flat: parameters by name, levels joined by "/".
      image_size: height and width in pixels, for grids of positions that are not
        square.

    Raises:
      UserError: the shapes do not belong to such a network.
    """
    block = "Transformer/encoderblock_0"
    shapes = {
        "embedding/kernel": 4,
        f"{block}/MlpBlock_3/Dense_0/kernel": 2,
        f"{block}/MultiHeadDotProductAttention_1/query/kernel": 3,
    }
    for name, dimensions in shapes.items():
        if name not in flat:
            raise UserError(f"{name} is missing: give the whole file of a network")
        if flat[name].ndim != dimensions:
            raise UserError(
                f"{name} of shape {flat[name].shape} does not fit a Vision Transformer"
            )
    kernel, hidden, query = (flat[name] for name in shapes)
    if kernel.shape[0] != kernel.shape[1]:
        raise UserError(
            f"patch {kernel.shape[:2]} is not square: models of this project have "
            "square patches"
        )
    blocks = {
        n.split("/")[1] for n in flat if n.startswith("Transformer/encoderblock_")
    }
    size = variants.Size(
        width=kernel.shape[-1],
        depth=len(blocks),
        num_heads=query.shape[1],
        mlp_dim=hidden.shape[-1],
    )
    name, options = nearest_size(size)
    if f"{block}/LayerScale_1/gamma" in flat:
        options["layer_scale_init"] = 1.0  # The file does not record the initial value.
    if "register_tokens" in flat:
        options["num_register_tokens"] = flat["register_tokens"].shape[1]
    patch, channels = kernel.shape[0], kernel.shape[2]
    if "conv_root/kernel" in flat:
        channels, stem_width = flat["conv_root/kernel"].shape[2:]
        stages = stem_blocks(flat)
        name, patch, more = _hybrid(name, stages, int(stem_width), patch)
        options |= more
    else:
        name = f"{name}/{patch}"
    return {
        "variant": name,
        **options,
        "image_size": _image_size(flat, patch, image_size),
        "channels": int(channels),
    }


def nearest_size(size: variants.Size) -> tuple[str, dict]:
    """Returns the name of the most similar size, and the fields that differ from it."""

    def differing(name):
        known = vars(variants.SIZES[name])
        return {k: value for k, value in vars(size).items() if value != known[k]}

    def distance(name):
        return len(differing(name)), abs(variants.SIZES[name].width - size.width)

    name = min(variants.SIZES, key=distance)
    return name, differing(name)


def stem_blocks(flat: dict[str, np.ndarray]) -> tuple[int, ...]:
    """Returns the number of units per stage of a ResNet."""
    units = {tuple(n.split("/")[:2]) for n in flat if re.match(r"block\d+/unit\d+/", n)}
    stages = [stage for stage, _ in units]
    return tuple(stages.count(f"block{i + 1}") for i in range(len(set(stages))))


def resnet_options(blocks: tuple[int, ...], stem_width: int) -> dict:
    """Returns the options of a ResNet: its variant, and those that differ from it.

    Args:
      blocks: number of units per stage.
      stem_width: number of features of the root.
    """
    names = {known: name for name, known in variants.RESNETS.items()}
    factor = stem_width / 64
    name = f"{names.get(blocks, 'R50')}x{max(1, round(factor))}"
    options = {"variant": name}
    if blocks not in names:
        options["stage_depths"] = blocks
    if factor != max(1, round(factor)):
        options["stem_width"] = stem_width
    return options


def _hybrid(
    size: str, blocks: tuple[int, ...], stem_width: int, patch: int
) -> tuple[str, int, dict]:
    """Returns a hybrid's variant, its patch size in pixels, and differing options."""
    options = {} if stem_width == 64 else {"stem_width": stem_width}
    stems = [
        (known != blocks, f"{stem}+{size}/{pixels}")
        for (stem, pixels), (known, side) in variants.STEMS.items()
        if len(known) == len(blocks) and side == patch
    ]
    if not stems:
        raise UserError(
            f"a hybrid with {len(blocks)} stages and patches of {patch} is not one of "
            f"{', '.join(f'{stem}+SIZE/{pixels}' for stem, pixels in variants.STEMS)}"
        )
    differs, name = min(stems)
    if differs:
        options["stage_depths"] = blocks
    return name, patch * _ROOT * 2 ** max(0, len(blocks) - 1), options


def _image_size(
    flat: dict[str, np.ndarray], patch: int, given: tuple[int, int] | None
) -> tuple[int, int]:
    """Returns the image size of the position embeddings; about 224 without them."""
    positions = flat.get(POSITIONS)
    if positions is None:
        side = max(1, round(224 / patch))
        return side * patch, side * patch
    patches = positions.shape[1] - ("cls" in flat)
    side = math.isqrt(patches)
    if side * side == patches:
        return side * patch, side * patch
    rows, columns = (pixels // patch for pixels in given or (0, 0))
    if rows * columns == patches:
        return rows * patch, columns * patch
    raise UserError(
        f"position embeddings of {patches} patches are not a square grid: give the "
        "height and width of training with --resolution, or start from a "
        "workdir or an exported file, which record their grid"
    )

"""What the npz formats of Google's JAX code share: names, and sizes read off shapes."""

import math
import re
from collections.abc import Collection

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights.pretrained import POSITIONS

# Where the parameters may stand in a file: by themselves, beside optax's state, in a
# Flax optimiser; and in each of these as the image tower beside a text tower.
_PREFIXES = tuple(
    outer + inner for outer in ("", "params/", "opt/target/") for inner in ("", "img/")
)

_PARTS = "(LayerNorm|MultiHeadDotProductAttention|MlpBlock)"
_IN_BLOCK = re.compile(rf"^(Transformer/encoderblock(?:_\d+)?/){_PARTS}_(\d+)(?=/)")
_IN_MAP_HEAD = re.compile(rf"^(MAPHead_0/){_PARTS}_\d+(?=/)")

_ROOT = 4  # Reduction of a hybrid's root; every stage but the first halves again.


def find_prefix(names: Collection[str], anchor: str) -> str | None:
    """Returns what stands in front of the name `anchor`, or None without it."""
    return next((p for p in _PREFIXES if p + anchor in names), None)


def strip(
    flat: dict[str, np.ndarray], anchor: str
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Takes the parameters out of a file that may hold more.

    Args:
      flat: name to array.
      anchor: a name that the network's parameters have.

    Returns:
      The parameters without their prefix, and a note if there is more in the file.
    """
    prefix = find_prefix(flat, anchor)
    inside = {
        n.removeprefix(prefix): v for n, v in flat.items() if n.startswith(prefix)
    }
    outside = [n for n in flat if not n.startswith(prefix)]
    if not outside:
        return inside, ()
    groups = sorted({"/".join(name.split("/")[:2]) for name in outside})
    shown = ", ".join(groups[:3]) + (", ..." if len(groups) > 3 else "")
    return inside, (f"ignored {len(outside)} arrays beside the network: {shown}",)


def rename_blocks(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gives the parts of the encoder blocks and of the MAP head the published names.

    The published files count all parts of a block together (LayerNorm_2, MlpBlock_3),
    later ones those of a kind (LayerNorm_1, MlpBlock_0).

    Raises:
      UserError: two parameters would have the same name.
    """
    renamed = {}
    for name, value in flat.items():
        new = _IN_MAP_HEAD.sub(r"\1\2_0", _IN_BLOCK.sub(_published, name))
        if new in renamed:
            raise UserError(
                f"{name} stands twice in the checkpoint, counted in two ways: it is of "
                "no known network"
            )
        renamed[new] = value
    return renamed


def _published(match: re.Match) -> str:
    block, part, number = match.groups()
    number = {"MultiHeadDotProductAttention": 1, "MlpBlock": 3}.get(
        part, 2 if int(number) else 0
    )
    return f"{block}{part}_{number}"


def flatten_norms(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Makes vectors of GroupNorm parameters stored as (1, 1, 1, C)."""
    return {
        name: value.reshape(-1)
        if value.ndim == 4 and name.endswith(("/scale", "/bias"))
        else value
        for name, value in flat.items()
    }


def transformer_options(flat: dict[str, np.ndarray]) -> dict:
    """Reads the options of an encoder or hybrid off its parameters.

    Args:
      flat: our names, joined by "/", to arrays.

    Returns:
      What `models.create` takes, but for the head and the flavours of the layers.

    Raises:
      UserError: the shapes are not those of such a network.
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
                f"{name} of shape {flat[name].shape} is not that of a Vision Transformer"
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
        heads=query.shape[1],
        mlp_dim=hidden.shape[-1],
    )
    name, options = nearest_size(size)
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
        "image_size": _image_size(flat, patch),
        "channels": int(channels),
    }


def nearest_size(size: variants.Size) -> tuple[str, dict]:
    """Returns the size most alike, and the numbers in which it differs."""

    def differing(name):
        known = variants.SIZES[name]
        return {
            field: value
            for field, value in vars(size).items()
            if value != getattr(known, field)
        }

    name = min(variants.SIZES, key=lambda name: len(differing(name)))
    return name, differing(name)


def stem_blocks(flat: dict[str, np.ndarray]) -> tuple[int, ...]:
    """Counts the units of each stage of a ResNet."""
    units = {tuple(n.split("/")[:2]) for n in flat if re.match(r"block\d+/unit\d+/", n)}
    stages = [stage for stage, _ in units]
    return tuple(stages.count(f"block{i + 1}") for i in range(len(set(stages))))


def _hybrid(
    size: str, blocks: tuple[int, ...], stem_width: int, patch: int
) -> tuple[str, int, dict]:
    """Returns a hybrid's name, the pixels of its patches and differing options."""
    options = {} if stem_width == 64 else {"stem_width": stem_width}
    alike = [
        (known != blocks, f"{stem}+{size}/{pixels}")
        for (stem, pixels), (known, side) in variants.STEMS.items()
        if len(known) == len(blocks) and side == patch
    ]
    if not alike:
        raise UserError(
            f"a hybrid with {len(blocks)} stages and patches of {patch} is none of "
            f"{', '.join(f'{stem}+SIZE/{pixels}' for stem, pixels in variants.STEMS)}"
        )
    differs, name = min(alike)
    if differs:
        options["blocks"] = blocks
    return name, patch * _ROOT * 2 ** max(0, len(blocks) - 1), options


def _image_size(flat: dict[str, np.ndarray], patch: int) -> tuple[int, int]:
    """Returns the image size that the position embeddings are for, or one near 224."""
    positions = flat.get(POSITIONS)
    if positions is None:
        side = max(1, round(224 / patch))
    else:
        patches = positions.shape[1] - ("cls" in flat)
        side = math.isqrt(patches)
        if side * side != patches:
            raise UserError(
                f"position embeddings of {patches} patches are not a square grid: "
                "start from a workdir or an exported file, which know their grid"
            )
    return side * patch, side * patch

"""The npz format of google-research/vision_transformer: original, AugReg, SAM, hybrids.

Its names are ours; only the parts of a block are counted in two ways.
"""

from collections.abc import Collection

import numpy as np
from flax.traverse_util import unflatten_dict

from vit_jax.weights.formats import linen
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.pretrained import POSITIONS, Preprocess, Pretrained


def recognises(names: Collection[str]) -> bool:
    """Tells whether these are the names of a file in this format."""
    return (
        linen.find_prefix(names, POSITIONS) in ("", "opt/target/")
        and linen.find_prefix(names, "embedding/kernel") is not None
        and linen.find_prefix(names, "MAPHead_0/probe") is None
    )


def read(tensors: Tensors, heads: int = 0) -> Pretrained:
    """Reads a checkpoint.

    Args:
      tensors: of the file.
      heads: not needed; the shapes tell.

    Returns:
      The checkpoint in our terms.

    Raises:
      UserError: the shapes are not those of a Vision Transformer or hybrid.
    """
    flat, notes = linen.strip(tensors.flat, POSITIONS)
    flat = linen.flatten_norms(linen.rename_blocks(flat))
    sizes = linen.transformer_options(flat)
    options = {
        **sizes,
        "classes": np.shape(flat.get("head/kernel", ()))[-1],
        "head": "token" if "cls" in flat else "gap",
        "representation": "pre_logits/kernel" in flat,
        "gelu": "tanh",
        "epsilon": 1e-6,
    }
    return Pretrained(
        params=unflatten_dict(flat, sep="/"),
        options=options,
        format="google",
        source=tensors.path,
        # input_pipeline.py there: the whole image is resized, bilinear, to [-1, 1].
        preprocess=Preprocess(options["image_size"], squash=True),
        notes=notes,
    )

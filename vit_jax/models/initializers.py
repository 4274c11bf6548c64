"""Initialisers of parameters; `model.init` or `task.text.init` chooses a `TABLE` row.

A layer uses the entry for its role in the row, such as `TABLE[init].mlp`. LayerScale,
the bias of the classifier and parameters that a task adds to the network have separate
keys.

PyTorch truncates `trunc_normal_(std=0.02)` at -2 and 2, a hundred standard deviations,
so it is a normal distribution. JAX's `truncated_normal(0.02)` is truncated at two
standard deviations, so its standard deviation is 0.0176. `TORCH` is the default of
`torch.nn.Linear` and `Conv2d`, for layers that a repository does not initialise itself.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.initializers import (
    Initializer,
    lecun_normal,
    normal,
    truncated_normal,
    xavier_uniform,
    zeros,
)
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.config import fields

# The last kernels of the two branches of a block.
_ENDS = (
    r"encoderblock_(\d+)/(MultiHeadDotProductAttention_1/out|MlpBlock_3/Dense_1)/kernel"
)


class Linear(NamedTuple):
    """Initialisers of a linear layer or of a convolution.

    Attributes:
      kernel: initialiser of the kernel; the last axis of the kernel are the outputs.
      bias: function from the number of inputs per output to the initialiser of the
        bias.
    """

    kernel: Initializer
    bias: Callable[[int], Initializer] = lambda inputs: zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initializers:
    """Initialisers by the role of a layer.

    Attributes:
      patches: patch embedding.
      attention: kernels of queries, keys and values, (inputs, outputs).
      attention_out: kernel of the output layer after the heads.
      mlp: first layer of an MLP, and its gate.
      mlp_out: last layer of an MLP.
      windows: Swin's kernels of attention, patch merging and V2's bias network, and
        V1's bias tables.
      class_token: class and distillation token.
      registers: register tokens.
      positions: learned positions.
      head: kernel of a classifier.
      mask_token, decoder: mask token and linear decoder of SimMIM.
      text_tokens, text_positions, text_head: table of tokens, positions and last kernel
        of a text tower.
      branch_factor: function from the number of a block, counted from 1, and the number
        of all blocks to a factor for the last kernels of branches; None for a factor of
        1.
    """

    patches: Linear
    attention: Initializer
    attention_out: Initializer
    mlp: Linear
    mlp_out: Linear
    windows: Initializer
    class_token: Initializer
    registers: Initializer
    positions: Initializer
    head: Initializer
    mask_token: Initializer
    decoder: Linear
    text_tokens: Initializer
    text_positions: Initializer
    text_head: Initializer
    branch_factor: Callable[[int, int], float] | None = None


def _uniform(inputs: int) -> Initializer:
    """Returns a uniform distribution between plus and minus 1 / sqrt(inputs)."""
    bound = inputs**-0.5
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
        key, shape, dtype, -bound, bound
    )


def _uniform_by_inputs(key, shape, dtype=jnp.float32):
    return _uniform(math.prod(shape[:-1]))(key, shape, dtype)


def _xavier_of_patches(key, shape, dtype=jnp.float32):
    """Xavier's distribution for a patch embedding as a linear layer."""
    flat = math.prod(shape[:-1]), shape[-1]
    return xavier_uniform()(key, flat, dtype).reshape(shape)


def _xavier_of_three(key, shape, dtype=jnp.float32):
    """Xavier's distribution for query, key and value as one layer of 3 x outputs."""
    bound = math.sqrt(6 / (shape[0] + 3 * shape[1]))
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _normal_by_axis(axis: int, times: int = 1) -> Initializer:
    """Returns a normal distribution, deviation 1 / sqrt(times * size of an axis)."""

    def init(key, shape, dtype=jnp.float32):
        return normal((times * shape[axis]) ** -0.5)(key, shape, dtype)

    return init


_normal = normal(0.02)
_cut_normal = truncated_normal(0.02, lower=-1.0, upper=1.0)
TORCH = Linear(_uniform_by_inputs, _uniform)

# google-research/vision_transformer c6de1e5, vit_jax/models_vit.py, lines 74 to 77
# (MLP), 141 (attention), 192 (positions), 264 (patches, as Flax does), 281 (class
# token), 306 (head). Registers are initialised as in DINOv2. Swin and text towers are
# not a part of this repository.
_GOOGLE = Initializers(
    patches=Linear(lecun_normal()),
    attention=xavier_uniform(),
    attention_out=xavier_uniform(),
    mlp=Linear(xavier_uniform(), lambda inputs: normal(1e-6)),
    mlp_out=Linear(xavier_uniform(), lambda inputs: normal(1e-6)),
    windows=truncated_normal(0.02),
    class_token=zeros,
    registers=normal(1e-6),
    positions=_normal,
    head=zeros,
    mask_token=truncated_normal(0.02),
    decoder=Linear(lecun_normal()),
    text_tokens=_normal,
    text_positions=normal(0.01),
    text_head=_normal_by_axis(0),
)

# google-research/big_vision 0127fb6, models/vit.py line 49 (positions), and
# models/proj/image_text/text_transformer.py, lines 63 (table: Flax's `nn.Embed`), 69
# (positions) and 98 (head: Flax's `nn.Dense`); blocks are those of Google.
_BIG_VISION = dataclasses.replace(
    _GOOGLE,
    positions=_normal_by_axis(-1),
    text_tokens=_normal_by_axis(-1),
    text_positions=_normal_by_axis(-1),
    text_head=lecun_normal(),
)

# facebookresearch/deit 7e160fe, models.py lines 28 to 30 and models_v2.py lines 216 to
# 224; facebookresearch/dino 7c446df, vision_transformer.py lines 161 to 169;
# facebookresearch/dinov3 6876159, models/vision_transformer.py lines 40 to 44 and 184
# to 186, layers/patch_embed.py line 87; microsoft/Swin-Transformer f82860b,
# models/swin_transformer.py lines 122 and 571 to 575, swin_transformer_v2.py lines 590
# to 594; wangf3014/ViT-5 b7b0796, models_vit5.py lines 185 to 194; timm 1.0.31,
# models/vision_transformer.py line 1364. None of them initialises the patch embedding
# itself. SimMIM's Swin is microsoft/SimMIM d3e29bc, models/swin_transformer.py lines
# 547 to 551, and models/simmim.py lines 26 and 104.
_TIMM = dataclasses.replace(
    _GOOGLE,
    patches=TORCH,
    attention=_normal,
    attention_out=_normal,
    mlp=Linear(_normal),
    mlp_out=Linear(_normal),
    windows=_normal,
    class_token=_normal,
    registers=_normal,
    head=_normal,
    mask_token=_normal,
    decoder=TORCH,
)

# facebookresearch/dinov2 b8931f7, models/vision_transformer.py, lines 173 to 178 and
# 336.
_DINOV2 = dataclasses.replace(_TIMM, class_token=normal(1e-6), registers=normal(1e-6))

# facebookresearch/mae efb2a80, models_mae.py lines 74 to 90, which also apply to the
# decoder; main_finetune.py line 257 (head). It does not initialise the biases of
# convolutions itself.
_MAE = dataclasses.replace(
    _TIMM,
    patches=Linear(_xavier_of_patches, _uniform),
    attention=_xavier_of_three,
    attention_out=xavier_uniform(),
    mlp=Linear(xavier_uniform()),
    mlp_out=Linear(xavier_uniform()),
    head=normal(2e-5),
)

# microsoft/SimMIM d3e29bc, models/vision_transformer.py lines 258 to 292. Pretraining
# replaces `_trunc_normal_` (models/simmim.py line 66) by a distribution that is
# truncated at one standard deviation, so its standard deviation is 0.0108. Fine-tuning
# multiplies the new head by 0.001.
_SIMMIM = dataclasses.replace(
    _TIMM,
    patches=Linear(_cut_normal),
    attention=_cut_normal,
    attention_out=_cut_normal,
    mlp=Linear(_cut_normal),
    mlp_out=Linear(_cut_normal),
    windows=_cut_normal,
    class_token=_cut_normal,
    positions=_cut_normal,
    head=normal(2e-5),
    mask_token=_cut_normal,
    branch_factor=lambda block, depth: (2 * block) ** -0.5,
)

# openai/CLIP d05afc4, clip/model.py lines 175 (`nn.MultiheadAttention`) and 211 to 215.
# The patch embedding of CLIP does not have a bias.
_CLIP = dataclasses.replace(
    _GOOGLE,
    patches=Linear(_uniform_by_inputs),
    attention=_xavier_of_three,
    attention_out=_uniform_by_inputs,
    mlp=TORCH,
    mlp_out=TORCH,
    class_token=_normal_by_axis(-1),
    positions=_normal_by_axis(-1),
)

# openai/CLIP d05afc4, clip/model.py lines 300 to 326, which do not initialise the
# biases of the MLPs.
_CLIP_TEXT = dataclasses.replace(
    _GOOGLE,
    attention=_normal_by_axis(0),
    attention_out=_normal_by_axis(0),
    mlp=Linear(_normal_by_axis(0, times=2), _uniform),
    mlp_out=Linear(_normal_by_axis(-1), _uniform),
    branch_factor=lambda block, depth: (2 * depth) ** -0.5,
)

TABLE = {
    "google": _GOOGLE,
    "big_vision": _BIG_VISION,
    "timm": _TIMM,
    "dinov2": _DINOV2,
    "mae": _MAE,
    "simmim": _SIMMIM,
    "clip": _CLIP,
    "clip_text": _CLIP_TEXT,
}


def key() -> Any:
    """Returns a config key that chooses a row of `TABLE`."""
    return fields.key(
        "google",
        'Initialisation of the parameters: "google" (ViT), "big_vision" (LiT, SigLIP), '
        '"timm" (DeiT, DeiT III, DINO, DINOv3, Swin, ViT-5), "dinov2", "mae", "simmim" '
        '(SimMIM\'s ViT), "clip" or "clip_text"; see vit_jax/models/initializers.py.',
        choices=tuple(TABLE),
        training_only=True,
    )


def of(config: object) -> Initializers:
    """Returns the row of a network; Google's if its config does not have the key."""
    return TABLE[getattr(config, "init", "google")]


def scale_branches(params: Mapping, config: object) -> Mapping:
    """Multiplies the last kernels of branches by the row's `branch_factor`.

    Args:
      params: initial parameters, with one subtree per block.
      config: config of a network or of a text tower.
    """
    factor = of(config).branch_factor
    if factor is None:
        return params
    flat = flatten_dict(params, sep="/")
    for path in flat:
        if match := re.search(_ENDS, path):
            flat[path] = flat[path] * factor(int(match[1]) + 1, config.depth)
    return unflatten_dict(flat, sep="/")

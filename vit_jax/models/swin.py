"""Swin Transformers V1 (arXiv:2103.14030) and V2 (arXiv:2111.09883).

Patches attend only within windows of the grid of patches, and every second block shifts
the windows. Between stages 2x2 patches are merged into one. If the grid is not a
multiple of the window, libraries pad it in three ways, see `WINDOW_PADDINGS`.

Letters: B images, Y by X patches, N patches, W windows, M patches per window, H heads,
K head width, D width, L classes.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import initializers, kept, kernels, layers
from vit_jax.models.layers import (
    ACTIVATIONS,
    INTERMEDIATES,
    Dense,
    LayerNorm,
    Mlp,
    PatchEmbedding,
    drop_path,
)
from vit_jax.models.network import BlockWindows, NetworkConfig
from vit_jax.models.positions.relative_bias import resize_bias_table
from vit_jax.models.variants import overridden
from vit_jax.models.windows import Grid, Windows, pad

# Values of `model.window_padding`. A grid that is not a multiple of the window is
# padded after the shift (timm) or before it (Microsoft's detection code, transformers).
# If a side is at most as long as the window, there is no shift along this side (timm)
# or along both sides (Microsoft, and V1 of transformers). V2 of transformers checks
# only the height, and its mask is twice as large.
WINDOW_PADDINGS = ("timm", "microsoft", "transformers")
BIAS_RESIZES = ("bicubic", "geometric")  # Methods of Microsoft and of timm.

_MASKED = -100.0  # Added to logits of patches that are neighbours only by the shift.
_LARGEST_SCALE = math.log(100)  # Upper limit of the logarithm of V2's logit scale.
_BIAS_UNITS = 512  # Hidden units of V2's bias network.
_BIAS_RANGE = 16  # Largest bias of that network.


@dataclasses.dataclass(frozen=True)
class Size:
    """The numbers of a size (arXiv:2103.14030, section 3.3).

    Attributes:
      width: features per patch of the first stage, which double in each further stage.
      stage_depths: blocks of each stage.
      num_heads: attention heads of each stage.
    """

    width: int
    stage_depths: tuple[int, ...]
    num_heads: tuple[int, ...]


SIZES = {
    "T": Size(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "S": Size(96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "B": Size(128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "L": Size(192, (2, 2, 18, 2), (6, 12, 24, 48)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwinConfig(NetworkConfig):
    """Swin Transformers such as `Swin-T`, `Swin-B/w12` and `SwinV2-T/w8`.

    The window size is 7 patches, and 8 in V2, unless the variant or `window_size` sets
    it.
    """

    names: ClassVar[tuple[str, ...]] = (
        *(f"Swin-{size}" for size in SIZES),
        *("Swin-B/w12", "Swin-L/w12"),
        *(f"SwinV2-{size}/w{window}" for size in "TSB" for window in (8, 16)),
        *("SwinV2-B/w12", "SwinV2-B/w24"),
        *(f"SwinV2-L/w{window}" for window in (12, 16, 24)),
    )

    before_blocks = ("embedding", "embedding_norm")
    after_blocks = ("norm", "head")

    variant: str = key(
        "Swin-T",
        'Version, size and window size, such as "Swin-T", "Swin-B/w12" or '
        '"SwinV2-T/w8".',
    )
    patch_size: int = key(4, "Side of a patch, in pixels.", at_least=1)
    width: int = key(
        0,
        "Features per patch of the first stage, which double in each further stage; 0 "
        "is the value of the variant.",
    )
    stage_depths: tuple[int, ...] = key(
        (0,), "Number of blocks of each stage; (0,) is the value of the variant."
    )
    num_heads: tuple[int, ...] = key(
        (0,), "Attention heads of each stage; (0,) is the value of the variant."
    )
    mlp_ratio: float = key(
        4.0, "Hidden units of an MLP, as a multiple of the features.", above=0
    )
    window_size: int = key(
        0, "Side of a window in patches; 0 is the value of the variant."
    )
    pretrained_window_sizes: tuple[int, ...] = key(
        (0,),
        "For Swin V2: window size of each stage in pretraining, which scales "
        "coordinates to [-1, 1]; 0 is the current window size.",
    )
    window_padding: str = key(
        "timm",
        'Padding of grids that are not a multiple of the window: "timm" pads after the '
        'shift, "microsoft" and "transformers" before it. They also differ in the '
        "shift of a grid that is at most as long as a window.",
        reason="weights of Microsoft and transformers at other image sizes",
        choices=WINDOW_PADDINGS,
    )
    bias_resize: str = key(
        "bicubic",
        "For Swin V1: method that resizes the bias tables for other window sizes, "
        '"bicubic" (Microsoft) or "geometric" (timm).',
        choices=BIAS_RESIZES,
    )
    activation: str = key("gelu", "Activation of the MLPs.", choices=tuple(ACTIVATIONS))
    layer_norm_eps: float = key(1e-5, "Epsilon of the LayerNorms.", above=0)
    patch_norm_eps: float = key(
        0.0,
        "Epsilon of the LayerNorms after the patch embedding and in patch merging; 0 "
        "is `model.layer_norm_eps`.",
        reason="weights of transformers, which uses 1e-5 here",
    )
    init: str = initializers.key()
    drop_path_rate: float = key(
        0.0,
        "Stochastic depth: drop rate of the last block; the rates increase linearly "
        "from 0 at the first block.",
        below=1,
        training_only=True,
    )

    @property
    def v2(self) -> bool:
        """Whether the network is Swin V2."""
        return self.variant.startswith("SwinV2")

    @property
    def encoder_stride(self) -> int:
        """Side of a patch of the last stage in pixels."""
        return self.patch_size * 2 ** (len(self.size.stage_depths) - 1)

    @property
    def size(self) -> Size:
        """The sizes of the variant, overridden by keys that are not 0."""
        return overridden(self._parsed[0], self)

    @property
    def epsilon_of_patches(self) -> float:
        """`patch_norm_eps`, or else `layer_norm_eps`."""
        return self.patch_norm_eps or self.layer_norm_eps

    @property
    def window(self) -> int:
        """Side of a window in patches."""
        return self.window_size or self._parsed[1]

    @property
    def _parsed(self) -> tuple[Size, int]:
        match = re.fullmatch(r"Swin(V2)?-(\w+?)(?:/w([1-9]\d?))?", self.variant)
        if not match or match[2] not in SIZES:
            raise UserError(
                f"model.variant={self.variant!r} is not Swin-SIZE or SwinV2-SIZE: choose a "
                f"size out of {', '.join(SIZES)}, optionally with a window of 1 to 99 "
                "patches, such as 'Swin-T' or 'SwinV2-B/w16'"
            )
        return SIZES[match[2]], int(match[3] or (8 if match[1] else 7))

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all stages."""
        return sum(self.size.stage_depths)

    @property
    def num_layers(self) -> int:
        """Number of stages."""
        return len(self.size.stage_depths)

    def layer_of(self, path: str) -> int:
        """See `NetworkConfig.layer_of`; merging is in the layer of the block before."""
        if match := re.match(r"stage_(\d+)/(?:block_(\d+)|merge)", path):
            stage = int(match[1])
            depths = self.size.stage_depths
            if match[2]:
                return sum(depths[:stage]) + int(match[2]) + 1
            return sum(depths[: stage + 1])
        return super().layer_of(path)

    def build(
        self, num_classes: int, image_shape: tuple[int, int, int]
    ) -> "SwinTransformer":
        size = self.size
        stages = len(size.stage_depths)
        if len(size.num_heads) != stages or min(size.stage_depths) < 1:
            raise UserError(
                f"model.stage_depths={size.stage_depths} and model.num_heads="
                f"{size.num_heads}: set a number of at least 1 in both for each stage"
            )
        if len(self.pretrained_window_sizes) not in (1, stages):
            raise UserError(
                f"model.pretrained_window_sizes={self.pretrained_window_sizes} must have "
                f"one size for each of the {stages} stages"
            )
        for i, heads in enumerate(size.num_heads):
            if heads < 1 or size.width * 2**i % heads:
                raise UserError(
                    f"model.num_heads={size.num_heads}: the {size.width * 2**i} features of "
                    f"stage {i + 1} are not a multiple of {heads} heads: change "
                    "model.num_heads or model.width"
                )
        return SwinTransformer(self, num_classes)

    def resize(
        self, params: Mapping, source: NetworkConfig, old_grid: Grid, grid: Grid
    ) -> Mapping:
        """Resizes the bias tables of V1 to the windows of another grid."""
        old_sizes, sizes = (
            [windows.size for windows, _ in config.layout(patches)]
            for config, patches in ((source, old_grid), (self, grid))
        )
        if self.v2 or source.v2 or len(old_sizes) != len(sizes) or old_sizes == sizes:
            return params
        resized = dict(params)
        for i, (old, new) in enumerate(zip(old_sizes, sizes, strict=True)):
            if old == new:
                continue
            stage = resized[f"stage_{i}"] = dict(params[f"stage_{i}"])
            for name in [name for name in stage if name.startswith("block_")]:
                table = stage[name]["attn"]["bias_table"]
                table = resize_bias_table(table, old, new, self.bias_resize)
                attn = {**stage[name]["attn"], "bias_table": table}
                stage[name] = {**stage[name], "attn": attn}
        return resized

    def window_attention(
        self, module: nn.Module, params: Mapping, images: Float[Array, "B Y X C"]
    ) -> tuple[dict[str, Array], list[BlockWindows]]:
        """See `NetworkConfig.window_attention`."""
        outputs, kept = module.apply(
            {"params": params}, images, mutable=[INTERMEDIATES]
        )
        grid = tuple(side // self.patch_size for side in images.shape[1:3])
        blocks = []
        for i, layout in enumerate(self.layout(grid)):
            stage = kept[INTERMEDIATES][f"stage_{i}"]
            for j in range(len(stage)):
                windows = layout[j % 2]
                blocks.append(
                    BlockWindows(
                        stage=i,
                        block=j,
                        shifted=any(windows.shift),
                        grid=windows.grid,
                        patches=windows.patches(),
                        weights=stage[f"block_{j}"]["attn"]["weights"][0],
                    )
                )
        return outputs, blocks

    def layout(self, grid: Grid) -> list[tuple["Windows", "Windows"]]:
        """Returns the windows of each stage, without and with a shift."""
        stages = []
        for _ in self.size.stage_depths:
            stages.append((self._windows(grid, False), self._windows(grid, True)))
            grid = -(-grid[0] // 2), -(-grid[1] // 2)
        return stages

    def _windows(self, grid: Grid, shifted: bool) -> "Windows":
        window, shift = self.window, self.window // 2 if shifted else 0
        transformers_v2 = self.window_padding == "transformers" and self.v2
        sides = grid
        if transformers_v2:
            sides = (grid[0], grid[0])
        elif self.window_padding != "timm":
            sides = (min(grid), min(grid))
        return Windows(
            grid=grid,
            size=tuple(min(side, window) for side in sides),
            shift=tuple(0 if side <= window else shift for side in sides),
            pad_first=self.window_padding != "timm",
            masked=2 * _MASKED if transformers_v2 else _MASKED,
        )


class SwinTransformer(nn.Module):
    """A Swin Transformer; the size of the images determines its windows.

    Attributes:
      config: keys of the network.
      num_classes: L; 0 for no classifier.
    """

    config: SwinConfig
    num_classes: int

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        train: bool = False,
        edit_patches: Callable | None = None,
        classify: bool = True,
    ) -> dict[str, Float[Array, "..."]] | Float[Array, "B N D"]:
        """Classifies images.

        Args:
          images: normalised images.
          train: whether stochastic depth is active.
          edit_patches: function that changes the patch embeddings (B, patches, width).
          classify: whether to classify; otherwise the patches of the last stage are
            returned.

        Returns:
          "logits" (B, L), unless L is 0, and "pre_logits" (B, D).
        """
        config, size = self.config, self.config.size
        x = PatchEmbedding(
            size.width,
            config.patch_size,
            config.dtype,
            initial=config.init,
            name="embedding",
        )(images.astype(config.dtype))
        grid = x.shape[1:3]
        x = x.reshape(x.shape[0], -1, size.width)
        x = LayerNorm(config.epsilon_of_patches, config.dtype, name="embedding_norm")(x)
        x = x if edit_patches is None else edit_patches(x)
        rates = np.linspace(0, config.drop_path_rate, sum(size.stage_depths)).tolist()
        layout, first, outputs = config.layout(grid), 0, []
        pretrained = config.pretrained_window_sizes
        if len(pretrained) == 1:
            pretrained = pretrained * len(layout)
        for i, depth in enumerate(size.stage_depths):
            stage = Stage(
                config,
                size.num_heads[i],
                layout[i],
                pretrained[i],
                tuple(rates[first : first + depth]) if train else (0.0,) * depth,
                merges=i + 1 < len(layout),
                name=f"stage_{i}",
            )
            (y, x), first = stage(x), first + depth
            outputs.append(y.reshape(y.shape[0], *layout[i][0].grid, -1))
        norm = LayerNorm(config.layer_norm_eps, config.dtype, name="norm")
        kept.keep(self, outputs, norm, norm_all=False)
        x = norm(x)
        if not classify:
            return x
        features = x.astype(jnp.float32).mean(1)
        L, bias = self.num_classes, config.head_bias_init
        return layers.classify(features, L, bias, initial=config.init)


class Stage(nn.Module):
    """Blocks of one resolution, every second one shifted, followed by patch merging.

    Attributes:
      config: keys of the network.
      num_heads: number of heads H.
      windows: windows without and with a shift.
      pretrained_window: window size that scales V2's coordinates to [-1, 1]; 0 for the
        current window size.
      drop_path_rates: drop rate of each block.
      merges: whether 2x2 patches are merged at the end.
    """

    config: SwinConfig
    num_heads: int
    windows: tuple[Windows, Windows]
    pretrained_window: int
    drop_path_rates: tuple[float, ...]
    merges: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"]
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B M F"]]:
        """Returns the patches of the last block before and after patch merging.

        Merging leaves a quarter of the patches, with twice the features.
        """
        config = self.config
        for i, rate in enumerate(self.drop_path_rates):
            block = Block(
                config,
                self.num_heads,
                self.windows[i % 2],
                self.pretrained_window,
                rate,
                name=f"block_{i}",
            )
            x = block(x)
        if not self.merges:
            return x, x
        patches = x
        (B, _, D), (Y, X) = x.shape, self.windows[0].grid
        x = pad(x.reshape(B, Y, X, D), [(0, Y % 2), (0, X % 2)])
        # The order of the four patches is (0, 0), (1, 0), (0, 1), (1, 1).
        x = x.reshape(B, -(-Y // 2), 2, -(-X // 2), 2, D).transpose(0, 1, 3, 4, 2, 5)
        x = x.reshape(B, -1, 4 * D)
        norm = LayerNorm(config.epsilon_of_patches, config.dtype, name="merge_norm")
        reduce = _dense(2 * D, config, "merge", use_bias=False)
        x = norm(_each(reduce, x)) if config.v2 else _each(reduce, norm(x))
        return patches, x


class Block(nn.Module):
    """Attention in windows, then an MLP; V2 normalises after both, V1 before both.

    Attributes:
      config, num_heads, pretrained_window: see `Stage`.
      windows: windows of this block.
      drop_path_rate: drop rate of both branches.
    """

    repeated: ClassVar[bool] = True  # See cost.py.

    config: SwinConfig
    num_heads: int
    windows: Windows
    pretrained_window: int
    drop_path_rate: float

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Adds the outputs of attention and MLP to the patches."""
        config = self.config
        scale = nn.initializers.zeros if config.v2 else nn.initializers.ones

        def norm(name):
            return LayerNorm(config.layer_norm_eps, config.dtype, scale, name=name)

        def add(x, branch, norm):
            drawn = self.make_rng("dropout") if self.drop_path_rate else None
            y = norm(branch(x)) if config.v2 else branch(norm(x))
            return x + drop_path(y, self.drop_path_rate, drawn)

        attend = WindowAttention(
            config, self.num_heads, self.windows, self.pretrained_window, name="attn"
        )
        hidden = int(config.mlp_ratio * x.shape[-1])
        mlp = Mlp(
            hidden,
            activation=config.activation,
            dtype=config.dtype,
            initial=config.init,
            name="mlp",
        )
        x = add(x, attend, norm("norm1"))
        return add(x, mlp, norm("norm2"))


class WindowAttention(nn.Module):
    """Self-attention within each window.

    Attributes:
      config, num_heads, windows, pretrained_window: see `Block`.
    """

    config: SwinConfig
    num_heads: int
    windows: Windows
    pretrained_window: int

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Attends from each patch to the patches of its window."""
        config, D = self.config, x.shape[-1]
        x = self.windows.split(x)
        B, W, M, _ = x.shape
        qkv = _each(_dense(3 * D, config, "qkv", use_bias=not config.v2), x)
        if config.v2:
            zeros = nn.initializers.zeros
            query, value = (
                self.param(name, zeros, (D,), jnp.float32)
                for name in ("q_bias", "v_bias")
            )
            bias = jnp.concatenate([query, jnp.zeros(D), value])
            qkv = qkv + bias.astype(qkv.dtype).reshape(1, 1, 1, -1)
        q, k, v = (
            y.reshape(B, W, M, self.num_heads, -1).swapaxes(2, 3)
            for y in jnp.split(qkv, 3, axis=-1)
        )
        if config.v2:
            fill = nn.initializers.constant(math.log(10))
            scale = self.param("logit_scale", fill, (self.num_heads,), jnp.float32)
            scale = jnp.exp(jnp.minimum(scale, _LARGEST_SCALE)).reshape(1, 1, -1, 1, 1)
            logits = kernels.einsum("bwhmk,bwhnk->bwhmn", _unit(q), _unit(k)).astype(
                jnp.float32
            )
            logits = logits * scale
        else:
            q = q * (D // self.num_heads) ** -0.5
            logits = kernels.einsum("bwhmk,bwhnk->bwhmn", q, k).astype(jnp.float32)
        logits = logits + self._bias()[None, None]
        if (mask := self.windows.mask()) is not None:
            logits = logits + mask[None, :, None]
        weights = jax.nn.softmax(logits)
        if self.is_mutable_collection(INTERMEDIATES):
            self.sow(INTERMEDIATES, "weights", weights)
        x = kernels.einsum("bwhmn,bwhnk->bwhmk", weights.astype(v.dtype), v)
        x = x.swapaxes(2, 3).reshape(B, W, M, D)
        return self.windows.join(_each(_dense(D, config, "proj"), x))

    def _bias(self) -> Float[Array, "H M M"]:
        """Returns the term added to logits, which depends on the offset of patches."""
        config, (h, w) = self.config, self.windows.size
        rows, columns = (np.arange(n)[:, None] - np.arange(n) + n - 1 for n in (h, w))
        offsets = (2 * w - 1) * rows[:, None, :, None] + columns[None, :, None]
        if config.v2:
            sides = (self.pretrained_window,) * 2 if self.pretrained_window else (h, w)
            hidden = _dense(_BIAS_UNITS, config, "bias_in", dtype="float32")
            out = _dense(
                self.num_heads, config, "bias_out", dtype="float32", use_bias=False
            )
            table = out(nn.relu(hidden(log_coordinates((h, w), sides))))
        else:
            shape = ((2 * h - 1) * (2 * w - 1), self.num_heads)
            initial = initializers.TABLE[config.init].windows
            table = jnp.asarray(self.param("bias_table", initial, shape, jnp.float32))
        bias = table[offsets.reshape(h * w, h * w)].transpose(2, 0, 1)
        return _BIAS_RANGE * nn.sigmoid(bias) if config.v2 else bias


def log_coordinates(size: Grid, pretrained: Grid) -> Float[np.ndarray, "R 2"]:
    """Returns log-spaced offsets of two patches in a window, for V2's bias network.

    Args:
      size: size of the window in patches.
      pretrained: size of the window in pretraining, in which the largest offset is 1.

    Returns:
      Offsets down and across, sign(x) * log2(8 * |x| + 1) / log2(8).
    """
    down, across = (
        np.arange(1 - n, n, dtype=np.float32) / max(1, p - 1)
        for n, p in zip(size, pretrained, strict=True)
    )
    offsets = np.stack(np.meshgrid(down, across, indexing="ij"), -1).reshape(-1, 2) * 8
    logarithms = np.log2(np.abs(offsets) + 1) / np.float32(math.log2(8))
    return np.sign(offsets) * logarithms


def _each(dense: nn.Dense, x: Float[Array, "*T M"]) -> Float[Array, "*T F"]:
    """Applies a dense layer as a 2-D product, see kernels.flatten_tokens."""
    return dense(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def _dense(features: int, config: SwinConfig, name: str, **options) -> nn.Dense:
    initial = initializers.TABLE[config.init].windows
    return Dense(
        features, kernel_init=initial, name=name, **{"dtype": config.dtype, **options}
    )


def _unit(x):
    """Divides vectors by their norms, as torch.nn.functional.normalize."""
    x32 = x.astype(jnp.float32)
    square = jnp.square(x32).sum(-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(jnp.maximum(square, 1e-24))).astype(x.dtype)

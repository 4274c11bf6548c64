"""Config keys of a Vision Transformer: encoder, tokens, pooling and head.

Letters: B images, Y by X pixels, N tokens, C channels, D model width, F pooled
features.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import pooling, positions, variants
from vit_jax.models.encoder import BLOCK, ENCODER
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.models.pooling import Weights
from vit_jax.models.vit import VisionTransformer, varied

_BY_BLOCK = (BLOCK, "posembed", "relative_embedding", "relative_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(EncoderConfig):
    """A Vision Transformer without variations."""

    before_blocks = (
        *("cls", "register_tokens", "embedding"),
        *("posembed_input", "pre_norm", "relative_bias"),
    )
    # BEiT trains the shared table of relative embeddings at the full learning rate.
    after_blocks = (
        *("encoder_norm", "cls_norm", "relative_embedding", "fc_norm", "pre_logits"),
        "MAPHead_0",
        CLASSIFIERS[0],
    )

    pool: str = key(
        "token",
        'Pooling of tokens for the classifier: "token" (the class token), "gap" (the '
        'mean of the patches), "token_gap" (both, as in DINOv2\'s linear classifiers), '
        '"map" (attention pooling), or "none" (every token is classified).',
        choices=tuple(pooling.POOLS),
    )
    class_token: bool = key(
        False,
        "Add a class token although `model.pool` does not need it.",
        only_if={"pool": ("gap", "map", "none")},
    )
    num_register_tokens: int = key(
        0,
        "Number of registers (arXiv:2309.16588): learned tokens before the patches, "
        'without positions. Only the pooling "map" uses their outputs.',
        below=1_000,
    )
    representation_layer: bool = key(
        False,
        "Add a dense layer with tanh, of the width of the model, before the "
        "classifier.",
    )
    fc_norm: bool = key(
        False,
        "Apply the final LayerNorm after the pooling instead of before it, as timm's "
        "fc_norm does.",
    )
    cls_norm: bool = key(
        False,
        "Use a separate final LayerNorm for the tokens before the patches.",
        reason="weights of DINOv3 (arXiv:2508.10104), untie_cls_and_patch_norms of its code",
    )

    @property
    def numbers(self) -> variants.Variant:
        """Sizes of the variant; the config of a user's network overrides them."""
        return variants.parse(self.variant)

    @property
    def variations(self) -> tuple[type[VisionTransformer], ...]:
        """Classes of the variations that the keys turn on, the outermost first."""
        return ()

    @property
    def pooling(self) -> Callable:
        """The function that pools tokens, see pooling.py."""
        return pooling.POOLS[self.pool]

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.numbers.patch_size

    @property
    def patch_side(self) -> int:
        """Side of a patch in features of the stem."""
        return self.numbers.patch_size

    @property
    def encoder_stride(self) -> int:
        """Side of a patch in pixels, since patches are not merged."""
        return self.patch_size

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Names of the tokens before the patches, in order."""
        token = self.pool in ("token", "token_gap") or self.class_token
        registers = range(1, self.num_register_tokens + 1)
        return ("class token",) * token + tuple(f"register {i}" for i in registers)

    @property
    def encoder_norm(self) -> bool:
        """Whether the encoder ends with a LayerNorm; with `fc_norm` it does not."""
        return self.final_norm and not self.fc_norm

    def sized(self) -> "ViTConfig":
        """See `NetworkConfig.sized`."""
        return variants.with_numbers(self, self.numbers.size)

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        grid = tuple(side // self.patch_size for side in image_shape[:2])
        placed = self.placed(math.prod(grid) + len(self.prefix_tokens))
        return varied(self.variations)(placed, num_classes, grid)

    @property
    def num_blocks(self) -> int:
        """Number of encoder blocks."""
        return self.depth

    num_layers = num_blocks

    def layer_of(self, path: str) -> int | range:
        """See `NetworkConfig.layer_of`."""
        path = path.removeprefix(f"{ENCODER}/")
        name = path.partition("/")[0]
        kind, _, number = name.rpartition("_")
        if kind in _BY_BLOCK and number.isdecimal():
            return 0 if name == "posembed_0" else int(number) + 1
        return super().layer_of(path)

    def resize(
        self,
        params: Mapping,
        source: "ViTConfig",
        old_grid: tuple[int, int],
        grid: tuple[int, int],
    ) -> Mapping:
        """Resizes with the source's `posemb_resize`; see `NetworkConfig.resize`."""
        if old_grid != grid and self.posemb == "relative":
            raise UserError(
                "model.posemb='relative' cannot be resized to another image size: set "
                "it to 'learned'"
            )
        return positions.resize(params, old_grid, grid, method=source.posemb_resize)

    def pool_layer(
        self,
        params: Mapping,
        x: Float[Array, "B N D"],
        *,
        norm: bool,
        places: Weights | None = None,
    ) -> Float[Array, "B F"]:
        """Returns one vector per image: the class token with `pool="token"`.

        Args:
          params, x, norm: see `NetworkConfig.pool_layer`.
          places: weights of the patches in the pooling; None for equal weights.
        """
        x = pooling.of_layer(self)(self, x, places)
        if norm and self.fc_norm:
            x = self.norm().apply({"params": params["fc_norm"]}, x)
        return x.astype(jnp.float32)

    def stem(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B y x D"]:
        """Returns the input of the patch embedding; call it in a compact method."""
        return images

    def check(self) -> None:
        super().check()
        if self.fc_norm and not self.final_norm:
            raise UserError(
                "model.fc_norm=True moves the final norm, but model.final_norm=False "
                "removes it: change one of them"
            )
        if self.cls_norm and not (self.encoder_norm and self.prefix_tokens):
            raise UserError(
                "model.cls_norm=True adds a final norm for tokens before the patches: "
                "set model.final_norm=True, model.fc_norm=False, and add such tokens, "
                "for example by model.pool='token'"
            )
        if self.pool == "token_gap" and self.fc_norm:
            raise UserError(
                "model.fc_norm=True does not support model.pool='token_gap', which "
                "pools two vectors: set model.fc_norm=False"
            )

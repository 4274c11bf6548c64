"""Keys of a Vision Transformer: those of its encoder, its tokens, pooling and head.

Letters: B images, Y by X pixels, N tokens, C channels, D model width, F pooled features.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config.fields import Registry, key
from vit_jax.errors import UserError
from vit_jax.models import flexivit, pooling, positions, stacking, variants
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.models.patches import Places

NETWORKS = Registry({"varied": "vit_jax.models.varied:VariedTransformer"})

_BY_BLOCK = (stacking.STACKED, "posembed", "relative_embedding", "relative_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(EncoderConfig):
    """All others, as `B/16`"""

    before_blocks = (
        *("cls", "dist", "register_tokens", "embedding", "conv_root", "gn_root"),
        *("posembed_input", "pre_norm", "relative_bias"),
    )
    # BEiT trains the shared table of relative embeddings at the full learning rate.
    after_blocks = (
        *("encoder_norm", "cls_norm", "relative_embedding", "fc_norm", "pre_logits"),
        "MAPHead_0",
        *CLASSIFIERS,
    )

    pool: str = key(
        "token",
        'Classifier input: "token", "gap" (mean), "token_gap" (both, as for DINOv2\'s '
        'linear classifiers), "map" (attention), or "none": every token.',
        choices=tuple(pooling.POOLS),
    )
    class_token: bool = key(
        False,
        "Keep a class token beside the patches.",
        only_if={"pool": ("gap", "map", "none")},
    )
    distillation: bool = key(
        False, "DeiT's distillation token; the logits of both classifiers are averaged."
    )
    num_register_tokens: int = key(
        0,
        "Learnt tokens without position before the patches, used by no pool but "
        '"map" (arXiv:2309.16588).',
        below=1_000,
    )
    patch_dropout: float = key(
        0.0,
        "Fraction of the patches, others in each image, that training leaves out after "
        "positions are added (arXiv:2208.07220).",
        below=1,
        training_only=True,
    )
    patch_resize: str = key(
        flexivit.DEFAULT,
        "How the kernel of patches is resized for patches of another side: "
        '"bilinear_plain" (FlexiViT of big_vision) or "bicubic" (timm).',
        choices=tuple(flexivit.METHODS),
    )
    representation_layer: bool = key(
        False, "One tanh layer of the model's width before the head."
    )
    fc_norm: bool = key(
        False, "The final LayerNorm after the pooling, as timm's fc_norm."
    )
    cls_norm: bool = key(
        False,
        "A separate final LayerNorm of the tokens before the patches (DINOv3's "
        "untie_cls_and_patch_norms).",
    )

    @property
    def numbers(self) -> variants.Variant:
        """Size of the encoder and side of a patch; a user's network overrides it."""
        return variants.parse(self.variant)

    @property
    def network(self) -> type[nn.Module]:
        """Class of the network."""
        return NETWORKS["varied"]

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
        """Side of a patch in pixels, since no patches are merged."""
        return self.patch_size

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Names of the tokens before the patches, in order."""
        token = self.pool in ("token", "token_gap") or self.class_token
        names = ["class token"] if token else []
        names += ["distillation token"] if self.distillation else []
        registers = range(1, self.num_register_tokens + 1)
        return (*names, *(f"register {i}" for i in registers))

    @property
    def no_sequences(self) -> str:
        """See `NetworkConfig`."""
        if type(self).stem is not ViTConfig.stem:
            return super().no_sequences
        merging = f"token_merging={self.token_merging}" if self.token_merging else ""
        return self.relative or merging

    @property
    def encoder_norm(self) -> bool:
        """Whether a LayerNorm ends the encoder; `fc_norm` comes after the pooling."""
        return self.final_norm and not self.fc_norm

    def sized(self) -> "ViTConfig":
        """See `NetworkConfig.sized`."""
        return variants.with_numbers(self, self.numbers.size)

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        self._check_pooling()
        self.network.check(self)
        grid = tuple(side // self.patch_size for side in image_shape[:2])
        num_tokens = math.prod(grid) + len(self.prefix_tokens)
        placed, asked = self.placed(num_tokens), self.attention_impl
        return self.network(placed, num_classes, grid, asked)

    @property
    def num_blocks(self) -> int:
        """Number of encoder blocks."""
        return self.depth

    num_layers = num_blocks

    def layer_of(self, path: str) -> int | range:
        """See `NetworkConfig.layer_of`; a stem is layer 0."""
        path = path.removeprefix(f"{stacking.ENCODER}/")
        name = path.partition("/")[0]
        kind, _, number = name.rpartition("_")
        if kind in _BY_BLOCK and number.isdecimal():
            return 0 if name == "posembed_0" else int(number) + 1
        if name == "rope_frequencies":
            return range(1, self.depth + 1)
        if re.fullmatch(r"block\d+", name):
            return 0
        return super().layer_of(path)

    def resize(
        self,
        params: Mapping,
        source: "ViTConfig",
        old_grid: tuple[int, int],
        grid: tuple[int, int],
    ) -> Mapping:
        """See `NetworkConfig.resize`; the method is `posemb_resize` of the source."""
        if old_grid != grid and self.posemb == "relative":
            raise UserError(
                "model.posemb='relative' has positions for one image size alone: set it "
                "to 'learned'"
            )
        return positions.resize(params, old_grid, grid, method=source.posemb_resize)

    def pool_layer(
        self,
        params: Mapping,
        x: Float[Array, "B N D"],
        *,
        norm: bool,
        places: Places | None = None,
    ) -> Float[Array, "B F"]:
        """See `NetworkConfig.pool_layer`; with `pool="token"` it is the class token.

        `places` are those of the patches of sequences.
        """
        x = pooling.of_layer(self)(self, x, places)
        if norm and self.fc_norm:
            x = self.norm().apply({"params": params["fc_norm"]}, x)
        return x.astype(jnp.float32)

    def stem(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B y x D"]:
        """Returns the input of the patch embedding; call it in a compact method."""
        return images

    def _check_pooling(self) -> None:
        if self.fc_norm and not self.final_norm:
            raise UserError(
                "model.fc_norm=True moves the final norm, but model.final_norm=False "
                "removes it: change one of them"
            )
        if self.cls_norm and not (self.encoder_norm and self.prefix_tokens):
            raise UserError(
                "model.cls_norm=True is the final norm of tokens before the patches: it "
                "needs model.final_norm=True, model.fc_norm=False and such tokens, as of "
                "model.pool='token'"
            )
        if self.pool == "token_gap" and self.fc_norm:
            raise UserError(
                "model.fc_norm=True with model.pool='token_gap', which pools two vectors: "
                "set model.fc_norm=False"
            )
        if self.distillation and self.pool != "token":
            raise UserError(
                f"model.distillation=True needs pool=token, not {self.pool}: set "
                "model.pool='token'"
            )

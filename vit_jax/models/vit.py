"""The Vision Transformer (arXiv:2010.11929, section 3.1) and its hybrids.

Parameters are named and shaped as in the published Google checkpoints, for a scan as in
stacking.py.
Letters: B images, Y by X pixels or patches, C channels, V visible patches, N tokens,
R registers, D model width, L classes.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import (
    flexivit,
    layers,
    merging,
    patches,
    posemb,
    resnet,
    stacking,
    variants,
)
from vit_jax.models.encoder import Encoder
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.layers import CLASSIFIERS, MapHead
from vit_jax.models.patches import PatchSequences, Places

POOLS = ("token", "gap", "token_gap", "map", "none")

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
        choices=POOLS,
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
    token_init_std: float = key(
        0.0,
        "Standard deviation of the first values of class token and registers; 0: zeros, "
        "and 1e-6 for registers.",
        training_only=True,
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
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return variants.parse(self.variant).patch_size

    @property
    def patch_side(self) -> int:
        """Side of a patch in features of the stem."""
        return variants.parse(self.variant).patch_size

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
        return variants.with_numbers(self, variants.parse(self.variant).size)

    def build(
        self, num_classes: int, image_shape: tuple[int, int, int]
    ) -> "VisionTransformer":
        self._check_pooling()
        self._check_patch_dropout()
        merging.check(self)
        grid = tuple(side // self.patch_size for side in image_shape[:2])
        num_tokens = math.prod(grid) + len(self.prefix_tokens)
        placed, asked = self.placed(num_tokens), self.attention_impl
        return VisionTransformer(placed, num_classes, grid, asked)

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
        return posemb.resize_in_params(
            params, old_grid, grid, method=source.posemb_resize
        )

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
        pooled = [x[:, 0]] if self.pool in ("token", "token_gap") else []
        if self.pool != "token":
            x = x[:, len(self.prefix_tokens) :]
            pooled.append(x.mean(1) if places is None else places.means(x))
        x = jnp.concatenate(pooled, axis=-1)
        if norm and self.fc_norm:
            x = self.norm().apply({"params": params["fc_norm"]}, x)
        return x.astype(jnp.float32)

    def stem(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B y x D"]:
        """Returns the input of the patch embedding; call it in a compact method."""
        return images

    def _check_patch_dropout(self) -> None:
        if self.patch_dropout and self.relative:
            raise UserError(
                f"model.patch_dropout={self.patch_dropout} with {self.relative}, which is "
                "of all patches: set model.patch_dropout to 0"
            )

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(ViTConfig, resnet.StemConfig):
    """Hybrids, as `R50+B/16`"""

    encoder_stride = 0  # Features of the stem cannot be edited as patches can.

    @property
    def patch_size(self) -> int:
        """Side of a token in pixels."""
        return self.patch_side * self.reduction

    def sized(self) -> "HybridConfig":
        """See `NetworkConfig.sized`."""
        return variants.with_numbers(
            super().sized(), variants.parse(self.variant).resnet
        )

    def build(
        self, num_classes: int, image_shape: tuple[int, int, int]
    ) -> "VisionTransformer":
        self.check_stem()
        return super().build(num_classes, image_shape)

    def stem(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B y x D"]:
        """Returns the features of the ResNet; call it in a compact method."""
        return resnet.stem(images, self)


class VisionTransformer(nn.Module):
    """A Vision Transformer or a hybrid; `num_classes` is L, 0 for no classifier.

    `config` is the output of `EncoderConfig.placed`; `grid` are the rows and columns of
    patches for which it has position embeddings. `attention_impl` is the key as given: its
    choice depends on the length of sequences.
    """

    config: ViTConfig
    num_classes: int
    grid: tuple[int, int]
    attention_impl: str = "auto"

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "B Y X C"] | PatchSequences,
        *,
        train: bool = False,
        edit_patches: Callable[[Array], Array] | None = None,
        visible: Int[Array, "B V"] | None = None,
        classify: bool = True,
    ) -> dict[str, Float[Array, "..."]] | Float[Array, "B N D"]:
        """Classifies images, or encodes their tokens.

        Args:
          images: normalised images, whose sides are multiples of the patch, or sequences
            of patches of any side; results then have a row for each image, see patches.py.
          train: whether dropout and stochastic depth are active (needs an rng
            "dropout").
          edit_patches: function of the patch embeddings (B, YX, D), row by row, applied
            before positions are added.
          visible: indices of the patches of each image that the encoder gets; None for
            all, except in training with `patch_dropout`. Relative positions need all.
          classify: whether to classify; otherwise the tokens of the encoder are
            returned, the prefix first.

        Returns:
          "pre_logits" (B, D), the features (with distillation the class token's), and
          "logits" (B, L), unless L is 0; float32. With pool "none" (B, N, D) and
          (B, N, L), with "token_gap" (B, 2 D) and (B, L).
        """
        places, kept, config = None, None, self.config
        if isinstance(images, PatchSequences):
            self._check_sequences(images)
            places = kept = images.places()
        x = self.embed(images, edit_patches)
        if places is not None:
            asked = dataclasses.replace(config, attention_impl=self.attention_impl)
            config = asked.placed(x.shape[1])
        P, R = len(self.config.prefix_tokens), self.config.num_register_tokens
        if self.config.token_merging and not train:
            if not classify or self.config.pool == "none":
                self.config.check_unmerged()
            encoder = merging.MergingEncoder(
                self.config, self.grid, P, R, name=stacking.ENCODER
            )
            return self.classify(*encoder(x))
        if train and self.config.patch_dropout and visible is None:
            visible, kept = self._draw_patches(x, places)
        encoder = Encoder(config, self.grid, P, R, name=stacking.ENCODER)
        x = encoder(x, train=train, visible=visible, places=places, kept=kept)
        return self.classify(x, places=kept) if classify else x

    def embed(
        self,
        images: Float[Array, "B Y X C"] | PatchSequences,
        edit_patches: Callable[[Array], Array] | None = None,
    ) -> Float[Array, "B N D"]:
        """Returns the input tokens of the encoder."""
        config, side = self.config, None
        if isinstance(images, PatchSequences):
            images, side = images.pixels, images.patch_size
        x = layers.PatchEmbedding(
            config.width,
            config.patch_side,
            config.dtype,
            config.patch_resize,
            row_major=config.platform == "gpu",
            name="embedding",
        )(config.stem(images), side)
        B, *_, D = x.shape
        x = x.reshape(B, -1, D)
        x = edit_patches(x) if edit_patches else x
        names = ["cls"] if "class token" in config.prefix_tokens else []
        names += ["dist"] if config.distillation else []
        std = config.token_init_std
        init = nn.initializers.normal(std) if std else nn.initializers.zeros
        tokens = [self.param(n, init, (1, 1, D)) for n in names]
        if R := config.num_register_tokens:
            init = nn.initializers.normal(std or 1e-6)
            tokens.append(self.param("register_tokens", init, (1, R, D)))
        tokens = [
            jnp.broadcast_to(t.astype(x.dtype), (B, *t.shape[1:])) for t in tokens
        ]
        return jnp.concatenate([*tokens, x], axis=1)

    def _check_sequences(self, images: PatchSequences) -> None:
        """Raises UserError if the network cannot read sequences of patches."""
        obstacle, tokens = self.config.no_sequences, self.config.prefix_tokens
        if images.grids.shape[1] > 1 and tokens and not obstacle:
            obstacle = f"several in one, and one {tokens[0]}, as of model.pool='token'"
        if obstacle:
            raise UserError(
                f"images of any size with {obstacle}: change it, or give images of one size"
            )

    def _draw_patches(self, x: Float[Array, "B N D"], places: Places | None):
        """Returns indices of the patches that patch dropout keeps, and their places."""
        fraction, key = self.config.patch_dropout, self.make_rng("dropout")
        if places is not None:
            visible, kept = patches.draw(places, fraction, key)
            return visible, places.take(visible, kept)
        count = x.shape[1] - len(self.config.prefix_tokens)
        kept = max(1, round(count * (1 - fraction)))
        noise = jax.random.uniform(key, (len(x), count))
        return jnp.argsort(noise, axis=1)[:, :kept], None

    def classify(
        self,
        x: Float[Array, "B N D"],
        sizes: Float[Array, "B N"] | None = None,
        places: Places | None = None,
    ) -> dict[str, Float[Array, "..."]]:
        """Computes the outputs from the tokens of the encoder.

        Args:
          x: tokens of the encoder.
          sizes: number of patches in each token, see merging.py; None if all are 1.
          places: places of the patches in images of any size; None if all are of one.
        """
        config = self.config
        L = self.num_classes
        if config.distillation:
            x = self._features(x[:, :2])
            outputs, other = (
                layers.classify(x[:, i], L, config.head_bias_init, name)
                for i, name in enumerate(CLASSIFIERS)
            )
            if L:
                logits = outputs["logits"], other["logits"]
                outputs |= zip(("class_logits", "distillation_logits"), logits)
                outputs["logits"] = sum(logits) / 2
            return outputs
        if config.pool == "token":
            x = x[:, 0]
        elif config.pool in ("gap", "token_gap"):
            mean = self._mean(x, sizes, places)
            token = [x[:, 0]] if config.pool == "token_gap" else []
            x = jnp.concatenate([*token, mean], axis=-1)
        elif config.pool == "map":
            bias = None if sizes is None else merging.logit_bias(sizes)
            if places is not None:
                P = len(config.prefix_tokens)
                bias = jnp.pad(places.logit_bias(), ((0, 0),) * 3 + ((P, 0),))
            x = MapHead(
                config.num_heads,
                config.mlp_dim,
                config.activation,
                config.norm,
                config.dtype,
                config.merges_tokens,
                name="MAPHead_0",
            )(x, bias)
        return layers.classify(self._features(x), L, config.head_bias_init)

    def _mean(self, x, sizes, places):
        """Returns the mean over the patches."""
        P = len(self.config.prefix_tokens)
        if places is not None:
            return places.means(x[:, P:])
        if sizes is None:
            return x[:, P:].mean(axis=1)
        return merging.mean(x[:, P:], sizes[:, P:])

    def _features(self, x):
        """Returns the classifier's input, float32."""
        config = self.config
        if config.fc_norm:
            x = config.norm(name="fc_norm")(x)
        if config.representation_layer:
            x = nn.Dense(config.width, dtype=config.dtype, name="pre_logits")(x)
            x = nn.tanh(x)
        return x.astype(jnp.float32)

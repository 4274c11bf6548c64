"""Masked autoencoders (MAE, arXiv:2111.06377).

The encoder gets only the visible patches and the class token; a small decoder, which is
discarded after pretraining, predicts the pixels of the hidden patches. Losses and masks
are those of facebookresearch/mae. Letters: B images, N patches, V visible patches, D
and W width of encoder and decoder, P side of a patch, C channels.
"""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model, cost
from vit_jax.models.encoder import ENCODER
from vit_jax.models.layers import Dense
from vit_jax.models.positions.added import AddedPosition
from vit_jax.models.repetition import RepeatedConfig, RepeatedEncoder
from vit_jax.tasks.masking import MaskedImageTask, mean_over, patchify, ranks
from vit_jax.tasks.task import TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaeConfig(TaskConfig):
    """MAE: predicts the pixels of hidden patches from the visible patches."""

    has_pictures: ClassVar[bool] = True
    needs_all_patches: ClassVar[bool] = True

    name: str = key("mae", "Task to train.")
    mask_ratio: float = key(
        0.75,
        "Fraction of the patches that is hidden; if 0, the loss covers all patches.",
        below=1,
    )
    normalize_targets: bool = key(
        True,
        "Normalise the target pixels of each patch by their mean and standard "
        "deviation.",
    )
    decoder_width: int = key(512, "Width of the decoder's tokens.", at_least=4)
    decoder_depth: int = key(8, "Number of blocks of the decoder.", at_least=1)
    decoder_num_heads: int = key(
        16, "Attention heads per block of the decoder.", at_least=1
    )
    decoder_mlp_dim: int = key(
        0,
        "Hidden units of the decoder's MLPs; 0 is 4 times `task.decoder_width`.",
        reason="MAE weights of transformers with decoder_intermediate_size",
    )

    def build(self, model, data, run, saved=None) -> "Mae":
        return Mae(self, model, data)


class Mae(MaskedImageTask):
    """The MAE task; the parameters are "network" and "decoder".

    Raises:
      UserError: no patch is visible, the encoder adds positions elsewhere than at the
        stem, or the decoder cannot be built.
    """

    def __init__(self, config: MaeConfig, model: Model, data: DataConfig):
        super().__init__("mae", model, data)
        self.config = config
        self.num_visible = int(self.num_patches * (1 - config.mask_ratio))
        if not self.num_visible:
            raise UserError(
                f"task.mask_ratio={config.mask_ratio} leaves none of the "
                f"{self.num_patches} patches visible: lower it"
            )
        if obstacle := model.config.relative or AddedPosition.in_blocks(model.config):
            raise UserError(
                f"{obstacle} with task.name='mae', whose encoder gets some of the patches: "
                "choose positions of single patches, with model.posemb_placement='stem'"
            )
        width, num_heads = config.decoder_width, config.decoder_num_heads
        if width % num_heads or width % 4:
            raise UserError(
                f"task.decoder_width={width} is not a multiple of 4 and of "
                f"task.decoder_num_heads={num_heads}: change one of them"
            )
        encoder = model.config
        self.decoder = Decoder(
            config=RepeatedConfig(
                width=width,
                depth=config.decoder_depth,
                num_heads=num_heads,
                mlp_dim=config.decoder_mlp_dim or 4 * width,
                posemb="sincos2d_mae",
                activation=encoder.activation,
                layer_norm_eps=encoder.layer_norm_eps,
                init=encoder.init,
                dtype=encoder.dtype,
                remat_policy=encoder.remat_policy,
                attention_impl=encoder.attention_impl,
                platform=encoder.platform,
            ).placed(self.num_patches + model.num_prefix_tokens),
            grid=model.grid,
            num_prefix_tokens=model.num_prefix_tokens,
            outputs=model.config.patch_size**2 * data.channels,
        )

    def init(self, rng):
        network_key, decoder_key = jax.random.split(rng)
        network = self.model.init(network_key)
        tokens = self.num_visible + self.model.num_prefix_tokens
        latent = jnp.zeros((1, tokens, self.model.options["width"]))
        hidden = jnp.zeros((1, self.num_patches), jnp.int32)
        decoder = self.decoder.init(decoder_key, latent, hidden)["params"]
        return {"network": network, "decoder": decoder}, None

    def predict(self, params, batch, *, train=False, key=None):
        """Returns predictions and mask; patches of lowest noise (B, N) are visible."""
        return self._predict(self.model, self.decoder, params, batch, train, key)

    def _predict(self, model, decoder, params, batch, train=False, key=None):
        images = batch["image"].astype(model.options["dtype"])
        place, visible = ranks(batch["noise"]), jnp.argsort(batch["noise"], axis=1)
        visible = visible[:, : self.num_visible]
        latent = model.encode(
            params["network"], images, train=train, key=key, visible=visible
        )
        with model.config.matmul_precision():
            predicted = decoder.apply({"params": params["decoder"]}, latent, place)
        mask = (place >= self.num_visible).astype(jnp.float32)
        return predicted.astype(jnp.float32), mask

    def targets(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B N PPC"]:
        """Returns the target pixels of normalised images."""
        patches = patchify(images.astype(jnp.float32), self.model.config.patch_size)
        if not self.config.normalize_targets:
            return patches
        mean, deviation = _statistics(patches)
        return (patches - mean) / deviation

    def metrics(self, extra, batch, predicted, mask):
        """Returns the mean squared error over the hidden patches as "loss"."""
        errors = jnp.square(predicted - self.targets(batch["image"])).mean(-1)
        counted = mask if self.config.mask_ratio else jnp.ones_like(mask)
        return {"loss": mean_over(errors, counted)}

    def pixels_of(self, predicted, images):
        """Returns predictions as normalised pixels.

        With `normalize_targets`, mean and contrast are taken from the hidden patches.
        """
        if not self.config.normalize_targets:
            return predicted
        mean, deviation = _statistics(patchify(images, self.model.config.patch_size))
        return predicted * deviation + mean

    def training_flops(self):
        shapes, _ = jax.eval_shape(self.init, jax.random.key(0))
        batch = {
            "image": jnp.zeros((1, *self.model.image_shape)),
            "noise": jnp.zeros((1, self.num_patches)),
        }
        plain = dataclasses.replace(self.decoder.config, attention_impl="einsum")
        decoder = self.decoder.clone(config=plain)

        def forward(model):
            params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return self._predict(model, decoder, params, batch)

        flops = cost.flops(forward, self.model)
        return None if flops is None else 3 * flops


class Decoder(nn.Module):
    """Predicts all patches from the tokens of the visible ones.

    Attributes:
      config: config of the decoder's blocks.
      grid: patches down and across.
      num_prefix_tokens: number of tokens before the patches.
      outputs: number of values predicted per patch.
    """

    config: RepeatedConfig
    grid: tuple[int, int]
    num_prefix_tokens: int
    outputs: int

    @nn.compact
    def __call__(
        self, latent: Float[Array, "B V D"], place: Int[Array, "B N"]
    ) -> Float[Array, "B N outputs"]:
        """Returns predictions for all patches.

        Args:
          latent: output of the encoder: prefix tokens, then the visible patches.
          place: index of each patch among the visible ones; V or more if it is hidden.
        """
        config, P = self.config, self.num_prefix_tokens
        dense = functools.partial(
            Dense, kernel_init=nn.initializers.xavier_uniform(), dtype=config.dtype
        )
        x = dense(config.width, name="embedding")(latent)
        token = self.param(
            "mask_token", nn.initializers.normal(0.02), (1, 1, config.width)
        )
        visible = x[:, P:]
        taken = place.clip(0, visible.shape[1] - 1)[..., None]
        patches = jnp.where(
            (place < visible.shape[1])[..., None],
            jnp.take_along_axis(visible, taken, axis=1),
            token.astype(x.dtype),
        )
        x = jnp.concatenate([x[:, :P], patches], axis=1)
        x = RepeatedEncoder(config, self.grid, P, name=ENCODER)(x)
        return dense(self.outputs, name="head")(x[:, P:])


def _statistics(patches: Float[Array, "B N PPC"]) -> tuple[Array, Array]:
    """Returns mean and standard deviation of the pixels of each patch, (B, N, 1)."""
    mean = patches.mean(-1, keepdims=True)
    variance = patches.var(-1, keepdims=True, ddof=1)
    return mean, jnp.sqrt(variance + 1e-6)

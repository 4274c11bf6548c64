"""Text transformers: the text towers of CLIP, LiT and SigLIP.

The parameters beside the image network are one tree. "text" is the text tower.
"projection" is a linear map of image features; it is absent if they have the width of
the shared space. "logit_scale" (1,) is the logarithm of a factor of similarities.
"logit_bias" (1,) is a term added to similarities; it is absent if it is 0.

Letters: B images or texts, T tokens, D model width, E width of the shared space, K
texts.
"""

import dataclasses
import functools
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import initializers, kernels, repetition
from vit_jax.models.attention import Positions
from vit_jax.models.encoder import Block
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.layers import ACTIVATIONS, Dense

TEXT, PROJECTION = "text", "projection"
LOGIT_SCALE, LOGIT_BIAS = "logit_scale", "logit_bias"
PARAMS = (TEXT, PROJECTION, LOGIT_SCALE, LOGIT_BIAS)

# Term added to the logits of later tokens, so that their weight is 0 in any dtype.
_HIDDEN = -1e30
_EPSILON = 1e-8  # Term added to the norm of an embedding, as in LiT.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """A text transformer."""

    vocab_size: int = key(
        0,
        "Number of tokens of the vocabulary; 0 is the size of `data.tokenizer`.",
        below=2**31,
    )
    width: int = key(768, "Features per token.", at_least=1)
    depth: int = key(12, "Number of blocks.", at_least=1)
    num_heads: int = key(12, "Attention heads per block.", at_least=1)
    mlp_dim: int = key(0, "Hidden units of the MLPs; 0 is four times the width.")
    causal: bool = key(
        False,
        "Use causal attention (CLIP) instead of bidirectional attention (LiT, SigLIP).",
    )
    pool: str = key(
        "last",
        'Token that becomes the embedding of a text: the "last" token (LiT, SigLIP), '
        'or "eos", the first end-of-text token (CLIP).',
        choices=("last", "eos"),
    )
    eos_id: int = key(
        -1,
        "Id of the end-of-text token; -1 is the id in `data.tokenizer`.",
        at_least=-1,
        only_if={"pool": ("eos",)},
    )
    projection: str = key(
        "bias",
        'Last linear layer of the text tower: with a "bias" (LiT, SigLIP), or "plain", '
        "without a bias (CLIP).",
        choices=("bias", "plain"),
    )
    activation: str = key(
        "gelu_tanh",
        "Activation of the MLPs, as in `model.activation`.",
        choices=tuple(ACTIVATIONS),
    )
    layer_norm_eps: float = key(1e-6, "Epsilon of the LayerNorms.", above=0)
    init: str = initializers.key()

    def build(
        self,
        num_tokens: int,
        embed_dim: int,
        dtype: str,
        remat_policy: str = "none",
        platform: str = "",
    ) -> "TextTransformer":
        """Builds the network.

        Args:
          num_tokens: number of tokens per text, T.
          embed_dim: width of the shared space, E.
          dtype, remat_policy, platform: see `EncoderConfig`.
        """
        return TextTransformer(
            self, num_tokens, embed_dim, dtype, remat_policy, platform
        )


class TextTransformer(nn.Module):
    """A text transformer, which embeds texts.

    Attributes:
      config: config of the tower, with `vocab_size` and, for pool "eos", `eos_id` set.
      num_tokens, embed_dim, dtype, remat_policy, platform: see `TextConfig.build`.
    """

    config: TextConfig
    num_tokens: int
    embed_dim: int
    dtype: str = "float32"
    remat_policy: str = "none"
    platform: str = ""

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B E"]:
        """Returns embeddings, float32, which are not normalised."""
        config, T = self.config, self.num_tokens
        row = initializers.TABLE[config.init]
        shape = (config.vocab_size, config.width)
        table = self.param("embedding", row.text_tokens, shape, jnp.float32)
        # Parameters read from a file may be NumPy arrays.
        x = jnp.asarray(table).astype(self.dtype)[tokens]
        shape = (1, T, config.width)
        added = self.param("pos_embedding", row.text_positions, shape, jnp.float32)
        x = x + added.astype(self.dtype)
        positions = None
        if config.causal:
            behind = jnp.triu(jnp.full((T, T), _HIDDEN, jnp.float32), 1)
            positions = Positions(
                bias=jnp.broadcast_to(behind, (config.num_heads, T, T))
            )
        policy = "none" if self.is_initializing() else self.remat_policy
        run = repetition.wrap_remat(_run_block, policy, in_scan=False)
        encoder = EncoderConfig(
            num_heads=config.num_heads,
            mlp_dim=config.mlp_dim or 4 * config.width,
            activation=config.activation,
            layer_norm_eps=config.layer_norm_eps,
            init=config.init,
            dtype=self.dtype,
            platform=self.platform or jax.default_backend(),
            attention_impl="einsum",
        )
        for i in range(config.depth):
            x = run(Block(encoder, name=f"encoderblock_{i}"), x, positions)
        x = encoder.norm(name="encoder_norm")(x)
        if config.pool == "last":
            x = x[:, -1]
        else:
            ends = (tokens == config.eos_id).argmax(1)
            x = jnp.take_along_axis(x, ends[:, None, None], axis=1)[:, 0]
        head = Dense(
            self.embed_dim,
            use_bias=config.projection == "bias",
            kernel_init=row.text_head,
            name="head",
        )
        return head(x.astype(jnp.float32))


def _run_block(block: Block, x: jax.Array, positions: Positions | None) -> jax.Array:
    return block(x, positions)


def embed_images(params: Mapping, features: Float[Array, "B D"]) -> Float[Array, "B E"]:
    """Returns unit-length embeddings of images.

    Args:
      params: parameters beside the image network.
      features: `pre_logits` of the image network.
    """
    x = features.astype(jnp.float32)
    if PROJECTION in params:
        x = kernels.product(x, jnp.asarray(params[PROJECTION]["kernel"]))
        if "bias" in params[PROJECTION]:
            x = x + jnp.asarray(params[PROJECTION]["bias"])[None]
    return normalized(x)


def embed_texts(
    module: TextTransformer, params: Mapping, tokens: Int[Array, "B T"]
) -> Float[Array, "B E"]:
    """Returns unit-length embeddings of texts.

    Args:
      module: text tower.
      params: see `embed_images`.
      tokens: tokens of the texts.
    """
    return normalized(module.apply({"params": params[TEXT]}, tokens))


@jax.named_scope("contrastive")
def normalized(x: Float[Array, "B E"]) -> Float[Array, "B E"]:
    """Divides rows by their norms; for rows of zeros, value and gradient are 0."""
    square = jnp.square(x).sum(-1, keepdims=True)
    safe = jnp.where(square > 0, square, 1)
    return x / (jnp.sqrt(safe) + _EPSILON)


def logits(
    params: Mapping, images: Float[Array, "B E"], texts: Float[Array, "K E"]
) -> Float[Array, "B K"]:
    """Returns scaled similarities of images and texts.

    Args:
      params: see `embed_images`.
      images, texts: unit-length embeddings.
    """
    scale, bias = scale_and_bias(params)
    return scale * (images @ texts.T) + bias


def scale_and_bias(params: Mapping) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the factor of similarities, and the term that is added to them."""
    scale = jnp.exp(jnp.asarray(params[LOGIT_SCALE]).reshape(()))
    bias = jnp.asarray(params.get(LOGIT_BIAS, jnp.zeros(1))).reshape(())
    return scale, bias


def check_params(module: TextTransformer, params: Mapping, source: str) -> None:
    """Raises UserError if names or shapes of parameters do not fit a text tower.

    Args:
      module: text tower.
      params: nested dict of arrays.
      source: name of the checkpoint, for the message.
    """
    wanted = {k: v.shape for k, v in flatten_dict(shapes(module), sep="/").items()}
    given = {k: v.shape for k, v in flatten_dict(dict(params), sep="/").items()}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise UserError(
                f"{source}: text/{name} has shape {given.get(name)}, but the text tower "
                f"needs {wanted.get(name)}: use the complete checkpoint"
            )


@functools.lru_cache(maxsize=8)
def shapes(module: TextTransformer) -> dict:
    """Returns the shapes of the parameters of a text tower, a nested dict."""
    tokens = jnp.zeros((1, module.num_tokens), jnp.int32)
    return jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]

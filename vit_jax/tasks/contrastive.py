"""Contrastive learning of images and captions: CLIP, LiT and SigLIP.

An image network and a text transformer embed images and captions in one space; training
makes an image more similar to its caption than to the others of the batch. The loss is
a softmax over each row and each column of the similarities (CLIP, arXiv:2103.00020;
LiT, arXiv:2111.07991), or a sigmoid of each similarity (SigLIP, arXiv:2303.15343). In
LiT the image network is pretrained and locked: `optim.freeze=("network/.*",)`.

similarities.py computes the losses on a ring of devices: none holds the embeddings of
the whole batch or all B x B similarities, and the loss does not depend on their number.

Letters: B images and captions of a batch, T tokens.
"""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from vit_jax.config.fields import key, section
from vit_jax.data.captions import TEXT as TOKENS
from vit_jax.data.config import DataConfig
from vit_jax.data.tokenizer import open_tokenizer
from vit_jax.errors import UserError
from vit_jax.models import Model, initializers, stacking, text
from vit_jax.models.text import TextConfig
from vit_jax.models.text_tower import TextTower
from vit_jax.tasks.similarities import CHUNK, LOSSES
from vit_jax.tasks.task import Batch, ImageTask, TaskConfig, feature_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(TaskConfig):
    """Contrastive learning of images and captions (CLIP, LiT, SigLIP)."""

    has_classifier: ClassVar[bool] = False

    name: str = key("contrastive", "Task to train.")
    loss: str = key(
        "sigmoid",
        'Loss of the similarities: "softmax" over rows and columns (CLIP, LiT), or '
        '"sigmoid" of each similarity (SigLIP).',
        choices=("softmax", "sigmoid"),
    )
    text: TextConfig = section(TextConfig)
    projection: str = key(
        "none",
        'Linear layer after the image network: "plain", without a bias (CLIP); "bias", '
        'with a bias; or "none", if the shared space has the width of the image '
        "features (SigLIP).",
        choices=("none", "plain", "bias"),
    )
    embed_dim: int = key(
        0,
        "Width of the space that images and captions share; 0 is the width of the text "
        "tower.",
        only_if={"projection": ("plain", "bias")},
    )
    temperature_init: float = key(
        10.0,
        "Initial value of the learned temperature, a factor of the similarities.",
        above=0,
    )
    max_temperature: float = key(
        0.0,
        "Largest value of the learned temperature, a factor of the similarities; 0 is "
        "unlimited, CLIP uses 100.",
    )
    bias_init: float = key(
        -10.0,
        "Initial value of the learned bias of the similarities.",
        at_least=None,
        only_if={"loss": ("sigmoid",)},
    )
    chunk: int = key(
        CHUNK,
        "Largest number of captions that a device compares with its images at once, "
        "and of images that it compares with its captions.",
        reason="fitting large batches into the memory of a device",
        at_least=1,
        changes_result=False,
    )

    def build(self, model, data, run, saved=None) -> "Contrastive":
        return Contrastive(self, model, data, saved)


class Contrastive(ImageTask):
    """The contrastive task; the parameters are "network" and those of models/text.py.

    Raises:
      UserError: the network returns no features, or the text tower cannot be built from
        the config and the tokenizer.
    """

    def __init__(
        self,
        config: ContrastiveConfig,
        model: Model,
        data: DataConfig,
        saved: dict | None,
    ):
        super().__init__(model, data)
        self.config = config
        self._width = self._embed_dim = feature_width(model, config.name)
        if not data.tokenizer:
            raise UserError(
                "data.tokenizer='' with task.name='contrastive', which learns from "
                "captions: set it to 'bytes', or to the folder or hf://owner/name of a "
                "tokenizer"
            )
        self._tower_config = _complete(config.text, data.tokenizer, saved)
        if config.projection != "none":
            self._embed_dim = config.embed_dim or config.text.width
        width, num_heads = config.text.width, config.text.num_heads
        if width % num_heads:
            raise UserError(
                f"task.text.num_heads={num_heads} does not divide "
                f"task.text.width={width}: change one of them"
            )
        self.text = self._tower_config.build(
            data.num_tokens,
            self._embed_dim,
            model.options["dtype"],
            model.options.get("remat_policy", "none"),
            model.config.platform,
        )
        self.tower = TextTower(
            self.text,
            {},
            functools.partial(open_tokenizer, data.tokenizer),
            sigmoid=config.loss == "sigmoid",
            source="this run",
        )

    def load(self):
        """Checks the size of the tokenizer; loads nothing.

        Raises:
          UserError: it has more tokens than the text tower, makes longer captions than
            `data.num_tokens`, or cannot be opened.
        """
        tokenizer, vocab_size = self.data.tokenizer, self._tower_config.vocab_size
        opened = open_tokenizer(tokenizer)
        if opened.vocab_size > vocab_size:
            raise UserError(
                f"task.text.vocab_size={vocab_size}, but data.tokenizer={tokenizer!r} "
                f"has {opened.vocab_size} tokens: leave the size 0"
            )
        opened([""], self.data.num_tokens)
        return {}

    takes_sequences = True
    coupled = ("the pairs of images and captions",)

    def metadata(self) -> dict:
        config = self._tower_config
        return {"vocab_size": config.vocab_size, "eos_id": config.eos_id}

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns image (B, Y, X, C), text (B, T) and index (B,)."""
        tokens = jax.ShapeDtypeStruct((batch_size, self.data.num_tokens), np.int32)
        return super().batch_spec(batch_size) | {TOKENS: tokens}

    def init(self, rng):
        network_key, text_key, projection_key = jax.random.split(rng, 3)
        tokens = jnp.zeros((1, self.text.num_tokens), jnp.int32)
        params = {
            "network": self.model.init(network_key),
            text.TEXT: initializers.scale_branches(
                self.text.init(text_key, tokens)["params"], self._tower_config
            ),
            text.LOGIT_SCALE: jnp.full(1, np.log(self.config.temperature_init)),
        }
        if self.config.projection != "none":
            kernel = nn.initializers.normal(self._width**-0.5)
            shape = self._width, self._embed_dim
            params[text.PROJECTION] = {"kernel": kernel(projection_key, shape)}
            if self.config.projection == "bias":
                params[text.PROJECTION]["bias"] = jnp.zeros(self._embed_dim)
        if self.config.loss == "sigmoid":
            params[text.LOGIT_BIAS] = jnp.full(1, self.config.bias_init)
        return params, None

    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Returns image (B, Y, X, C), normalised, and text (B, T)."""
        return super().prepare(batch, rng) | {TOKENS: batch[TOKENS]}

    def loss(self, params, extra, batch, rng):
        images = batch["image"].astype(self.model.options["dtype"])
        outputs = self.model.apply(params["network"], images, train=True, key=rng)
        with self.model.config.matmul_precision():
            images = text.embed_images(params, outputs["pre_logits"])
            texts = text.embed_texts(self.text, params, batch[TOKENS])
        scale, bias = text.scale_and_bias(params)
        if self.config.max_temperature:
            scale = _at_most(scale, self.config.max_temperature)
        compute = LOSSES[self.config.loss]
        loss, is_best = compute(images, texts, scale, bias, chunk=self.config.chunk)
        metrics = {
            "loss": loss,
            "top1": is_best.mean(),
            "temperature": scale,
        }
        return loss, (metrics, None)

    def left_out(self, params, extra, task_params):
        left = super().left_out(params, extra, task_params)
        if text.LOGIT_BIAS in params and text.LOGIT_BIAS not in task_params:
            left[text.LOGIT_BIAS] = "weights trained with a softmax have no bias"
        return left

    def with_task_params(self, params, extra, task_params):
        pretrained = {k: v for k, v in task_params.items() if k in text.PARAMS}
        initial = {k: v for k, v in params.items() if k in text.PARAMS}
        # By `task.loss`: a softmax has no bias, and a sigmoid begins with `bias_init`.
        if (text.LOGIT_BIAS in initial) != (text.LOGIT_BIAS in pretrained):
            for each in (initial, pretrained):
                each.pop(text.LOGIT_BIAS, None)
        if difference := stacking.difference(pretrained, initial):
            raise UserError(
                f"config.init: in its text tower {difference}: set task.text, "
                "task.projection and data.num_tokens as in those weights, or give only "
                "an image network"
            )
        return params | pretrained, extra

    def backbone(self, params, extra):
        return params["network"]

    def training_flops(self):
        towers = self.tower_flops().values()
        return None if None in towers else 3 * sum(towers)

    def tower_flops(self):
        image_flops = super().training_flops()
        shapes, num_tokens = text.shapes(self.text), self.text.num_tokens
        # Dense layers and attention count; the rest is negligible.
        kernels = [v for k, v in flatten_dict(shapes).items() if k[-1] == "kernel"]
        dense = sum(num_tokens * v.size for v in kernels)
        config = self._tower_config
        attention = 2 * config.depth * num_tokens**2 * config.width
        return {
            "network": image_flops and image_flops // 3,
            text.TEXT: 2 * (dense + attention),
        }


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _at_most(x: Float[Array, ""], limit: float) -> Float[Array, ""]:
    """Returns x, at most `limit`; beyond it only gradients that lower x pass.

    CLIP clips the parameter after each step. A plain minimum would have no gradient
    beyond the limit.
    """
    return jnp.minimum(x, limit)


def _forward(x, limit):
    return jnp.minimum(x, limit), x


def _backward(limit, x, grad):
    return (jnp.where(x < limit, grad, jnp.maximum(grad, 0)),)


_at_most.defvjp(_forward, _backward)


def _complete(config: TextConfig, tokenizer: str, saved: dict | None) -> TextConfig:
    """Returns the config with `vocab_size` and `eos_id` of the tokenizer."""
    needs_eos = config.pool == "eos"
    if config.vocab_size and (config.eos_id >= 0 or not needs_eos):
        return config
    if saved is None:
        opened = open_tokenizer(tokenizer)
        saved = {"vocab_size": opened.vocab_size, "eos_id": opened.eos_id}
    values = {"vocab_size": config.vocab_size or saved["vocab_size"]}
    if needs_eos:
        values["eos_id"] = saved["eos_id"] if config.eos_id < 0 else config.eos_id
        if values["eos_id"] < 0:
            raise UserError(
                f"task.text.pool='eos', but data.tokenizer={tokenizer!r} has no "
                "end-of-text token: set task.text.pool='last'"
            )
    return dataclasses.replace(config, **values)

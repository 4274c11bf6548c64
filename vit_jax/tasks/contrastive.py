"""Images and their captions, told apart from those of others: CLIP, LiT and SigLIP.

An image network and a text transformer embed both in one space, where an image is to be
more like its own caption than like those of the other images of the batch. The loss is a
softmax over each row and each column of the similarities (CLIP, arXiv:2103.00020; LiT,
arXiv:2111.07991), or a sigmoid of each (SigLIP, arXiv:2303.15343). In LiT the image
network is pretrained and locked: `optim.freeze=("network/.*",)`.

Similarities are computed in chunks, against embeddings that every device gets whole, so
that no device holds all B x B of them and the value does not depend on the devices.

Letters: B images and captions of a batch, C chunks of M, E width of the shared space,
T tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from vit_jax.config.fields import key, section
from vit_jax.config.lengths import RunLength
from vit_jax.data.captions import TEXT as TOKENS
from vit_jax.data.config import DataConfig
from vit_jax.data.tokenizer import open_tokenizer
from vit_jax.data.transforms import device as transforms
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.models import Model, cost, text
from vit_jax.models.text import TextConfig
from vit_jax.models.text_tower import TextTower
from vit_jax.tasks.masking import no_labels
from vit_jax.tasks.task import Batch, Task, TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(TaskConfig):
    """Images and captions (CLIP, LiT, SigLIP)."""

    has_classifier: ClassVar[bool] = False

    name: str = key("contrastive", "What is learnt.")
    loss: str = key(
        "sigmoid",
        'Of similarities: "softmax" over rows and columns (CLIP, LiT), or "sigmoid" of '
        "each (SigLIP).",
        choices=("softmax", "sigmoid"),
    )
    text: TextConfig = section(TextConfig)
    projection: str = key(
        "none",
        'Linear layer behind the image network: "bias", "plain" without one (CLIP), or '
        '"none", where the shared space is as wide as its features (SigLIP).',
        choices=("none", "plain", "bias"),
    )
    embed_dim: int = key(
        0,
        "Width of the shared space; 0 is that of the text tower.",
        only_if={"projection": ("plain", "bias")},
    )
    temperature_init: float = key(
        10.0, "Initial factor of the similarities, which is learnt.", above=0
    )
    max_temperature: float = key(0.0, "Largest such factor; 0: none. CLIP has 100.")
    bias_init: float = key(
        -10.0,
        "Initial bias of the similarities, which is learnt.",
        at_least=None,
        only_if={"loss": ("sigmoid",)},
    )
    chunk: int = key(
        4_096,
        "Most captions, or images, whose similarities to those of a device are computed "
        "at once.",
        at_least=1,
        changes_result=False,
    )

    def build(
        self,
        model: Model,
        data: DataConfig,
        run: RunLength,
        saved: dict | None = None,
    ) -> "Contrastive":
        return Contrastive(self, model, data, saved)


class Contrastive(Task):
    """See `task.Task`; parameters are "network" and those of models/text.py.

    Args:
      config: `config.task`.
      model: image network.
      data: `config.data`.
      saved: from the checkpoint of a run that resumes.

    Raises:
      UserError: there is no tokenizer, or it does not fit the tower.
    """

    def __init__(
        self,
        config: ContrastiveConfig,
        model: Model,
        data: DataConfig,
        saved: dict | None,
    ):
        self.model, self.config, self._data = model, config, data
        self._ops = parse.parse_train(data.train_transform, data.image_size).device
        if not model.representations:
            raise UserError(
                f"task.name='contrastive' needs features of images, but the network of "
                f"model.variant={model.options['variant']!r} returns no 'pre_logits'"
            )
        if not data.tokenizer:
            raise UserError(
                "task.name='contrastive' learns from captions: set data.tokenizer to "
                "'bytes', or to the folder or hf://owner/name of a tokenizer"
            )
        self._tower_config = _complete(config.text, data.tokenizer, saved)
        images = jnp.zeros((1, *model.image_shape))
        outputs = jax.eval_shape(model.apply, model.shapes, images)
        self._width = outputs["pre_logits"].shape[-1]
        self._embed_dim = self._width
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
        )
        self.tower = TextTower(
            self.text,
            {},
            functools.partial(open_tokenizer, data.tokenizer),
            sigmoid=config.loss == "sigmoid",
            source="this run",
        )

    def load(self):
        """Returns nothing, but refuses a tokenizer that does not fit the text tower.

        Raises:
          UserError: it has more tokens, or cannot be opened.
        """
        tokenizer, known = self._data.tokenizer, self._tower_config.vocab_size
        opened = open_tokenizer(tokenizer)
        if opened.vocab_size > known:
            raise UserError(
                f"task.text.vocab_size={known}, but data.tokenizer={tokenizer!r} has "
                f"{opened.vocab_size} tokens: leave it 0"
            )
        return {}

    def metadata(self) -> dict:
        about = self._tower_config
        return {"vocab_size": about.vocab_size, "eos_id": about.eos_id}

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns image (B, Y, X, C), text (B, T) and index (B,)."""
        shape = (batch_size, *self._data.image_size, self._data.channels)
        tokens = (batch_size, self._data.num_tokens)
        return {
            "image": jax.ShapeDtypeStruct(shape, np.uint8),
            TOKENS: jax.ShapeDtypeStruct(tokens, np.int32),
            "index": jax.ShapeDtypeStruct((batch_size,), np.uint32),
        }

    def init(self, rng):
        network_key, text_key, projection_key = jax.random.split(rng, 3)
        tokens = jnp.zeros((1, self.text.num_tokens), jnp.int32)
        params = {
            "network": self.model.init(network_key),
            text.TEXT: self.text.init(text_key, tokens)["params"],
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
        images, _ = transforms.apply(
            self._ops, batch["image"], no_labels(batch), batch["index"], rng
        )
        images = transforms.normalize(images, self._data.mean, self._data.std)
        return {"image": images, TOKENS: batch[TOKENS]}

    def loss(self, params, extra, batch, rng):
        images = batch["image"].astype(self.model.options["dtype"])
        outputs = self.model.apply(params["network"], images, train=True, key=rng)
        images = text.embed_images(params, outputs["pre_logits"])
        texts = text.embed_texts(self.text, params, batch[TOKENS])
        scale, bias = text.scale_and_bias(params)
        if self.config.max_temperature:
            scale = jnp.minimum(scale, self.config.max_temperature)
        compute = LOSSES[self.config.loss]
        loss = compute(images, texts, scale, bias, chunk=self.config.chunk)
        own = jnp.sum(images * texts, axis=1)
        best = jax.lax.stop_gradient(
            over_chunks(images, texts, self.config.chunk, lambda x: x.max(1)).max(0)
        )
        metrics = {
            "loss": loss,
            # An image may share its caption with others.
            "top1": (own >= best - 1e-6).mean(),
            "temperature": scale,
        }
        return loss, (metrics, None)

    def with_task_params(self, params, extra, task_params):
        given = {k: v for k, v in task_params.items() if k in text.PARAMS}
        ours = {k: v for k, v in params.items() if k in text.PARAMS}
        wanted, found = (
            {k: v.shape for k, v in flatten_dict(tree, sep="/").items()}
            for tree in (ours, given)
        )
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise UserError(
                    f"config.init has {name} of shape {found.get(name)}, and this run "
                    f"{wanted.get(name)}: state task.text, task.projection and "
                    "data.num_tokens as of those weights, or give an image network alone"
                )
        return params | given, extra

    def backbone(self, params, extra):
        return params["network"]

    def training_flops(self):
        of_images = cost.training_flops(self.model)
        shapes, num_tokens = text.shapes(self.text), self.text.num_tokens
        # Products of the blocks and the head, and of attention: the rest is negligible.
        kernels = [v for k, v in flatten_dict(shapes).items() if k[-1] == "kernel"]
        dense = sum(num_tokens * v.size for v in kernels)
        about = self._tower_config
        attention = 2 * about.depth * num_tokens**2 * about.width
        return of_images and of_images + 6 * (dense + attention)


def _complete(config: TextConfig, tokenizer: str, saved: dict | None) -> TextConfig:
    """Returns the config of the tower, opening its tokenizer for what is not stated."""
    ends = config.pool == "eos"
    if config.vocab_size and (config.eos_id >= 0 or not ends):
        return config
    if saved is None:
        opened = open_tokenizer(tokenizer)
        saved = {"vocab_size": opened.vocab_size, "eos_id": opened.eos_id}
    stated = {"vocab_size": config.vocab_size or saved["vocab_size"]}
    if ends:
        stated["eos_id"] = saved["eos_id"] if config.eos_id < 0 else config.eos_id
        if stated["eos_id"] < 0:
            raise UserError(
                f"task.text.pool='eos', but data.tokenizer={tokenizer!r} has no token "
                "that ends a text: set task.text.pool='last'"
            )
    return dataclasses.replace(config, **stated)


def over_chunks(
    rows: Float[Array, "B E"],
    columns: Float[Array, "B E"],
    chunk: int,
    reduce: Callable,
) -> Float[Array, "C B"]:
    """Reduces the products of rows and columns, a chunk of the columns after another.

    Args:
      rows: split over the devices.
      columns: the same number; every device gets all of them.
      chunk: most columns at once; the next divisor of B is taken.
      reduce: (B, M) to (B,). Its inputs are computed again in the backward pass.
    """
    B = len(columns)
    M = max(m for m in range(1, min(chunk, B) + 1) if B % m == 0)
    rows = nn.with_logical_constraint(rows, ("batch", None))
    columns = nn.with_logical_constraint(columns, (None, None))

    @jax.checkpoint
    def one(part):
        products = jnp.matmul(rows, part.T, precision=jax.lax.Precision.HIGHEST)
        return reduce(products)

    if M == B:
        return one(columns)[None]
    return jax.lax.map(one, columns.reshape(B // M, M, -1))


def softmax(
    images: Float[Array, "B E"],
    texts: Float[Array, "B E"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
    *,
    chunk: int = 4_096,
) -> Float[Array, ""]:
    """Returns the mean of the cross-entropies from images to texts and back.

    Args:
      images, texts: embeddings of length 1, of pairs.
      scale, bias: of the similarities; the bias changes nothing.
      chunk: see `over_chunks`.
    """

    def total(rows, columns):
        found = over_chunks(
            rows, columns, chunk, lambda x: jax.nn.logsumexp(scale * x + bias, axis=1)
        )
        return jax.nn.logsumexp(found, axis=0)

    own = scale * jnp.sum(images * texts, axis=1) + bias
    return ((total(images, texts) + total(texts, images)) / 2 - own).mean()


def sigmoid(
    images: Float[Array, "B E"],
    texts: Float[Array, "B E"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
    *,
    chunk: int = 4_096,
) -> Float[Array, ""]:
    """Returns the sum of the binary cross-entropies of an image, its mean over images.

    Args: as of `softmax`.
    """
    # log(1 + exp(-x)) of the own one is log(1 + exp(x)) - x.
    every = over_chunks(
        images, texts, chunk, lambda x: jax.nn.softplus(scale * x + bias).sum(1)
    )
    own = scale * jnp.sum(images * texts, axis=1) + bias
    return (every.sum(0) - own).mean()


LOSSES = {"softmax": softmax, "sigmoid": sigmoid}

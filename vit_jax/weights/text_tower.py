"""The text side of a checkpoint of two towers, ready for texts: zero-shot and retrieval.

Letters: B images or texts, D features, E width of the shared space, K classes, T tokens.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from vit_jax.data.tokenizer import Tokenizer, open_tokenizer
from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.weights.pretrained import Pretrained

_BATCH = 64  # Texts that pass through the tower at once.


class TextTower:
    """Embeds texts, and compares images with them.

    Args:
      module: the text transformer.
      params: of all but the image network, see models/text.py.
      tokenizer: as `config.data.tokenizer`, opened when the first text comes.
      sigmoid: whether each similarity is a probability by itself, as SigLIP's; else they
        are a distribution over texts, as CLIP's.
      source: of the parameters, for messages.

    Attributes:
      params, sigmoid: as in Args.
    """

    def __init__(
        self,
        module: text.TextTransformer,
        params: Mapping,
        tokenizer: str,
        *,
        sigmoid: bool,
        source: str,
    ):
        self.params, self.sigmoid = params, sigmoid
        self._module, self._source, self._tokenizer = module, source, tokenizer
        self._embed = functools.partial(text.embed_texts, module)

    @classmethod
    def of(cls, pretrained: Pretrained) -> "TextTower":
        """Returns the text tower of a checkpoint that was read `with_task`.

        Raises:
          UserError: it has none.
        """
        params, source = pretrained.task_params, pretrained.source
        if text.TEXT not in params:
            raise UserError(
                f"{source} has no text tower, so that images cannot be compared with "
                "texts: give a checkpoint of CLIP, SigLIP or LiT, or a run with "
                "task.name='contrastive'"
            )
        config = config_of(pretrained)
        _, num_tokens, _ = params[text.TEXT]["pos_embedding"].shape
        embed_dim = params[text.TEXT]["head"]["kernel"].shape[-1]
        module = config.build(num_tokens, embed_dim, "float32")
        text.check_params(module, params[text.TEXT], source)
        sigmoid = pretrained.task.get("loss") == "sigmoid"
        of_texts = {k: v for k, v in params.items() if k in text.PARAMS}
        return cls(
            module,
            jax.device_put(of_texts),
            pretrained.tokenizer,
            sigmoid=sigmoid,
            source=source,
        )

    def with_params(self, params: Mapping) -> "TextTower":
        """Returns the same tower with other parameters; programs are shared."""
        found = copy.copy(self)
        found.params = {k: v for k, v in params.items() if k in text.PARAMS}
        return found

    @functools.cached_property
    def _encode(self) -> Tokenizer:
        if not self._tokenizer:
            raise UserError(
                f"{self._source} does not tell its tokenizer: name it by --tokenizer or "
                "tokenizer=, as hf://openai/clip-vit-base-patch32"
            )
        found = open_tokenizer(self._tokenizer)
        if found.vocab_size > self._module.config.vocab_size:
            raise UserError(
                f"tokenizer {self._tokenizer!r} has {found.vocab_size} tokens, but the "
                f"text tower of {self._source} knows {self._module.config.vocab_size}: "
                "name the one that it was trained with"
            )
        return found

    def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "B E"]:
        """Returns the embeddings of texts, of length 1."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            some = texts[start : start + _BATCH]
            tokens = self._encode(some, self._module.num_tokens)
            if len(texts) > _BATCH:  # One program for all parts.
                more = _BATCH - len(some)
                tokens = np.pad(tokens, ((0, more), (0, 0)), mode="edge")
            parts.append(self.embed_tokens(tokens)[: len(some)])
        return np.concatenate(parts)

    def embed_tokens(self, tokens: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B E"]:
        """Returns the embeddings of texts that are tokens already."""
        return self._run(self._embed, tokens)

    def classes(
        self, names: Sequence[str], prompts: Sequence[str] = ("{}",)
    ) -> Float[np.ndarray, "K E"]:
        """Returns the embeddings of classes: the mean over prompts, of length 1.

        Args:
          names: of the classes.
          prompts: texts with "{}" for the name.

        Raises:
          UserError: there is no name, or a prompt has no place for it.

        Source: prompt ensembles of CLIP (arXiv:2103.00020, section 3.1.4).
        """
        if not names:
            raise UserError("texts=[]: give at least one to compare images with")
        found = self.embed(filled(prompts, names))
        means = found.reshape(len(names), len(prompts), -1).mean(1)
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def embed_images(
        self, features: Float[Array, "B D"] | Float[np.ndarray, "B D"]
    ) -> Float[np.ndarray, "B E"]:
        """Returns the embeddings of images from `pre_logits` of the image network."""
        return self._run(text.embed_images, features)

    def logits(
        self, images: Float[np.ndarray, "B E"], texts: Float[np.ndarray, "K E"]
    ) -> Float[np.ndarray, "B K"]:
        """Returns scaled similarities of embeddings."""
        return self._run(text.logits, images, texts)

    def _run(self, function: Callable, *arrays: np.ndarray | jax.Array) -> np.ndarray:
        """Computes a function of the parameters and arrays, whole on every host."""
        place = jax.tree.leaves(self.params)[0].sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec())
        arrays = jax.device_put(arrays, place)
        return np.asarray(jax.device_get(_jit(function, place)(self.params, *arrays)))


@functools.lru_cache(maxsize=32)
def _jit(function: Callable, place: Sharding) -> Callable:
    return jax.jit(function, out_shardings=place)


def filled(prompts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the texts of classes: all prompts of the first, then of the next.

    Raises:
      UserError: a prompt has no place for the name.
    """
    for prompt in prompts:
        if "{}" not in prompt:
            raise UserError(f"prompt {prompt!r} has no {{}} for the name of a class")
    return [prompt.replace("{}", name) for name in names for prompt in prompts]


def config_of(pretrained: Pretrained) -> text.TextConfig:
    """Returns the config of a text tower, with what its tokenizer told at training."""
    stated = pretrained.task["text"]
    config = text.TextConfig(**{k: _plain(v) for k, v in stated.items()})
    vocab_size = len(pretrained.task_params[text.TEXT]["embedding"])
    eos_id = config.eos_id
    if config.pool == "eos" and eos_id < 0:
        eos_id = open_tokenizer(pretrained.tokenizer).eos_id
    return dataclasses.replace(config, vocab_size=vocab_size, eos_id=eos_id)


def _plain(value):
    return value.item() if isinstance(value, np.generic) else value

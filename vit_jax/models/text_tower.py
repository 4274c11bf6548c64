"""A text tower with parameters and tokenizer, for zero-shot evaluation and retrieval.

Letters: B images or texts, D features, E width of the shared space, K classes, T
tokens.
"""

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from vit_jax.errors import UserError
from vit_jax.models import text

_BATCH = 64  # Number of texts that are embedded at once.


class TextTower:
    """Embeds texts, and compares images with them.

    Args:
      module: text transformer.
      params: parameters beside the image network, see models/text.py.
      open_tokenizer: function that opens the tokenizer; it is called for the first
        text.
      sigmoid: whether each similarity is the logit of a separate probability (SigLIP)
        instead of a distribution over texts (CLIP).
      source: name of the checkpoint, for messages.

    Attributes:
      params, sigmoid: see Args.
    """

    def __init__(
        self,
        module: text.TextTransformer,
        params: Mapping,
        open_tokenizer: Callable[[], Callable],
        *,
        sigmoid: bool,
        source: str,
    ):
        self.params, self.sigmoid = params, sigmoid
        self._module, self._source, self._open = module, source, open_tokenizer
        self._embed = functools.partial(text.embed_texts, module)

    def with_params(self, params: Mapping) -> "TextTower":
        """Returns the tower with other parameters; compiled programs are shared."""
        tower = copy.copy(self)
        tower.params = {k: v for k, v in params.items() if k in text.PARAMS}
        return tower

    @functools.cached_property
    def _encode(self) -> Callable:
        tokenizer, vocab_size = self._open(), self._module.config.vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but the text tower of "
                f"{self._source} has {vocab_size}: set --tokenizer to the tokenizer of its "
                "training"
            )
        return tokenizer

    def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "B E"]:
        """Returns unit-length embeddings of texts."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            some = texts[start : start + _BATCH]
            tokens = self._encode(some, self._module.num_tokens)
            if (
                len(texts) > _BATCH
            ):  # Pad the last part, so that one program serves all.
                more = _BATCH - len(some)
                tokens = np.pad(tokens, ((0, more), (0, 0)), mode="edge")
            parts.append(self.embed_tokens(tokens)[: len(some)])
        return np.concatenate(parts)

    def embed_tokens(self, tokens: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B E"]:
        """Returns unit-length embeddings of tokenized texts."""
        return self._run(self._embed, tokens)

    def classes(
        self, names: Sequence[str], prompts: Sequence[str] = ("{}",)
    ) -> Float[np.ndarray, "K E"]:
        """Returns unit-length embeddings of classes, averaged over prompts.

        Args:
          names: names of the classes.
          prompts: texts with "{}" for the name.

        Raises:
          UserError: `names` is empty, or a prompt does not contain "{}".

        Source: prompt ensembles of CLIP (arXiv:2103.00020, section 3.1.4).
        """
        if not names:
            raise UserError("texts=[]: set at least one text to compare images with")
        embeddings = self.embed(filled(prompts, names))
        means = embeddings.reshape(len(names), len(prompts), -1).mean(1)
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def embed_images(
        self, features: Float[Array, "B D"] | Float[np.ndarray, "B D"]
    ) -> Float[np.ndarray, "B E"]:
        """Returns unit-length embeddings of images from `pre_logits`."""
        return self._run(text.embed_images, features)

    def logits(
        self, images: Float[np.ndarray, "B E"], texts: Float[np.ndarray, "K E"]
    ) -> Float[np.ndarray, "B K"]:
        """Returns scaled similarities of embeddings."""
        return self._run(text.logits, images, texts)

    def _run(self, function: Callable, *arrays: np.ndarray | jax.Array) -> np.ndarray:
        """Calls a function of the parameters and arrays, replicated on every host."""
        sharding = jax.tree.leaves(self.params)[0].sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        arrays = jax.device_put(arrays, sharding)
        result = _jit(function, sharding)(self.params, *arrays)
        return np.asarray(jax.device_get(result))


@functools.lru_cache(maxsize=32)
def _jit(function: Callable, sharding: Sharding) -> Callable:
    return jax.jit(function, out_shardings=sharding)


def filled(prompts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns all prompts of the first class, then all of the second class, and so on.

    Raises:
      UserError: a prompt does not contain "{}", or a name is a WordNet id.
    """
    for prompt in prompts:
        if "{}" not in prompt:
            raise UserError(
                f"prompt {prompt!r} has no {{}} for the name of a class: add it"
            )
    for name in names:
        if re.fullmatch(r"n\d{8}", name):
            raise UserError(
                f"class {name!r} is a WordNet id, but a text tower needs words: use its name"
            )
    return [prompt.replace("{}", name) for name in names for prompt in prompts]

"""The text side of two towers, ready for texts: zero-shot and retrieval.

Letters: B images or texts, D features, E width of the shared space, K classes, T tokens.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from vit_jax.errors import UserError
from vit_jax.models import text

_BATCH = 64  # Texts that pass through the tower at once.


class TextTower:
    """Embeds texts, and compares images with them.

    Args:
      module: the text transformer.
      params: of all but the image network, see models/text.py.
      open_tokenizer: returns the tokenizer; called when the first text comes.
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
        open_tokenizer: Callable[[], Callable],
        *,
        sigmoid: bool,
        source: str,
    ):
        self.params, self.sigmoid = params, sigmoid
        self._module, self._source, self._open = module, source, open_tokenizer
        self._embed = functools.partial(text.embed_texts, module)

    def with_params(self, params: Mapping) -> "TextTower":
        """Returns the same tower with other parameters; programs are shared."""
        found = copy.copy(self)
        found.params = {k: v for k, v in params.items() if k in text.PARAMS}
        return found

    @functools.cached_property
    def _encode(self) -> Callable:
        found, known = self._open(), self._module.config.vocab_size
        if found.vocab_size > known:
            raise UserError(
                f"the tokenizer has {found.vocab_size} tokens, but the text tower of "
                f"{self._source} knows {known}: name the one that it was trained with by "
                "--tokenizer or tokenizer="
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

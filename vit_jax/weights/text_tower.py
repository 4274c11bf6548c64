"""The text side of a checkpoint of two towers, ready for texts: zero-shot and retrieval.

Letters: B images or texts, D features, E width of the shared space, K classes.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.config import loading
from vit_jax.data.tokenizer import open_tokenizer
from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.weights.pretrained import Pretrained

_BATCH = 64  # Texts that pass through the tower at once.


class TextTower:
    """Embeds texts, and compares images with them.

    Args:
      pretrained: a checkpoint with a text tower, read `with_task`.
      tokenizer: as `config.data.tokenizer`, in place of the checkpoint's; "": that.

    Attributes:
      params: of all but the image network, see models/text.py.
      sigmoid: whether each similarity is a probability by itself, as SigLIP's; else they
        are a distribution over texts, as CLIP's.

    Raises:
      UserError: there is no text tower, or no tokenizer for it.
    """

    def __init__(self, pretrained: Pretrained, tokenizer: str = ""):
        source = pretrained.source
        if text.TEXT not in pretrained.task_params:
            raise UserError(
                f"{source} has no text tower, so that images cannot be compared with "
                "texts: give a checkpoint of CLIP, SigLIP or LiT, or a run with "
                "task.name='contrastive'"
            )
        tokenizer = tokenizer or pretrained.tokenizer
        if not tokenizer:
            raise UserError(
                f"{source} does not tell its tokenizer: name it by --tokenizer, as "
                "hf://openai/clip-vit-base-patch32"
            )
        self._encode = open_tokenizer(tokenizer)
        about = loading.complete(
            text.TextConfig, pretrained.task["text"], "task.text."
        )
        params = pretrained.task_params
        _, self.num_tokens, _ = params[text.TEXT]["pos_embedding"].shape
        embed_dim = params[text.TEXT]["head"]["kernel"].shape[-1]
        if self._encode.vocab_size > about.vocab_size:
            raise UserError(
                f"tokenizer {tokenizer!r} has {self._encode.vocab_size} tokens, but the "
                f"text tower of {source} knows {about.vocab_size}: name the one it was "
                "trained with"
            )
        module = about.build(self.num_tokens, embed_dim, "float32")
        text.check_params(module, params[text.TEXT], source)
        self.params = jax.device_put(params)
        self.sigmoid = pretrained.task.get("loss") == "sigmoid"
        self._embed = jax.jit(lambda p, tokens: text.embed_texts(module, p, tokens))
        self._embed_images = jax.jit(text.embed_images)
        self._logits = jax.jit(text.logits)

    def tokens(self, texts: Sequence[str]) -> Int[np.ndarray, "B T"]:
        """Returns the tokens of texts, as the tower takes them."""
        return self._encode(texts, self.num_tokens)

    def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "B E"]:
        """Returns the embeddings of texts, of length 1."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            tokens = self.tokens(texts[start : start + _BATCH])
            count = len(tokens)
            if len(texts) > _BATCH:  # One program for all parts.
                tokens = np.pad(tokens, ((0, _BATCH - count), (0, 0)), mode="edge")
            parts.append(np.asarray(self._embed(self.params, tokens))[:count])
        return np.concatenate(parts)

    def classes(
        self, names: Sequence[str], prompts: Sequence[str] = ("{}",)
    ) -> Float[np.ndarray, "K E"]:
        """Returns the embeddings of classes: the mean over prompts, of length 1.

        Args:
          names: of the classes.
          prompts: texts with "{}" for the name.

        Raises:
          UserError: a prompt has no place for the name.

        Source: prompt ensembles of CLIP (arXiv:2103.00020, section 3.1.4).
        """
        for prompt in prompts:
            if "{}" not in prompt:
                raise UserError(f"prompt {prompt!r} has no {{}} for the name of a class")
        texts = [p.replace("{}", name) for name in names for p in prompts]
        means = self.embed(texts).reshape(len(names), len(prompts), -1).mean(1)
        return np.asarray(text.normalized(means))

    def embed_images(self, features: Float[Array, "B D"]) -> Float[np.ndarray, "B E"]:
        """Returns the embeddings of images from `pre_logits` of the image network."""
        return np.asarray(self._embed_images(self.params, features))

    def logits(
        self, images: Float[np.ndarray, "B E"], texts: Float[np.ndarray, "K E"]
    ) -> Float[np.ndarray, "B K"]:
        """Returns scaled similarities of embeddings."""
        return np.asarray(self._logits(self.params, images, texts))

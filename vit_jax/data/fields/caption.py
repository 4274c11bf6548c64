"""Tokens of captions, or of prompts with the name of the class."""

import dataclasses
import functools

import numpy as np

from vit_jax.data import imagenet
from vit_jax.data.captions import TEXT
from vit_jax.data.decode import DamagedImage
from vit_jax.data.fields.base import Field
from vit_jax.data.tokenizer import checksum, open_tokenizer
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Caption(Field):
    """The tokens of one of an image's captions, int32 (T,).

    Attributes:
      tokenizer, num_tokens, prompts: keys of `config.data`.
      class_names: names in label order, for prompts; empty if records have captions.
    """

    name = TEXT

    tokenizer: str
    num_tokens: int
    prompts: tuple[str, ...]
    class_names: tuple[str, ...]

    @classmethod
    def of(cls, data, source):
        names = () if data.caption_key else imagenet.in_words(source.class_names)
        if not data.caption_key and not (data.has_labels and names):
            raise UserError(
                f"data.name={data.name!r} has no class names to make captions from: "
                "set data.caption_key to the column of its captions, or "
                "data.num_classes for a set whose classes have names"
            )
        return cls(data.tokenizer, data.num_tokens, data.prompts, names)

    @classmethod
    def part(cls, data):
        return "captions" if data.caption_key else ""

    @classmethod
    def checksums(cls, data):
        return {"tokenizer": checksum(data.tokenizer)}

    @classmethod
    def missing(cls, data):
        return (
            "data.tokenizer='': captions are not read, but this task learns from them: "
            "set it to 'bytes', or to the folder or hf://owner/name of a tokenizer"
        )

    def spec(self, size):
        return (self.num_tokens,), "int32"

    def read(self, record, size):
        texts = record.get(TEXT, ())
        if self.class_names:
            class_name = self.class_names[record["label"]]
            texts = [prompt.replace("{}", class_name) for prompt in self.prompts]
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            raise DamagedImage("has no caption")
        return texts

    def row(self, value, rng):
        chosen = value[int(rng.integers(len(value)))] if len(value) > 1 else value[0]
        return _tokens(self.tokenizer, chosen, self.num_tokens)


# Cached, because names of classes recur, and captions recur in every epoch.
@functools.lru_cache(maxsize=2**16)
def _tokens(tokenizer: str, text: str, num_tokens: int) -> np.ndarray:
    return open_tokenizer(tokenizer)([text], num_tokens)[0]

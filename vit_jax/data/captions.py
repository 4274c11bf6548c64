"""Captions: the texts of images, as tokens of a batch.

A record of a source has them under "text", one or several, if `data.caption_key` is stated;
else the name of its class is put into prompts. Letters: T tokens.
"""

import dataclasses
import functools
import json
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from vit_jax.data import fingerprint
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.tokenizer import open_tokenizer
from vit_jax.errors import UserError

TEXT = "text"  # Name of the tokens in a batch, and of the texts in a record.
_METADATA = "metadata.jsonl"


@dataclasses.dataclass(frozen=True)
class Captions:
    """Makes the tokens of records; travels to loader processes.

    Attributes:
      tokenizer, num_tokens, prompts: of `config.data`.
      class_names: in label order, for prompts; empty where records have captions.
    """

    tokenizer: str
    num_tokens: int
    prompts: tuple[str, ...]
    class_names: tuple[str, ...]

    @classmethod
    def of(cls, data: DataConfig, class_names: Sequence[str]) -> "Captions | None":
        """Returns what makes the tokens of a training split; None without a tokenizer.

        Args:
          data: `config.data`.
          class_names: of the split.

        Raises:
          UserError: there is neither a caption nor the name of a class.
        """
        if not data.tokenizer:
            return None
        if data.caption_key:
            return cls(data.tokenizer, data.num_tokens, data.prompts, ())
        if not data.num_classes or not class_names:
            raise UserError(
                f"data.name={data.name!r} has no names of classes to make captions of: "
                "state data.caption_key, the column of its captions, or data.num_classes "
                "of a set whose classes have names"
            )
        return cls(data.tokenizer, data.num_tokens, data.prompts, tuple(class_names))

    def __call__(
        self, record: Mapping, rng: np.random.Generator
    ) -> Int[np.ndarray, " T"]:
        """Returns the tokens of a record: of one of its captions, or of one prompt.

        Raises:
          DamagedImage: it has no caption.
        """
        texts = record.get(TEXT, ())
        if self.class_names:
            name = self.class_names[record["label"]]
            texts = [prompt.replace("{}", name) for prompt in self.prompts]
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            raise DamagedImage("has no caption")
        chosen = texts[int(rng.integers(len(texts)))] if len(texts) > 1 else texts[0]
        return _tokens(self.tokenizer, chosen, self.num_tokens)


# The same names come again and again, and captions in every epoch.
@functools.lru_cache(maxsize=2**16)
def _tokens(tokenizer: str, text: str, num_tokens: int) -> np.ndarray:
    return open_tokenizer(tokenizer)([text], num_tokens)[0]


@functools.lru_cache(maxsize=4)
def _metadata(folder: str) -> dict[str, dict]:
    """Returns the lines of a folder's metadata.jsonl by the path of their image."""
    path = pathlib.Path(folder, _METADATA)
    if not path.exists():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return {os.path.normpath(row["file_name"]): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a line of JSON an image, each with file_name: {error}"
        ) from error


def of_file(root: str, path: str, key: str) -> list[str]:
    """Returns the captions of an image file, [] if it has none.

    They are the field `key` of the image in metadata.jsonl, in the nearest folder above it
    that has that file, as Hugging Face's image folders have it; else the lines of the
    file beside the image with the suffix `key`, as "txt".

    Args:
      root: data_dir.
      path: of the image below it.
      key: `data.caption_key`.

    Raises:
      UserError: a metadata.jsonl is damaged.
    """
    for above in pathlib.PurePosixPath(path).parents:
        rows = _metadata(os.path.join(root, above))
        row = rows.get(os.path.relpath(path, above))
        if row is not None:
            return of_value(row.get(key))
    beside = pathlib.Path(root, path).with_suffix(f".{key}")
    try:
        lines = beside.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise DamagedImage(f"has a caption that is no UTF-8 ({beside})") from error
    return [line.strip() for line in lines if line.strip()]


def sums_of_files(root: str, paths: Sequence[str], key: str) -> dict[str, int]:
    """Returns a checksum of the captions of each image file, of many of every n-th."""
    sums = {}
    for path in paths[:: max(1, -(-len(paths) // fingerprint.NAMES))]:
        try:
            texts = of_file(root, path, key)
        except (DamagedImage, OSError) as error:  # Left to `data.on_error`.
            texts = [str(error)]
        sums[path] = zlib.crc32(json.dumps(texts).encode())
    return sums


def of_value(value: object) -> list[str]:
    """Returns the captions in a column or a feature: a text, or several.

    Args:
      value: a text or bytes, a list or an array of them, or None.
    """
    if value is None:
        return []
    if isinstance(value, bytes):
        return [value.decode("utf-8", "replace")]
    if isinstance(value, str):
        return [value]
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist()
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    return [text for one in value for text in of_value(one)]

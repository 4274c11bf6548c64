"""Captions: the texts of images, as tokens of a batch.

With `data.caption_key` a record of a source has one or several under "text"; else the name
of its class is put into prompts. Letters: T tokens.
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

from vit_jax.data import fingerprint, imagenet
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.tokenizer import open_tokenizer
from vit_jax.errors import UserError

TEXT = "text"  # Name of the tokens in a batch, and of the texts in a record.
_METADATA = "metadata.jsonl"


@dataclasses.dataclass(frozen=True)
class Captions:
    """Makes the tokens of records; is sent to loader processes.

    `class_names` are in label order, for prompts; empty where records have captions.
    """

    tokenizer: str
    num_tokens: int
    prompts: tuple[str, ...]
    class_names: tuple[str, ...]

    @classmethod
    def of(cls, data: DataConfig, class_names: Sequence[str]) -> "Captions | None":
        """Builds the captions of a training split; None without a tokenizer.

        Raises:
          UserError: there is neither a caption nor the name of a class.
        """
        if not data.tokenizer:
            return None
        names = () if data.caption_key else imagenet.in_words(class_names)
        if not data.caption_key and not (data.has_labels and names):
            raise UserError(
                f"data.name={data.name!r} has no names of classes to make captions of: "
                "set data.caption_key, the column of its captions, or data.num_classes "
                "of a set whose classes have names"
            )
        return cls(data.tokenizer, data.num_tokens, data.prompts, names)

    def __call__(
        self, record: Mapping, rng: np.random.Generator
    ) -> Int[np.ndarray, " T"]:
        """Returns the tokens of one caption of a record, or of one prompt.

        Raises:
          DamagedImage: the record has no caption.
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
            f"{path} must have a line of JSON with file_name per image: {error}"
        ) from error


def of_file(root: str, path: str, key: str) -> list[str]:
    """Returns the captions of an image file, [] if it has none.

    They are the field `key` of the image in the nearest metadata.jsonl of the folders above
    it, the format of Hugging Face's image folders; else the lines of the file beside the
    image with the suffix `key`, such as "txt".

    Args:
      root: `data.data_dir`.
      path: path of the image below it.
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
        raise DamagedImage(f"has a caption that is not UTF-8 ({beside})") from error
    return [line.strip() for line in lines if line.strip()]


def sums_of_files(root: str, paths: Sequence[str], key: str) -> dict[str, int]:
    """Returns a checksum of the captions of each image file, or of every n-th of many."""
    sums = {}
    for path in paths[:: max(1, -(-len(paths) // fingerprint.NAMES))]:
        try:
            texts = of_file(root, path, key)
        except (DamagedImage, OSError) as error:  # Left to `data.on_error`.
            texts = [str(error)]
        sums[path] = zlib.crc32(json.dumps(texts).encode())
    return sums


def of_value(value: object) -> list[str]:
    """Returns the captions in a column or a feature: text, bytes, several of them, or None."""
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

"""Tokenizers of the text towers in checkpoints, which turn texts into token numbers.

A tokenizer is given by its files: a folder, hf://owner/name on the Hugging Face hub, or
one file. "bytes" needs no file: tokens are the bytes of UTF-8. The libraries of the
extra `text` (tokenizers, SentencePiece) read the files.

Letters: N texts, T tokens.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import string
import zlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from vit_jax.command_line import files
from vit_jax.errors import UserError

BYTES = "bytes"
# Files of tokenizers.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "vocab.txt",
)
_KINDS = "tokenizer.json, vocab.json with merges.txt, spiece.model or vocab.txt"
# CLIP's pattern of words; pairs are merged within a word.
_CLIP_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|"
    r"[^\s\p{L}\p{N}]+"
)
# The path of a file in the repository, such as the weights, may follow.
_ON_HUB = re.compile(
    r"(hf://|(?=timm/))(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/@]+))?(/.*)?"
)
_CLIP_START, _CLIP_END = "<|startoftext|>", "<|endoftext|>"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@runtime_checkable
class Tokenizer(Protocol):
    """Turns texts into tokens.

    Attributes:
      vocab_size: number of tokens.
      eos_id: token that ends a text; -1 if the tokenizer has none.
    """

    vocab_size: int
    eos_id: int

    def __call__(self, texts: Sequence[str], num_tokens: int) -> Int[np.ndarray, "N T"]:
        """Returns the tokens of texts, cut or padded to the same number."""


@functools.lru_cache(maxsize=8)
def open_tokenizer(source: str) -> Tokenizer:
    """Opens a tokenizer.

    Args:
      source: "bytes", a folder, a file with a name of `FILES`, any *.model of
        SentencePiece, or hf://owner/name.

    Raises:
      UserError: the tokenizer does not exist or cannot be read, or the extra `text` is
        not installed.
    """
    if source == BYTES:
        return ByteTokenizer()
    path = _local(source)
    opened = None
    try:
        if path.is_dir():
            opened = _open_folder(path)
        elif path.suffix == ".model":
            opened = SentencePieces(path)
        elif path.name == "vocab.txt":
            opened = _word_pieces(path)
        elif path.suffix == ".json":
            opened = _open_folder(path.parent)
    except ImportError as error:
        raise UserError(
            f"data.tokenizer={source!r} needs the Python package {error.name}: pip "
            "install -e '.[text]' in the clone"
        ) from error
    except UserError:
        raise
    except Exception as error:  # The libraries raise Exception itself.
        raise UserError(
            f"data.tokenizer={source!r} cannot be read: {str(error).splitlines()[0]}"
        ) from error
    if opened is None:
        raise UserError(
            f"data.tokenizer={source!r} has no tokenizer ({_KINDS}): give the folder or "
            f"the hf://owner/name of a checkpoint, or {BYTES!r}"
        )
    return opened


def checksum(source: str) -> int:
    """Returns a checksum of a tokenizer's files, independent of their location."""
    if source == BYTES:
        return 0
    path, crc = _local(source), 0
    folder = path.parent if path.suffix == ".json" else path
    for file in [folder / name for name in FILES] if folder.is_dir() else [path]:
        if file.is_file():
            crc = zlib.crc32(file.read_bytes(), zlib.crc32(file.name.encode(), crc))
    return crc


def _local(source: str) -> pathlib.Path:
    """Returns the path of a tokenizer, downloaded if it is on the hub."""
    match = _ON_HUB.fullmatch(source)
    if not match:
        path = pathlib.Path(os.path.expanduser(source))
        if not path.exists():
            raise UserError(
                f"data.tokenizer={source!r} does not exist: give the folder of a "
                f"checkpoint, hf://owner/name, or {BYTES!r}"
            )
        if path.is_file() and path.name not in FILES and path.suffix != ".model":
            return path.parent  # A file of weights.
        return path
    where = {"revision": match["revision"], "allow_patterns": list(FILES)}
    name = f"data.tokenizer={source!r}"
    return pathlib.Path(files.download_snapshot(name, match["repo"], **where))


def _open_folder(folder: pathlib.Path) -> Tokenizer | None:
    """Opens the tokenizer of a folder; returns None if its files are missing."""
    config = _json(folder / "tokenizer_config.json")
    kind = str(config.get("tokenizer_class", ""))
    pieces = [folder / name for name in ("spiece.model", "tokenizer.model")]
    pieces = [path for path in pieces if path.exists()]
    whole = folder / "tokenizer.json"
    if pieces and (kind == "SiglipTokenizer" or not whole.exists()):
        lower = config.get("do_lower_case", True)
        return SentencePieces(pieces[0], canonical=True, lower=lower)
    if whole.exists():
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(whole))
        # SigLIP 2 was trained with Gemma's tokenizer on texts in lower case.
        lower = kind.startswith(("Siglip2", "Gemma"))
        return JsonTokenizer(tokenizer, _special(folder, config), config, lower=lower)
    if (folder / "merges.txt").exists() and (folder / "vocab.json").exists():
        tokenizer = _clip_pairs(folder / "vocab.json", folder / "merges.txt")
        special = {"pad_token": _CLIP_END, "eos_token": _CLIP_END}
        return JsonTokenizer(tokenizer, special | _special(folder, config), config)
    if (folder / "vocab.txt").exists():
        return _word_pieces(folder / "vocab.txt")
    return None


def copy_files(source: str, folder: str | os.PathLike) -> list[str]:
    """Copies the files of a tokenizer to a folder; returns a note if nothing is copied.

    Args:
      source: argument of `open_tokenizer`; "" if it is unknown.
      folder: folder of weights.
    """
    if source in ("", BYTES):
        return [f"tokenizer: {source or 'not known'}, so no file is copied"]
    path = _local(source)
    paths = [path / name for name in FILES] if path.is_dir() else [path]
    paths = [path for path in paths if path.exists()]
    for path in paths:
        shutil.copyfile(path, pathlib.Path(folder, path.name))
    return [] if paths else [f"tokenizer: {source} has no files to copy"]


def _json(path: pathlib.Path) -> dict:
    with contextlib.suppress(FileNotFoundError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def _special(folder: pathlib.Path, config: dict) -> dict[str, str]:
    """Returns the texts of the special tokens, such as "pad_token"."""
    tokens = _json(folder / "special_tokens_map.json") | config
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in tokens.items()
        if name in ("pad_token", "eos_token") and value
    }


class ByteTokenizer:
    """Tokens are the bytes of UTF-8 plus 2, then 1 for the end, then 0 for padding."""

    vocab_size, eos_id = 258, 1

    def __call__(self, texts: Sequence[str], num_tokens: int) -> Int[np.ndarray, "N T"]:
        """Returns the tokens of texts; the end is kept when a text is cut."""
        tokens = np.zeros((len(texts), num_tokens), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            # Surrogates, for example from a file name that is not text, are replaced.
            data = text.encode("utf-8", "replace")[: num_tokens - 1]
            row[: len(data)] = np.frombuffer(data, np.uint8).astype(np.int32) + 2
            row[len(data)] = self.eos_id
        return tokens


class JsonTokenizer:
    """A tokenizer of the library tokenizers, as in tokenizer.json.

    Args:
      tokenizer: tokenizer of the library.
      special: texts of "pad_token" and "eos_token".
      config: content of tokenizer_config.json.
      lower: whether texts are converted to lower case first.
    """

    def __init__(self, tokenizer, special: dict, config: dict, *, lower: bool = False):
        self._tokenizer, self._lower = tokenizer, lower
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

        def number(name):
            token = tokenizer.token_to_id(special.get(name, ""))
            return -1 if token is None else token

        self.eos_id, self._pad = number("eos_token"), number("pad_token")
        padding = tokenizer.padding or {}
        if self._pad < 0:
            self._pad = padding.get("pad_id", max(self.eos_id, 0))
        self._left = "left" == config.get("padding_side", padding.get("direction"))
        self._num_tokens = 0
        tokenizer.no_padding()

    def __call__(self, texts: Sequence[str], num_tokens: int) -> Int[np.ndarray, "N T"]:
        """Returns the tokens of texts; the end is kept when a text is cut.

        Raises:
          UserError: `num_tokens` leaves no room for text beside the special tokens.
        """
        if num_tokens != self._num_tokens:
            special = self._tokenizer.num_special_tokens_to_add(False)
            if num_tokens <= special:
                raise UserError(
                    f"data.num_tokens={num_tokens}: the tokenizer adds {special} tokens to "
                    f"each text: set at least {special + 1}"
                )
            self._tokenizer.enable_truncation(num_tokens)
            self._num_tokens = num_tokens
        tokens = np.full((len(texts), num_tokens), self._pad, np.int32)
        for row, text in zip(tokens, texts, strict=True):
            text = text.encode("utf-8", "replace").decode()
            # One text at a time: a batch would start threads, which must not be forked.
            ids = self._tokenizer.encode(text.lower() if self._lower else text).ids
            start = num_tokens - len(ids) if self._left else 0
            row[start : start + len(ids)] = ids
        return tokens


def _clip_pairs(vocab: pathlib.Path, merges: pathlib.Path):
    """Builds CLIP's tokenizer from the two files of OpenAI's vocabulary."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    words = json.loads(vocab.read_text(encoding="utf-8"))
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line and line[0] != "#"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=words,
            merges=pairs,
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            unk_token=_CLIP_END,
        )
    )
    tokenizer.add_special_tokens([_CLIP_START, _CLIP_END])
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
            normalizers.Lowercase(),
        ]
    )
    split = pre_tokenizers.Split(
        tokenizers.Regex(_CLIP_WORDS), behavior="removed", invert=True
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        (_CLIP_END, tokenizer.token_to_id(_CLIP_END)),
        (_CLIP_START, tokenizer.token_to_id(_CLIP_START)),
        trim_offsets=False,
        add_prefix_space=False,
    )
    return tokenizer


def _word_pieces(path: pathlib.Path) -> JsonTokenizer:
    """Builds BERT's tokenizer as in LiT: "[CLS]" first, and no token at the end."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    words = path.read_text(encoding="utf-8").splitlines()
    numbers = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", numbers["[CLS]"])]
    )
    return JsonTokenizer(tokenizer, {"pad_token": "[PAD]"}, {})


class SentencePieces:
    """A SentencePiece model; texts end with, and are padded with, its end of sentence.

    If the model has no end of sentence, texts are padded with its padding token, or
    with token 0.

    Args:
      path: file of the model.
      canonical: whether punctuation is removed and white space collapsed, as in SigLIP.
      lower: whether `canonical` texts are converted to lower case.
    """

    def __init__(
        self, path: pathlib.Path, *, canonical: bool = False, lower: bool = False
    ):
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self._canonical, self._lower = canonical, lower
        self.vocab_size = self._model.get_piece_size()
        self.eos_id = self._model.eos_id()

    def __call__(self, texts: Sequence[str], num_tokens: int) -> Int[np.ndarray, "N T"]:
        """Returns the tokens of texts; the end, if any, is kept when a text is cut."""
        ends = self.eos_id >= 0
        fill = self.eos_id if ends else max(self._model.pad_id(), 0)
        tokens = np.full((len(texts), num_tokens), fill, np.int32)
        for row, text in zip(tokens, texts, strict=True):
            text = text.encode("utf-8", "replace").decode()
            ids = self._model.encode(self._clean(text))[: num_tokens - ends]
            row[: len(ids)] = ids
        return tokens

    def _clean(self, text: str) -> str:
        if not self._canonical:
            return text
        text = text.lower() if self._lower else text
        return re.sub(r"\s+", " ", text.translate(_NO_PUNCTUATION)).strip()

"""Tokens, against those of transformers on a thousand strings."""

import json
import pickle
import random

import numpy as np
import pytest

from vit_jax.data import tokenizer
from vit_jax.errors import UserError

_TEXT = (
    "a photo of the cat dog zebra; don't stop, it's 1,024 x 768! naïve café Straße "
    "ΑΒΓ δέλτα привет мир 猫 犬 の写真 안녕하세요 مرحبا שלום नमस्ते 🐈 👩‍🚀 ﬁne e\u0301 "
    "I\u0307stanbul ſ … — “quoted” <b>bold</b> &amp; {} [x] #tag @me 100% "
    "C++ \\n \u00a0 \u200b \u3000 \ufffd \x7f ℃ ① ½ 𝔘𝔫𝔦 we've they'll I'm you'd"
)


def strings() -> list[str]:
    """A thousand texts: of every script, empty, of white space, very long."""
    draw = random.Random(0)
    found = ["", " ", "\n\t ", "a", "A photo of a DOG.", "word " * 500, "x" * 3_000]
    found += ["  two  spaces ", "tab\tand\nline", "ends. ", ".", "'s", "▁", " ▁ a"]
    while len(found) < 1_000:
        words = draw.choices(_TEXT.split(" "), k=draw.randrange(1, 40))
        text = draw.choice((" ", "", "  ", "\n")).join(words)
        letters = "".join(chr(draw.randrange(32, 0xD800)) for _ in range(5))
        found.append(text + draw.choice(("", "", letters, letters.upper())))
    return found


def _train_bpe(folder):
    """Writes vocab.json and merges.txt of CLIP's kind, learnt from the strings."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, trainers

    special = ["<|startoftext|>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    found.train_from_iterator((s.lower() for s in strings()), trainer)
    merges = [tuple(m) for m in json.loads(found.to_str())["model"]["merges"]]
    # As OpenAI's: letters, letters that end a word, pairs, and the special ones last.
    words = [*alphabet, *(a + "</w>" for a in alphabet)]
    words += [w for w in ("".join(m) for m in merges) if w not in set(words)]
    vocab = {word: i for i, word in enumerate([*dict.fromkeys(words), *special])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(" ".join(m) for m in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _train_pieces(folder):
    """Writes spiece.model, with the end at 1 and the unknown at 2 as SigLIP's has it."""
    pytest.importorskip("sentencepiece")
    import sentencepiece

    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(s[:2_000].replace("\n", " ") for s in strings()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "spiece"),
        vocab_size=1_000,
        character_coverage=0.98,
        bos_id=-1,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        minloglevel=3,
    )
    return folder


def test_bytes_are_utf_8_and_an_end():
    encode = tokenizer.open_tokenizer("bytes")
    found = encode(["aé", "", "x" * 99, "\udcff"], 5)
    assert found.dtype == np.int32 and encode.vocab_size == 258
    assert found.tolist() == [
        [99, 0xC3 + 2, 0xA9 + 2, 1, 0],
        [1, 0, 0, 0, 0],
        [122, 122, 122, 122, 1],
        [65, 1, 0, 0, 0],
    ]


def assert_equal_tokens(theirs, folder, texts, length):
    """Checks our tokens against those of a tokenizer that transformers saved; returns ours."""
    theirs.save_pretrained(folder)
    ours = tokenizer.open_tokenizer(str(folder))
    wanted = theirs(
        texts,
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="np",
    )["input_ids"]
    np.testing.assert_array_equal(ours(texts, length), wanted)
    again = pickle.loads(pickle.dumps(ours))  # Travels to loader processes.
    np.testing.assert_array_equal(again(texts[:9], length), wanted[:9])
    return ours


@pytest.mark.parity
def test_tokens_of_clip_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    _train_bpe(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    lines = (tmp_path / "merges.txt").read_text(encoding="utf-8").split("\n")[1:-1]
    theirs = transformers.CLIPTokenizer(
        vocab=vocab, merges=[tuple(line.split(" ")) for line in lines]
    )
    texts = [*strings(), "a <|endoftext|> b", "<|startoftext|>c"]
    saved = assert_equal_tokens(theirs, tmp_path / "saved", texts, 77)
    published = tokenizer.open_tokenizer(str(tmp_path))  # As OpenAI's two files.
    np.testing.assert_array_equal(published(texts, 77), saved(texts, 77))
    end = theirs.eos_token_id
    assert published.eos_id == end == len(vocab) - 1 == published.vocab_size - 1


@pytest.mark.parity
def test_tokens_of_siglip_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    _train_pieces(tmp_path)
    theirs = transformers.SiglipTokenizer(str(tmp_path / "spiece.model"))
    ours = assert_equal_tokens(theirs, tmp_path / "saved", strings(), 64)
    assert (ours(strings(), 64)[:, -1] == ours.eos_id).all() and ours.eos_id == 1
    assert ours.vocab_size == 1_000


@pytest.mark.parity
def test_tokens_of_siglip_2_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    letters = sorted({c for s in strings()[:300] for c in s.lower()} | {"▁"})
    pairs = [("▁", "a"), ("t", "h"), ("th", "e"), ("o", "f"), ("▁", "of"), ("o", "g")]
    words = dict.fromkeys([*special, *bytes_, *letters, *("".join(p) for p in pairs)])
    theirs = transformers.Siglip2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=pairs,
        padding_side="right",  # As published, and as it was trained.
    )
    assert_equal_tokens(theirs, tmp_path, strings(), 64)


@pytest.mark.parity
def test_tokens_of_lit_are_those_of_bert_without_the_last(tmp_path):
    transformers = pytest.importorskip("transformers")
    letters = sorted({c for s in strings() for c in s.lower() if not c.isspace()})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "photo", "dog", "##og"]
    words += [*letters, *("##" + c for c in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    theirs = transformers.BertTokenizer(vocab={w: i for i, w in enumerate(words)})
    ours = tokenizer.open_tokenizer(str(tmp_path / "vocab.txt"))
    for text, row in zip(strings(), ours(strings(), 16), strict=True):
        wanted = theirs(text)["input_ids"][:-1][:16]
        assert row.tolist() == wanted + [0] * (16 - len(wanted)), text


@pytest.mark.parametrize(("pad_id", "fill"), [(-1, 0), (3, 3)])
def test_pieces_without_an_end_are_padded_with_a_token(monkeypatch, pad_id, fill):
    sentencepiece = pytest.importorskip("sentencepiece")

    class Pieces:
        """A model whose pieces are the lengths of words."""

        get_piece_size, eos_id = (lambda self: 9), (lambda self: -1)

        def pad_id(self):
            return pad_id

        def encode(self, text):
            return [len(word) for word in text.split()]

    monkeypatch.setattr(
        sentencepiece, "SentencePieceProcessor", lambda model_file: Pieces()
    )
    ours = tokenizer.SentencePieces("x.model")
    assert ours.eos_id == -1
    found = ours(["a bb", "cccc dd e ff", ""], 3)
    assert found.tolist() == [[1, 2, fill], [4, 2, 1], [fill] * 3]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_tokens_around_a_text_need_room(tmp_path, num_tokens):
    ours = tokenizer.open_tokenizer(str(_train_bpe(tmp_path)))
    with pytest.raises(
        UserError, match=f"data.num_tokens={num_tokens}: .* set at least 3"
    ):
        ours(["a cat"], num_tokens)
    assert ours(["a cat"], 3)[0, -1] == ours.eos_id


def test_a_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"data.tokenizer='nowhere' does not exist"):
        tokenizer.open_tokenizer("nowhere")
    with pytest.raises(UserError, match=r"has no tokenizer \(tokenizer.json"):
        tokenizer.open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot be read: "):
        tokenizer.open_tokenizer(str(tmp_path))

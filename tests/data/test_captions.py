"""Captions of every kind of data set, as tokens of a batch."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import tiny_config
from PIL import Image

from vit_jax.data import captions, pipeline
from vit_jax.data.sources.open import open_source
from vit_jax.data.tokenizer import open_tokenizer
from vit_jax.errors import UserError

SIZE = 8


def config(**keys):
    common = {
        "tokenizer": "bytes",
        "num_tokens": 16,
        "num_classes": 0,
        "split": "train",
    }
    common |= {"image_size": (SIZE, SIZE), "num_examples": 6}
    transform = {"train_transform": "resize", "num_workers": 0}
    return tiny_config(data=common | transform | keys, evals={}).data


def texts_of(data, count=6, epochs=1):
    """Returns the captions that batches hold, by the value of their image's pixels."""
    source = open_source(data, data.split)
    found = {}
    with pipeline.train_batches(
        source, data, batch_size=count, seed=1, start=0, stop=epochs
    ) as batches:
        for batch in batches:
            assert batch["text"].dtype == np.int32
            for image, tokens in zip(batch["image"], batch["text"], strict=True):
                letters = bytes((tokens[tokens > 1] - 2).tolist()).decode()
                found.setdefault(int(image[0, 0, 0]), set()).add(letters)
    return found


def picture(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (SIZE, SIZE), (value,) * 3).save(path)


@pytest.fixture
def files(tmp_path):
    """Keys of six images with captions in files beside them."""
    for i in range(6):
        picture(tmp_path / "train" / f"{i}.png", 10 * i)
        (tmp_path / "train" / f"{i}.txt").write_text(f"one {i}\n\n two {i} \n")
    return {"name": "folder", "data_dir": str(tmp_path), "caption_key": "txt"}


def test_captions_in_files_beside_images(files):
    data = config(**files)
    found = texts_of(data, epochs=20)
    assert found == {10 * i: {f"one {i}", f"two {i}"} for i in range(6)}


def test_captions_in_metadata_of_a_folder(tmp_path):
    lines = []
    for i in range(6):
        picture(tmp_path / "train" / "deep" / f"{i}.png", 10 * i)
        lines.append({"file_name": f"deep/{i}.png", "text": f"é {i}", "other": 1})
    path = tmp_path / "train" / "metadata.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    data = config(name="folder", data_dir=str(tmp_path), caption_key="text")
    assert texts_of(data) == {10 * i: {f"é {i}"} for i in range(6)}
    path.write_text("[1]\n")
    captions._metadata.cache_clear()  # As in another process.
    with pytest.raises(UserError, match=r"metadata.jsonl must have a line of JSON"):
        texts_of(data)


def test_an_image_without_a_caption_is_damaged_or_skipped(files, tmp_path):
    (tmp_path / "train" / "0.txt").unlink()
    with pytest.raises(UserError, match=r"0.png .*has no caption: mend or remove it"):
        texts_of(config(**files))
    assert 0 not in texts_of(config(**files, on_error="skip"))


@pytest.mark.parametrize("several", [False, True])
def test_captions_in_a_column_of_parquet(tmp_path, several):
    images = []
    for i in range(6):
        picture(tmp_path / "x.png", 10 * i)
        images.append((tmp_path / "x.png").read_bytes())
    column = [[f"a {i}", f"b {i}"] if several else f"a {i}" for i in range(6)]
    table = pa.table({"image": images, "caption": column})
    pq.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    keys = {"name": "parquet", "data_dir": str(tmp_path), "caption_key": "caption"}
    found = texts_of(config(**keys), epochs=20 if several else 1)
    ways = "ab" if several else "a"
    assert found == {10 * i: {f"{way} {i}" for way in ways} for i in range(6)}
    with pytest.raises(UserError, match="data.caption_key='text': parquet has no such"):
        texts_of(config(**keys | {"caption_key": "text"}))


def test_names_of_classes_in_prompts():
    data = config(
        name="digits",
        num_classes=10,
        channels=1,
        num_examples=1_442,
        prompts=("{}", "the digit {}"),
    )
    source = open_source(data, "train")
    with pipeline.train_batches(
        source, data, batch_size=64, seed=1, start=0, stop=2
    ) as batches:
        for batch in batches:
            encode = open_tokenizer("bytes")
            for label, tokens in zip(batch["label"], batch["text"], strict=True):
                ways = encode([f"{label}", f"the digit {label}"], 16)
                assert (tokens == ways).all(1).any()


@pytest.mark.slow
def test_batches_are_the_same_from_loader_processes(files):
    batches = []
    for num_workers in (0, 1):
        data = config(**files, num_workers=num_workers)
        with pipeline.train_batches(
            open_source(data, "train"), data, batch_size=6, seed=1, start=0, stop=3
        ) as made:
            batches.append([batch["text"] for batch in made])
    np.testing.assert_array_equal(*batches)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, []),
        ("a", ["a"]),
        (b"a\xc3\xa9", ["aé"]),
        (["a", "b"], ["a", "b"]),
        (np.array([b"a", b"b"], object), ["a", "b"]),
        ({"text": ["a"]}, ["a"]),
        ([], []),
    ],
)
def test_what_a_column_may_hold(value, wanted):
    assert captions.of_value(value) == wanted

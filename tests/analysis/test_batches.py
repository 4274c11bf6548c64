"""Images on their way to networks: decoded once, and kept no longer than they are drawn."""

import weakref

import numpy as np
import pytest
from PIL import Image

from vit_jax import models
from vit_jax.analysis import batches
from vit_jax.analysis.subject import Subject
from vit_jax.data import decode
from vit_jax.weights.pretrained import Preprocess

PREPROCESS = Preprocess((16, 24), (0.4,), (0.25,), crop_fraction=0.9)
COUNT = 11


def subject(**options):
    options = {"image_size": (16, 24), "width": 12, "heads": 3} | options
    return Subject("s", models.create("Ti/8", classes=5, **options), {}, PREPROCESS)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Names and paths of images, of which number 1 is damaged."""
    folder, rng = tmp_path_factory.mktemp("batches"), np.random.default_rng(1)
    for i in range(COUNT):
        noise = rng.integers(0, 256, (30 + i, 41, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i:02}.png")
    (folder / "01.png").write_bytes(b"\x89PNG\r\n")
    return [(f"{i}", str(folder / f"{i:02}.png")) for i in range(COUNT)]


def test_each_model_gets_the_images_it_takes(images):
    subjects = subject(), subject(channels=1)
    told = []
    first, last = batches.read(
        images[:4], subjects, 2, lambda *why: told.append(why), originals=9
    )
    assert (first.names, last.names) == (["0", "2"], ["3"])
    assert [name for name, _ in told] == ["1"]
    assert [pixels.shape for pixels in first.pixels] == [
        (2, 16, 24, 3),
        (2, 16, 24, 1),
    ]
    assert [o.shape for o in first.originals] == [(30, 41, 3), (32, 41, 3)]
    # Grey is what the eye weighs of the colours, not one of them.
    grey = first.pixels[0] @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(first.pixels[1][..., 0], grey, atol=4)  # Of roundings.
    part = first.first(1)
    assert (part.names, len(part.originals)) == (["0"], 1)
    np.testing.assert_array_equal(part.pixels[1], first.pixels[1][:1])


@pytest.fixture
def decoded(monkeypatch):
    """References to the pixels of all files that are decoded."""
    decoded, whole = [], decode.decode

    def watched(data, channels=3):
        pixels = whole(data, channels)
        if isinstance(data, bytes):
            decoded.append(weakref.ref(pixels))
        return pixels

    monkeypatch.setattr(decode, "decode", watched)
    return decoded


def test_a_grey_model_s_images_are_decoded_once_too(images, decoded):
    list(batches.read(images, [subject(channels=1)], 4, lambda *_: None))
    assert len(decoded) == COUNT - 1


@pytest.mark.parametrize("originals", [0, 3])
def test_an_image_is_decoded_once_and_originals_are_kept_of_the_first(
    images, decoded, originals
):
    found = list(
        batches.read(
            images, [subject(), subject()], 4, lambda *_: None, originals=originals
        )
    )
    assert len(decoded) == COUNT - 1
    assert sum(pixels() is not None for pixels in decoded) == originals
    assert [len(batch.originals) for batch in found] == [originals, 0, 0]
    # They are those of the first images that can be read.
    heights = [original.shape[0] for original in found[0].originals]
    assert heights == [30, 32, 33][:originals]


@pytest.mark.parametrize(
    ("count", "size", "least", "sizes"),
    [
        (9, 4, 0, [4, 4, 1]),
        (8, 4, 0, [4, 4]),
        (9, 4, 4, [4, 5]),
        (7, 4, 4, [7]),
        (8, 4, 4, [4, 4]),
        (10, 3, 2, [3, 3, 4]),
        (3, 6, 4, [3]),
    ],
)
def test_no_image_is_left_to_a_batch_of_too_few(images, count, size, least, sizes):
    some = [*images[:1], *images[2:]][:count]
    found = list(batches.read(some, [subject()], size, print, least=least))
    assert [len(batch.names) for batch in found] == sizes
    names = [name for batch in found for name in batch.names]
    assert names == [name for name, _ in some]

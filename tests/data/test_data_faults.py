"""Files that are no good images, from the disk to the batch."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.pipeline import eval_batches, train_batches
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError

OPS = ["inception_crop", "resize_small(15) | random_crop((13, 15))", "resize"]


def bomb(encode, side):
    """A BMP header that promises side x side pixels, over a few bytes."""
    data = bytearray(encode(np.zeros((1, 1), np.uint8), "BMP"))
    data[18:26] = side.to_bytes(4, "little") * 2
    return bytes(data)


def png_bomb(encode):
    """A whole PNG of few bytes that unpacks to 121 megapixels."""
    return encode(Image.new("1", (11_000, 11_000)), "PNG")


FAULTS = {
    "zero bytes": (lambda encode: b"", "is empty"),
    "no image": (lambda encode: b"<html>404</html>", "of no known format"),
    "header bomb": (lambda encode: bomb(encode, 60_000), "too many pixels"),
    "true bomb": (png_bomb, "pixels, too many"),
    "truncated": (
        lambda encode: encode(Image.new("RGB", (50, 40), "red"), "JPEG")[:-40],
        "cannot be decoded",
    ),
    "only a header": (
        lambda encode: encode(Image.new("RGB", (50, 40), "red"), "PNG")[:33],
        "cannot be decoded",
    ),
}


@pytest.fixture
def source_of(data_config, folder):
    """Puts a file in the place of one image; returns config, source and its record."""

    def put(content, **keys):
        plain = {"eval_transform": "resize_small(15) | central_crop((13, 15)) | resize"}
        plain |= {"train_transform": OPS[0], "prefetch": 2}
        data = data_config(name="folder", data_dir=str(folder), **{**plain, **keys})
        source = open_source(data, "train")
        with open(source.describe(4), "wb") as file:
            file.write(content)
        return data, source

    return put


def epoch(source, data):
    batch = {"batch_size": len(source), "seed": 3, "start": 0, "stop": 1}
    with train_batches(source, data, **batch) as batches:
        return next(batches)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_can_be_skipped(source_of, encode, fault):
    make, says = FAULTS[fault]
    data, source = source_of(make(encode))
    where = rf"{source.describe(4)} \(record 4\).*{says}"
    with pytest.raises(UserError, match=where):
        epoch(source, data)
    with (
        eval_batches(source, data, batch_size=19) as batches,
        pytest.raises(UserError, match=where),
    ):
        next(batches)

    data, source = source_of(make(encode), on_error="skip")
    batch = epoch(source, data)
    assert batch["skipped"].tolist().count(1) == 1
    assert batch["image"].any(axis=(1, 2, 3)).all()  # No blank row is trained on.
    with eval_batches(source, data, batch_size=19) as batches:
        batch = next(batches)
    np.testing.assert_array_equal(batch["mask"], np.arange(19) != 4)


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (10_000, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("ops", OPS)
def test_odd_shapes_give_an_image_of_their_own_colour(source_of, encode, size, ops):
    pixels = Image.new("RGB", size, (200, 100, 50))
    end = "" if ops.endswith("resize") else " | resize"
    data, source = source_of(encode(pixels, "PNG"), train_transform=ops + end)
    image = epoch(source, data)["image"]
    flat = (image == np.array([200, 100, 50], np.uint8)).all(axis=(1, 2, 3))
    assert flat.sum() == 1


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1)], ids=str)
def test_a_line_that_would_grow_beyond_all_bounds_is_refused(source_of, encode, size):
    content = encode(Image.new("RGB", size, "red"), "PNG")
    data, source = source_of(
        content, train_transform="resize_small(256) | random_crop | resize"
    )
    says = r"\(record 4\) is (1x10000|10000x1), too long to resize to 256"
    with pytest.raises(UserError, match=says):
        epoch(source, data)


def test_a_wrong_extension_is_read_by_its_content(source_of, photograph, encode):
    expected, source = source_of(encode(photograph, "PNG"), train_transform="resize")
    right = epoch(source, expected)["image"]
    _, source = source_of(
        encode(photograph, "WEBP", lossless=True), train_transform="resize"
    )
    np.testing.assert_array_equal(epoch(source, expected)["image"], right)


def test_a_file_below_the_limit_is_read_without_pillows_warning(tmp_path):
    file = tmp_path / "large.gif"
    Image.new("P", (9_500, 9_500)).save(file)  # Of Pillow's own limit 101 %.
    code = """
import sys
from vit_jax.data.decode import decode
print(decode(open(sys.argv[1], "rb").read()).shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "(9500, 9500, 3)"
    assert done.stderr == ""

import itertools
import sys

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import decode
from vit_jax.data.transforms import host as host_transforms
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError

H, W = 83, 101


@pytest.fixture
def picture():
    """A rough 83x101 image: five strips of 16 rows and three rows."""
    noise = np.random.default_rng(3).integers(0, 256, (17, 23, 3), dtype=np.uint8)
    return np.array(Image.fromarray(noise).resize((W, H), Image.Resampling.BICUBIC))


KINDS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_rows": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_rows_decoded_alone_are_those_of_the_whole_image(
    picture, encode, kind, channels, capfd
):
    data = encode(picture, "JPEG", quality=90, **KINDS[kind])
    header, whole = decode.read_jpeg_header(data), decode.decode(data, channels)
    assert (header.height, header.width) == (H, W)
    assert header.one_scan == (kind not in ("progressive", "restarts"))
    for stop in range(1, H + 1):
        rows = decode.decode_jpeg(data, header, channels, stop)
        np.testing.assert_array_equal(rows[:stop], whole[:stop])
        if header.one_scan and stop < 62:
            assert len(rows) == stop + 2  # Not the whole image.
    assert capfd.readouterr().err == ""  # The decoder has nothing to complain of.


@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_a_damaged_file_shows_nothing_of_the_image_before(picture, encode, damage):
    """The rough decoder writes to memory that is used again."""
    pytest.importorskip("simplejpeg", reason="needs the extra fast")
    bad = bytearray(encode(picture, "JPEG", quality=90))
    middle = len(bad) // 2
    if damage == "cut":
        bad[middle:] = b"\xff\xd9"
    else:
        bad[middle : middle + 100] = bytes(100)
    header, seen = decode.read_jpeg_header(bytes(bad)), []
    for before in (np.zeros_like(picture), np.full_like(picture, 255)):
        data = encode(before, "JPEG")
        decode.decode_jpeg(data, decode.read_jpeg_header(data), 3, H, rough=True)
        seen.append(decode.decode_jpeg(bytes(bad), header, 3, H, rough=True).copy())
    np.testing.assert_array_equal(*seen)


@pytest.mark.parametrize("shrink", decode.JPEG_SHRINKS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_shrunk_image_holds_the_means_of_squares(picture, encode, shrink, channels):
    smooth = np.array(Image.fromarray(picture[:80, :96]).resize((384, 320)))
    data = encode(smooth, "JPEG", quality=95)
    header = decode.read_jpeg_header(data)
    small = decode.decode_jpeg(data, header, channels, 320, shrink)
    h, w = 320 // shrink, 384 // shrink
    assert small.shape == (h, w, channels)
    means = decode.decode(data, channels).reshape(h, shrink, w, shrink, channels)
    assert np.abs(small - means.mean((1, 3))).mean() < 1.5
    for stop in (1, 37, 150):
        rows = decode.decode_jpeg(data, header, channels, stop, shrink)
        there = -(-stop // shrink)
        np.testing.assert_array_equal(rows[:there], small[:there])


def test_grey_files_have_a_header_too(picture, encode):
    data = encode(picture[..., 1], "JPEG")
    header = decode.read_jpeg_header(data)
    assert (header.height, header.width, header.strip) == (H, W, 8)
    rows = decode.decode_jpeg(data, header, 3, 20)
    np.testing.assert_array_equal(rows[:20], decode.decode(data)[:20])


def test_a_file_with_something_after_its_end_is_whole(picture, encode):
    data = encode(picture, "JPEG")
    assert decode.read_jpeg_header(data + b"appended") == decode.read_jpeg_header(data)
    padded = data[:2] + b"\xff\xff" + data[2:]  # Filling before a marker.
    np.testing.assert_array_equal(decode.decode(padded), decode.decode(data))


def test_what_opencv_may_not_have_has_no_header(picture, encode):
    data = encode(picture, "JPEG")
    exif = b"Exif\0\0MM\0\x2a\0\0\0\x08" + bytes(6) + encode(picture[:8], "JPEG")
    thumbnail = encode(picture, "JPEG", exif=exif)
    several = encode(
        Image.fromarray(picture),
        "MPO",
        save_all=True,
        append_images=[Image.fromarray(picture)],
    )
    frame = data.index(b"\xff\xc0")
    arithmetic = data[:frame] + b"\xff\xc9" + data[frame + 2 :]
    flat = data[: frame + 5] + b"\0\0" + data[frame + 7 :]
    cmyk = encode(Image.fromarray(picture).convert("CMYK"), "JPEG")
    others = [data[:-2], thumbnail[:-2], several, arithmetic, flat, cmyk, b"", b"\xff"]
    for other in [*others, encode(picture, "PNG"), data[: frame + 3]]:
        assert decode.read_jpeg_header(other) is None


def test_no_damage_of_a_header_ends_in_another_error(picture, encode):
    data = encode(picture, "JPEG")
    scan = data.index(b"\xff\xda") + 14
    rng, crop = np.random.default_rng(0), host_transforms.RandomResizedCrop(19)
    damaged = 0
    for _ in range(300):
        broken = bytearray(data)
        for place in rng.integers(2, scan, 3):
            broken[place] = rng.integers(256)
        start, length = rng.integers(2, scan), rng.integers(0, 9)
        del broken[start : start + length]
        try:
            crop.from_file(bytes(broken), 3, np.random.default_rng(0))
        except decode.DamagedImage:
            damaged += 1
    assert 50 < damaged < 300


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("antialias", [True, False])
def test_an_random_resized_crop_of_a_file_is_that_of_its_pixels(
    picture, encode, format, antialias
):
    crop = host_transforms.RandomResizedCrop((53, 67), antialias=antialias)
    for options, seed in itertools.product(KINDS.values(), range(20)):
        data = encode(picture, format, **(options if format == "JPEG" else {}))
        one, other = (np.random.Generator(np.random.Philox(seed)) for _ in range(2))
        np.testing.assert_array_equal(
            crop.from_file(data, 3, one), crop(decode.decode(data), other)
        )
        assert one.random() == other.random()  # Both drew as often.


@pytest.mark.parametrize("channels", [1, 3])
def test_a_crop_that_shrinks_while_decoding_is_close_to_the_exact_one(
    picture, encode, channels
):
    large = np.array(Image.fromarray(picture).resize((404, 332)))
    data = encode(large, "JPEG", quality=95)
    pixels = decode.decode(data, channels)
    errors = []
    for seed in range(20):
        crop = host_transforms.RandomResizedCrop((33, 41), area=(0.3, 1))
        one, other = (np.random.Generator(np.random.Philox(seed)) for _ in range(2))
        image = crop.from_file(data, channels, one)
        top, left, h, w = crop.box(332, 404, other)
        part = pixels[top : top + h, left : left + w]
        exact = host_transforms.resize_all(part, (33, 41))
        errors.append(np.abs(image - exact.astype(float)).mean())
    assert image.shape == (33, 41, channels)
    assert np.mean(errors) < 1.6  # Of a very rough image.


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rough_crop_is_close_to_the_exact_one(picture, encode, kind, channels):
    pytest.importorskip("simplejpeg", reason="needs the extra `fast`")
    data = encode(picture, "JPEG", quality=95, **KINDS[kind])
    rough, exact = (
        host_transforms.RandomResizedCrop((53, 67), rough=r) for r in (True, False)
    )
    for seed in range(10):
        one, other = (np.random.Generator(np.random.Philox(seed)) for _ in range(2))
        image = rough.from_file(data, channels, one)
        expected = exact.from_file(data, channels, other)
        assert image.shape == (53, 67, channels)
        error = np.abs(image - expected.astype(int)).mean()
        if channels == 1 or kind == "4:4:4":
            assert error == 0
        else:
            assert 0 < error < 7  # Coloured noise is the worst case.


@pytest.mark.parametrize("rough", [False, True])
def test_a_truncated_file_is_damaged_wherever_the_crop_lies(picture, encode, rough):
    if rough:
        pytest.importorskip("simplejpeg", reason="needs the extra `fast`")
    data = encode(picture, "JPEG")
    crop = host_transforms.RandomResizedCrop(5, area=(0.05, 0.06), rough=rough)
    for cut in (data[:-20], data[:500], data[:40] + data[-2:]):
        for seed in range(20):
            rng = np.random.Generator(np.random.Philox(seed))
            with pytest.raises(decode.DamagedImage, match="cannot be decoded"):
                crop.from_file(cut, 3, rng)


def test_without_the_fast_decoder_a_rough_crop_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[fast\]' in the clone"):
        parse.parse_train("random_resized_crop(rough=True)", (5, 7))

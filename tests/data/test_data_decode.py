import io
import pathlib
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from vit_jax.data import bands
from vit_jax.data.bands import PixelFormat
from vit_jax.data.decode import (
    DamagedImage,
    _register_heif,
    decode,
    orientation,
    to_pixels,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

LOSSY = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"quality": 98}}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_format_agrees_with_the_pixels(photograph, encode, format, channels):
    image = decode(encode(photograph, format, **LOSSY.get(format, {})), channels)
    expected = photograph
    if channels == 1:
        expected = np.array(Image.fromarray(photograph).convert("L"))[..., None]
    assert (image.shape, image.dtype) == ((37, 53, channels), np.uint8)
    error = np.abs(image.astype(int) - expected).mean()
    assert error < (3 if format in LOSSY else 0.6 if channels == 1 else 1e-9)


def test_grey_files_become_rgb(photograph, encode):
    grey = np.array(Image.fromarray(photograph).convert("L"))
    np.testing.assert_array_equal(decode(encode(grey, "PNG")), np.stack([grey] * 3, -1))
    assert decode(encode(grey, "JPEG")).shape == (37, 53, 3)
    np.testing.assert_array_equal(decode(encode(grey, "PNG"), 1)[..., 0], grey)


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_palettes_are_looked_up(photograph, encode, format):
    palette = Image.fromarray(photograph).quantize(200)
    expected = np.array(palette.convert("RGB"))
    np.testing.assert_array_equal(decode(encode(palette, format)), expected)


def test_cmyk_jpegs_become_rgb(photograph, encode):
    cmyk = Image.fromarray(photograph).convert("CMYK")
    image = decode(encode(cmyk, "JPEG", quality=98, subsampling=0))
    assert np.abs(image.astype(int) - photograph).mean() < 3
    assert decode(encode(cmyk, "JPEG"), 1).shape == (37, 53, 1)


def test_sixteen_bits_keep_the_high_byte(encode):
    values = np.arange(35 * 700, step=35, dtype=np.uint16).reshape(20, 35) * 2
    image = decode(encode(values, "PNG"), 1)
    np.testing.assert_array_equal(image[..., 0], values >> 8)


def test_whole_numbers_of_32_bits_up_to_255_are_as_of_8_bits(encode):
    values = np.arange(35).reshape(5, 7).astype(np.int32) * 7
    for high, expected in ((1, values), (100, values * 100 >> 8)):
        image = Image.fromarray(values * high)
        assert image.mode == "I"
        for pixels in (to_pixels(image, 1), decode(encode(image, "TIFF"), 1)):
            np.testing.assert_array_equal(pixels[..., 0], expected)
    # A dark scan of 16 bits.
    assert decode(encode(Image.fromarray(values), "PPM"), 1).max() == 0
    for other in (values - 1, values * 1_000):
        with pytest.raises(DamagedImage, match=f"grey values from {other.min()} to"):
            to_pixels(Image.fromarray(other), 3)


def test_transparency_is_laid_over_white(encode):
    pixels = np.zeros((3, 5, 4), np.uint8)
    pixels[0] = (10, 20, 30, 255)
    pixels[1] = (10, 20, 30, 0)
    for format in ("PNG", "WEBP"):
        image = decode(encode(pixels, format, lossless=True))
        assert tuple(image[0, 0]) == (10, 20, 30)
        assert tuple(image[1, 0]) == (255, 255, 255)


def test_of_an_animation_the_first_frame_counts(encode):
    frames = [Image.new("RGB", (7, 5), colour) for colour in ("red", "blue")]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert tuple(decode(data)[0, 0]) == (255, 0, 0)


def test_the_camera_orientation_is_ignored(photograph, encode):
    exif = Image.Exif()
    exif[0x0112] = 6  # Turned by a quarter.
    data = encode(photograph, "JPEG", exif=exif)
    np.testing.assert_array_equal(decode(data), decode(encode(photograph, "JPEG")))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_an_image_is_turned_as_its_tag_says_where_that_is_asked_for(
    photograph, encode, format, tag
):
    exif = Image.Exif()
    exif[0x0112] = tag
    data = encode(photograph, format, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    found = decode(data, exif=True)
    # JPEG is decoded by two libraries, whose colours differ by a little.
    np.testing.assert_allclose(found, np.array(expected), atol=2)
    assert orientation(data) == (1 if format == "TIFF" else tag)
    assert found.flags.c_contiguous
    damaged = decode(encode(photograph, format), exif=True)
    assert damaged.shape == (37, 53, 3)


def test_apples_photographs_are_read(monkeypatch):
    data = (GOLDEN / "red_corner.heic").read_bytes()
    _register_heif.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pi_heif", None)
        with pytest.raises(DamagedImage, match="extra `heic`"):
            decode(data)
    pytest.importorskip("pi_heif")
    pixels = decode(data)
    assert pixels.shape == (48, 64, 3)
    np.testing.assert_allclose(pixels[4:20, 4:28].mean((0, 1)), (250, 20, 20), atol=12)


def test_a_thumbnail_does_not_pass_for_the_end_of_the_image(photograph, encode):
    thumbnail = encode(photograph[:8, :8], "JPEG")
    exif = b"Exif\0\0MM\0\x2a\0\0\0\x08" + bytes(6) + thumbnail
    data = encode(photograph, "JPEG", exif=exif, quality=95)
    assert decode(data).shape == (37, 53, 3)
    for cut in (len(thumbnail) + 60, len(data) // 2 + 300, len(data) - 200):
        with pytest.raises(DamagedImage, match="cannot be decoded"):
            decode(data[:cut])


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("kept", [0.03, 0.3, 0.6, 0.95])
def test_a_truncated_image_is_damaged(photograph, encode, format, kept):
    data = encode(photograph, format)
    with pytest.raises(DamagedImage, match="cannot be decoded"):
        decode(data[: int(kept * len(data))])
    if format in ("JPEG", "PNG"):  # The end was never written.
        with pytest.raises(DamagedImage, match="cannot be decoded"):
            decode(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def test_arrays_pass_if_they_are_images(photograph):
    np.testing.assert_array_equal(decode(photograph), photograph)
    assert decode(photograph[..., :1]).shape == (37, 53, 3)
    for pixels, channels, match in (
        (photograph, 1, "has 3 channels, not 1"),
        (photograph.astype(np.float32), 3, r"float32 \(37, 53, 3\), not uint8"),
        (photograph.astype(np.int64), 3, r"int64 \(37, 53, 3\), not uint8"),
    ):
        with pytest.raises(DamagedImage, match=match):
            decode(pixels, channels)


@pytest.mark.slow
def test_a_file_below_the_limit_is_read_without_pillows_warning(tmp_path):
    file = tmp_path / "large.gif"
    Image.new("P", (9_500, 9_500)).save(file)  # Of Pillow's own limit 101 %.
    code = (
        "import sys; from vit_jax.data.decode import decode;"
        "print(decode(open(sys.argv[1], 'rb').read()).shape)"
    )
    words = [sys.executable, "-c", code, file]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("(9500, 9500, 3)\n", "")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "TIFF", "WEBP"])
def test_a_large_image_names_the_limit_which_may_be_raised(photograph, encode, format):
    data = encode(photograph, format)  # 0.00196 megapixels.
    what = r"53x37 pixels.*max_megapixels=0\.0015 .*resize"
    with pytest.raises(DamagedImage, match=what):
        decode(data, max_megapixels=0.001_5)
    assert decode(data, max_megapixels=0.002).shape == (37, 53, 3)
    form = PixelFormat(3, "uint16", max_megapixels=0.001_5)
    with pytest.raises(DamagedImage, match=what):
        bands.read(data, form)


def png_chunk(kind, content):
    checksum = zlib.crc32(kind + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + kind + content + checksum


def test_what_is_odd_about_a_png_is_not_printed(photograph, encode, capfd):
    data = encode(photograph, "PNG")
    profile = png_chunk(b"iCCP", b"sRGB\0\0" + zlib.compress(b"no profile"))
    for odd in (profile, png_chunk(b"tIME", b"now"), png_chunk(b"sRGB", b"\0\0")):
        header = 8 + 25  # Signature and IHDR.
        pixels = decode(data[:header] + odd + data[header:])
        np.testing.assert_array_equal(pixels, photograph)
    assert capfd.readouterr() == ("", "")

"""Images that people give: too large, damaged, or outside the folder."""

import concurrent.futures
import io
import os
import time

import explored
import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from vit_jax.errors import UserError
from vit_jax.tools.explorer import images
from vit_jax.tools.explorer.images import Folder, Refused


def test_a_folder_lists_and_reads_its_images(folder, tmp_path, monkeypatch):
    found = Folder(str(folder))
    names = ["again.png", "one.png", "torn.png", "deeper/zwei & drei.jpg"]
    assert found.names() == (names, False)
    assert found.read("one.png") == found.read("again.png")
    assert found.read("deeper/../one.png") == (folder / "one.png").read_bytes()
    (tmp_path / "link").symlink_to(folder)
    assert Folder(str(tmp_path / "link")).names()[0] == names
    monkeypatch.setattr(images, "MAX_NAMES", 2)
    assert found.names() == (names[:2], True)
    with pytest.raises(UserError, match=r"--images=.*absent is not a folder"):
        Folder(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "../images_too/secret.png",
        "deeper/../../secret.png",
        "{root}/secret.png",
        "out.png",
        "elsewhere/secret.png",
        "round.png",
        "notes.txt",
        "deeper",
        "",
        ".",
        "absent.png",
        "one.png\0.png",
        "one.png/",
        "\udcff.png",
    ],
)
def test_nothing_else_is_read(folder, name):
    with pytest.raises(Refused, match="is not an image of the chosen folder") as found:
        Folder(str(folder)).read(name.format(root=folder.parent))
    assert found.value.status == 404


def test_too_many_bytes_or_pixels_are_found_before_they_are_decoded(
    folder, monkeypatch
):
    for size, message in (
        ((10_000, 10_001), "x has 10000x10001 pixels.*max_megapixels=100 .* to 101"),
        ((20_000, 20_000), "x has 20000x20000 pixels"),  # Above Pillow's own limit.
    ):
        stream = io.BytesIO()
        Image.new("1", size).save(stream, "PNG")
        with pytest.raises(Refused, match=message) as found:
            images.check(stream.getvalue(), "x")
        assert found.value.status == 413
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    with pytest.raises(Refused, match=r"one\.png has [\d,]+ bytes, more than 1,000"):
        Folder(str(folder)).read("one.png")
    with pytest.raises(Refused, match="x has 1,001 bytes, more than 1,000"):
        images.check(bytes(1001), "x")


@pytest.mark.parametrize("data", [b"", b"no image", explored.picture(0)[:60]])
def test_what_is_no_image_is_left_to_decoding(data):
    images.check(data, "x")


def thumbnail(data):
    """Opens the thumbnail of a file."""
    return Image.open(io.BytesIO(images.thumbnail(data)))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_thumbnails_are_small_upright_and_grey_for_a_broken_image(form):
    exif = Image.Exif()
    exif[0x0112] = 6  # Turned by a quarter.
    stream = io.BytesIO()
    Image.new("RGB", (400, 200)).save(stream, form, exif=exif)
    small = thumbnail(stream.getvalue())
    assert (small.format, small.size) == ("JPEG", (56, 112))
    broken = np.array(thumbnail(explored.picture(0, form)[:300]))
    assert abs(broken[:20].astype(int) - 96).max() < 5


@pytest.mark.parametrize(
    ("mode", "form"),
    # The last is what many telephones write: a JPEG file with more pictures behind.
    [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "MPO")],
)
def test_of_a_large_photograph_no_more_is_decoded_than_is_needed(
    mode, form, monkeypatch
):
    sizes, draft = [], JpegImagePlugin.JpegImageFile.draft

    def watched(self, *words):
        found = draft(self, *words)
        sizes.append(self.size)
        return found

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", watched)
    y, x = np.mgrid[:1600, :2400] // 13
    colours = np.stack([x, y, x // 2], -1).astype(np.uint8)
    picture = Image.fromarray(colours).convert(mode)
    stream = io.BytesIO()
    more = {"append_images": [picture.resize((9, 6))], "save_all": True}
    picture.save(stream, form, **(more if form == "MPO" else {}))
    small = thumbnail(stream.getvalue())
    assert sizes[0] == (600, 400)  # An eighth would be less than twice the thumbnail.
    expected = picture.convert("RGB").resize((112, 75), Image.Resampling.BOX)
    assert small.size == expected.size
    error = np.array(small).astype(int) - np.array(expected)
    assert abs(error).mean() < 2


@pytest.fixture
def counted(monkeypatch):
    """Counts thumbnails that are made, and how many at once at most."""
    made, at_once, make = [], [0, 0], images.thumbnail

    def watched(data, *limit):
        at_once[0] += 1
        at_once[1] = max(at_once)
        time.sleep(0.02)
        made.append(data)
        at_once[0] -= 1
        return make(data, *limit)

    monkeypatch.setattr(images, "thumbnail", watched)
    return made, at_once


def test_a_thumbnail_is_made_once_until_its_file_changes(tmp_path, counted):
    made, _ = counted
    (tmp_path / "one.png").write_bytes(explored.picture(1))
    found = Folder(str(tmp_path))
    before = found.thumbnail("one.png")
    assert found.thumbnail("one.png") == before
    assert len(made) == 1
    (tmp_path / "one.png").write_bytes(explored.picture(2))  # Of another time or size.
    os.utime(tmp_path / "one.png", ns=(1, 1))
    assert found.thumbnail("one.png") != before
    assert len(made) == 2
    (tmp_path / "one.png").unlink()
    with pytest.raises(Refused, match="'one.png' is not an image of the chosen folder"):
        found.thumbnail("one.png")


def test_thumbnails_are_made_one_at_a_time(folder, counted):
    made, at_once = counted
    found = Folder(str(folder))
    names, _ = found.names()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(found.thumbnail, 2 * names))
    assert len(made) == len(names) == 4
    assert at_once[1] == 1

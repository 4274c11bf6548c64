"""Images that people give: too large, damaged, or outside the folder."""

import io

import explored
import numpy as np
import pytest
from PIL import Image

from vit_jax.errors import UserError
from vit_jax.explorer import images
from vit_jax.explorer.images import Folder, Refused


def test_a_folder_lists_its_images_and_no_links_that_lead_out(folder):
    names, more = Folder(str(folder)).names()
    assert names == ["again.png", "one.png", "torn.png", "deeper/zwei & drei.jpg"]
    assert not more


def test_a_long_list_ends(folder, monkeypatch):
    monkeypatch.setattr(images, "MOST_NAMES", 2)
    assert Folder(str(folder)).names() == (["again.png", "one.png"], True)


def test_a_folder_reads_its_images(folder):
    read = Folder(str(folder)).read
    assert read("one.png") == read("again.png") == (folder / "one.png").read_bytes()
    assert read("deeper/../one.png") == read("one.png")


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "../images_too/secret.png",
        "deeper/../../secret.png",
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
    with pytest.raises(Refused, match="is no image of the chosen folder") as found:
        Folder(str(folder)).read(name)
    assert found.value.status == 404


def test_no_absolute_path_is_read(folder):
    path = folder.parent / "secret.png"
    with pytest.raises(Refused, match="is no image of the chosen folder"):
        Folder(str(folder)).read(str(path))


def test_a_folder_may_itself_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert "one.png" in Folder(str(tmp_path / "link")).names()[0]


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"--images=.*absent is not a folder"):
        Folder(str(tmp_path / "absent"))


def test_too_many_bytes(folder, monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    with pytest.raises(Refused, match=r"one\.png has [\d,]+ bytes, more than 1,000"):
        Folder(str(folder)).read("one.png")
    with pytest.raises(Refused, match="x has 1,001 bytes, more than 1,000"):
        images.check(bytes(1001), "x")


def test_too_many_pixels_are_found_before_they_are_decoded():
    stream = io.BytesIO()
    Image.new("1", (10_000, 5_001)).save(stream, "PNG")
    with pytest.raises(Refused, match="x has 10000x5001 pixels, more than 50,000,000"):
        images.check(stream.getvalue(), "x")


def test_far_too_many_pixels():
    stream = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(stream, "PNG")
    with pytest.raises(Refused, match="x has") as found:
        images.check(stream.getvalue(), "x")
    assert found.value.status == 413


@pytest.mark.parametrize("data", [b"", b"no image", explored.picture(0)[:60]])
def test_what_is_no_image_is_left_to_decoding(data):
    images.check(data, "x")


def test_thumbnails(photograph):
    small = Image.open(io.BytesIO(images.thumbnail(photograph)))
    assert small.format == "JPEG"
    assert max(small.size) <= 112
    broken = np.array(Image.open(io.BytesIO(images.thumbnail(photograph[:300]))))
    assert abs(broken[:20].astype(int) - 128).max() < 5

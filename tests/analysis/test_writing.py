"""Batches of images and files of figures; tests/test_visualize.py writes all figures."""

import weakref

import numpy as np
import pytest
from PIL import Image

from vit_jax import models
from vit_jax.analysis import charts
from vit_jax.analysis.figures import create
from vit_jax.analysis.figures.figure import Picture
from vit_jax.analysis.figures.writing import (
    chunk_and_batch_size,
    file_stem,
    read_batches,
    save,
)
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.command_line.files import unique_stem
from vit_jax.data import decode
from vit_jax.data.preprocess import Preprocess

CROPPED = Preprocess((16, 24), (0.4,), (0.25,), crop_fraction=0.9)
NUM_FILES = 11


@pytest.mark.parametrize(
    ("variant", "side", "names", "batch_size", "max_shown", "sizes"),
    [
        ("S/16", 224, ["cka"], 0, 16, (32, 32)),
        ("B/16", 512, ["cka"], 0, 16, (5, 5)),
        ("L/16", 512, ["norms", "cka"], 0, 16, (3, 6)),
        ("B/8", 512, ["cka"], 0, 16, (1, 4)),
        ("B/8", 512, ["norms"], 0, 16, (1, 1)),
        ("S/16", 224, ["cka"], 3, 16, (3, 6)),
        ("S/16", 224, ["norms", "rollout"], 0, 2, (32, 32)),
        ("S/16", 224, ["rollout"], 0, 2, (2, 2)),
    ],
)
def test_chunks_fit_in_memory_and_batches_suffice_for_cka(
    variant, side, names, batch_size, max_shown, sizes
):
    model = models.create(variant, num_classes=5, image_size=(side, side))
    loaded = LoadedModel("s", model, {}, Preprocess((side, side)))
    figures = create(names, {}).values()
    assert chunk_and_batch_size(loaded, figures, batch_size, max_shown) == sizes
    if not batch_size:
        one = 4 * model.options["num_heads"] * (1 + model.grid[0] ** 2) ** 2
        assert sizes[0] == 1 or sizes[0] * one <= 256 << 20
        assert loaded.max_chunk_size(4) == max(1, min(32, (64 << 20) // one))


def test_a_file_is_replaced_as_a_whole(tmp_path):
    drawing = charts.draw_tiles([np.eye(3)], 1, title="t")
    picture = Picture(drawing, {"eye": np.eye(3)}, "a")
    names = save("attention", picture, tmp_path)
    assert names == [f"attention/a.{form}" for form in ("png", "svg", "npz")]
    old = {name: (tmp_path / name).read_bytes() for name in names}
    for i, name in enumerate(names):
        (tmp_path / f"old {i}").hardlink_to(tmp_path / name)
        (tmp_path / f"old {i}").write_bytes(b"other")
    save("attention", picture, tmp_path)
    for i, name in enumerate(names):
        assert (tmp_path / f"old {i}").read_bytes() == b"other"
        assert len((tmp_path / name).read_bytes()) == len(old[name])
    left = {f"attention/{path.name}" for path in (tmp_path / "attention").iterdir()}
    assert left == set(names)


def test_images_of_one_name_have_distinct_stems():
    taken = {}
    paths = "x/a.png", "y/A.jpg", "a b?.gif", "-", "z/a.png", "z/a_2.png"
    stems = [unique_stem(file_stem(path), taken) for path in paths]
    assert stems == ["a", "A_2", "a_b", "image", "a_3", "a_2_2"]


def tiny(**options):
    options = {"image_size": (16, 24), "width": 12, "num_heads": 3} | options
    return LoadedModel(
        "s", models.create("Ti/8", num_classes=5, **options), {}, CROPPED
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Names and paths of images, of which number 1 is damaged."""
    folder, rng = tmp_path_factory.mktemp("batches"), np.random.default_rng(1)
    for i in range(NUM_FILES):
        noise = rng.integers(0, 256, (30 + i, 41, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i:02}.png")
    (folder / "01.png").write_bytes(b"\x89PNG\r\n")
    return [(f"{i}", str(folder / f"{i:02}.png")) for i in range(NUM_FILES)]


def test_each_model_gets_images_of_its_channels(images):
    loaded = tiny(), tiny(channels=1)
    told = []
    first, last = read_batches(
        images[:4], loaded, 2, lambda *why: told.append(why), num_originals=9
    )
    assert (first.names, last.names) == (["0", "2"], ["3"])
    assert [name for name, _ in told] == ["1"]
    assert [pixels.shape for pixels in first.pixels] == [
        (2, 16, 24, 3),
        (2, 16, 24, 1),
    ]
    assert [o.shape for o in first.originals] == [(30, 41, 3), (32, 41, 3)]
    # Grey is the luminance.
    grey = first.pixels[0] @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(first.pixels[1][..., 0], grey, atol=4)  # Rounding.
    part = first.first(1)
    assert (part.names, len(part.originals)) == (["0"], 1)
    np.testing.assert_array_equal(part.pixels[1], first.pixels[1][:1])


@pytest.fixture
def decoded(monkeypatch):
    """References to the pixels of all files that are decoded."""
    decoded, whole = [], decode.decode

    def watched(data, channels=3, **how):
        pixels = whole(data, channels, **how)
        if isinstance(data, bytes):
            decoded.append(weakref.ref(pixels))
        return pixels

    monkeypatch.setattr(decode, "decode", watched)
    return decoded


@pytest.mark.parametrize(
    ("channels", "originals"), [((1,), 0), ((3, 3), 0), ((3, 3), 3)]
)
def test_an_image_is_decoded_once_and_originals_are_kept_of_the_first(
    images, decoded, channels, originals
):
    loaded = [tiny(channels=count) for count in channels]
    ignore = lambda *_: None
    found = list(read_batches(images, loaded, 4, ignore, num_originals=originals))
    assert len(decoded) == NUM_FILES - 1
    assert sum(pixels() is not None for pixels in decoded) == originals
    assert [len(batch.originals) for batch in found] == [originals, 0, 0]
    # They are of the first readable images.
    heights = [original.shape[0] for original in found[0].originals]
    assert heights == [30, 32, 33][:originals]


@pytest.mark.parametrize(
    ("count", "size", "minimum", "sizes"),
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
def test_no_batch_is_too_small_and_no_image_is_lost(
    images, count, size, minimum, sizes
):
    some = [*images[:1], *images[2:]][:count]
    found = list(read_batches(some, [tiny()], size, print, min_batch_size=minimum))
    assert [len(batch.names) for batch in found] == sizes
    names = [name for batch in found for name in batch.names]
    assert names == [name for name, _ in some]

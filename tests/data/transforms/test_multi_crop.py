"""Multi-crop, and the bicubic filter that it shares with the inception crop."""

import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import decode
from vit_jax.data.pipeline import train_batches
from vit_jax.data.sources.open import open_source
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.host import RandomResizedCrop
from vit_jax.data.transforms.multi_crop import MultiCrop

# Of Pillow, torchvision and timm; tests/golden/README.md.
GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "augment.npz")


def rng(i=0):
    return np.random.Generator(np.random.Philox(i))


@pytest.mark.parametrize("number", range(3))
def test_a_bicubic_crop_is_that_of_torchvision(number):
    *box, size = GOLDEN[f"crop_{number}/box_and_size"].tolist()
    cut = lambda **how: RandomResizedCrop(size, **how).cut(GOLDEN["picture"], (*box,))
    found = cut(interpolation="bicubic")
    np.testing.assert_array_equal(found, GOLDEN[f"crop_{number}/bicubic"])
    assert np.abs(found.astype(int) - cut()).max() > 3
    # Of torchvision's bilinear crop, SimMIM's, Pillow is the witness.
    top, left, height, width = box
    part = Image.fromarray(GOLDEN["picture"]).crop(
        (left, top, left + width, top + height)
    )
    expected = part.resize((size, size), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(cut(interpolation="bilinear"), expected)


def test_crops_are_those_of_pillow_in_the_order_drawn(natural):
    op = MultiCrop((20, 24), small_size=8, num_small=3)
    views = op(natural[0], rng(5))
    assert {k: v.shape for k, v in views.items()} == op.output_shapes(3)
    assert op.output_shapes(3) == {"image": (2, 20, 24, 3), "small_crops": (3, 8, 8, 3)}
    draw = rng(5)
    # Areas of DINO.
    large, small = (
        RandomResizedCrop(1, area=(0.4, 1)),
        RandomResizedCrop(1, area=(0.05, 0.4)),
    )
    boxes = [
        crop.box(*natural[0].shape[:2], draw) for crop in [large] * 2 + [small] * 3
    ]
    crops = [*views["image"], *views["small_crops"]]
    for (top, left, height, width), crop in zip(boxes, crops, strict=True):
        part = Image.fromarray(natural[0]).crop((left, top, left + width, top + height))
        size = crop.shape[1::-1]
        expected = part.resize(size, Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(crop, np.asarray(expected))


@pytest.mark.parametrize("options", [{}, {"num_small": 0}, {"interpolation": "fast"}])
def test_a_file_gives_the_crops_of_its_pixels(natural, encode, options):
    op = MultiCrop(96, small_size=32, **options)
    image = np.asarray(Image.fromarray(natural[0]).resize((167, 113)))
    for kind in ("JPEG", "PNG"):
        data = encode(image, kind)
        expected, found = (
            op(decode.decode(data, 3), rng(1)),
            op.from_file(data, 3, rng(1)),
        )
        assert found.keys() == expected.keys()
        assert ("small_crops" in found) == (op.num_small > 0)
        for name in found:
            np.testing.assert_array_equal(found[name], expected[name])


def test_a_line_takes_the_size_of_the_config(data_config, folder):
    line = "multi_crop(small_size=(5, 6), num_small=2) | flip"
    data = data_config(name="folder", data_dir=str(folder), train_transform=line)
    source = open_source(data, "train")
    keys = {"batch_size": 6, "seed": 3, "start": 0, "stop": 3}
    with train_batches(source, data, **keys) as batches:
        for batch in batches:
            assert batch["image"].shape == (6, 2, 13, 17, 3)
            assert batch["small_crops"].shape == (6, 2, 5, 6, 3)
            assert batch["label"].shape == (6,)
            assert (batch["image"][:, 0] != batch["image"][:, 1]).any((1, 2, 3)).all()


def test_each_batch_draws_one_of_several_pairs_of_sizes(data_config, folder):
    line = "multi_crop(sizes=((16, 5), ((20, 24), 8)), shares=(0.8, 0.2), num_small=2)"
    data = data_config(name="folder", data_dir=str(folder), train_transform=line)
    source = open_source(data, "train")
    keys = {"batch_size": 2, "seed": 3, "stop": 60}
    with train_batches(source, data, start=0, **keys) as batches:
        whole = list(batches)
    shapes = [(*b["image"].shape[1:4], *b["small_crops"].shape[1:4]) for b in whole]
    assert {*shapes} == {(2, 16, 16, 2, 5, 5), (2, 20, 24, 2, 8, 8)}
    assert 0.65 < shapes.count((2, 16, 16, 2, 5, 5)) / 60 < 0.95
    with train_batches(source, data, start=53, **keys) as batches:
        for batch, expected in zip(batches, whole[53:], strict=True):
            np.testing.assert_array_equal(batch["image"], expected["image"])
    (transform,) = parse.parse_train(line, (13, 17)).host
    # What is compiled first is the largest.
    expected = {"image": (2, 20, 24, 3), "small_crops": (2, 8, 8, 3)}
    assert transform.output_shapes(3) == expected

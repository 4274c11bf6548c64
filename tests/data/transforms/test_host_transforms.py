import numpy as np
import pytest
from PIL import Image

from vit_jax.data.transforms import host as host_transforms

H, W = 37, 53


def rng(i=0):
    return np.random.Generator(np.random.Philox(i))


def test_resize_agrees_with_pillow(photograph):
    image = host_transforms.Resize((11, 19))(photograph, rng())
    expected = Image.fromarray(photograph).resize((19, 11), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(image, expected)


def test_resize_keeps_one_channel(photograph):
    image = host_transforms.Resize((11, 19))(photograph[..., :1], rng())
    expected = Image.fromarray(photograph[..., 0]).resize((19, 11), 2)
    np.testing.assert_array_equal(image[..., 0], expected)


def test_resize_small_keeps_the_aspect(photograph):
    assert host_transforms.ResizeSmall(74)(photograph, rng()).shape == (74, 106, 3)
    turned = photograph.swapaxes(0, 1)
    assert host_transforms.ResizeSmall(11)(turned, rng()).shape == (15, 11, 3)


def test_resize_small_to_a_pair_covers_both_sides(photograph):
    covers = lambda *size: host_transforms.ResizeSmall(size)(photograph, rng()).shape
    assert covers(28, 42) == (29, 42, 3)  # Of 37x53: the width decides,
    assert covers(28, 14) == (28, 40, 3)  # and here the height.


def test_central_crop_is_the_middle(photograph):
    image = host_transforms.CentralCrop((7, 9))(photograph, rng())
    np.testing.assert_array_equal(image, photograph[15:22, 22:31])


def test_random_crop_reaches_every_place_equally_often():
    image = np.arange(3 * 4, dtype=np.uint8).reshape(3, 4, 1)
    op, generator = host_transforms.RandomCrop((2, 2)), rng()
    corners = [int(op(image, generator)[0, 0, 0]) for _ in range(3000)]
    values, counts = np.unique(corners, return_counts=True)
    assert list(values) == [0, 1, 2, 4, 5, 6]
    np.testing.assert_allclose(counts, 500, atol=110)  # 5 standard deviations.


@pytest.mark.parametrize(
    "op", [host_transforms.CentralCrop(38), host_transforms.RandomCrop((5, 54))]
)
def test_a_crop_larger_than_the_image_says_so(photograph, op):
    with pytest.raises(
        host_transforms.TooSmall, match=r"37x53: put resize_small\(\(.*before it"
    ):
        op(photograph, rng())


def test_inception_boxes_keep_area_ratio_and_image():
    op, generator = host_transforms.InceptionCrop(7), rng()
    boxes = np.array([op.box(370, 530, generator) for _ in range(4000)])
    top, left, height, width = boxes.T
    assert top.min() >= 0
    assert left.min() >= 0
    assert (top + height).max() <= 370
    assert (left + width).max() <= 530
    area, ratio = height * width / (370 * 530), width / height
    assert 0.049 < area.min() < 0.06
    assert area.max() > 0.9
    assert 0.73 < ratio.min() < 0.76
    assert 1.31 < ratio.max() < 1.36
    # Small parts fit whatever their shape, so there the ratio is log-uniform.
    small = np.log(ratio[area < 0.5])
    assert abs(small.mean()) < 0.03
    assert abs(small.std() - np.log(16 / 9) / np.sqrt(12)) < 0.01


def test_inception_crop_of_the_whole_image_is_a_resize(photograph):
    op = host_transforms.InceptionCrop((H, W), area=(1, 1), ratio=(W / H, W / H))
    np.testing.assert_array_equal(op(photograph, rng()), photograph)
    half = host_transforms.InceptionCrop((18, 26), area=(1, 1), ratio=(13 / 9, 13 / 9))
    part = photograph[:36, :52]
    np.testing.assert_allclose(
        half(part, rng()).astype(int)[1:-1, 1:-1],
        host_transforms.resize_bilinear(part, (18, 26))[1:-1, 1:-1],
        atol=1,  # Roundings.
    )


def test_inception_crop_of_an_extreme_shape_takes_the_middle():
    image = np.zeros((2, 200, 3), np.uint8)
    image[:, 99:101] = 9
    op = host_transforms.InceptionCrop((3, 5), area=(0.9, 1))
    assert op.box(2, 200, rng()) == (0, 98, 2, 3)
    assert op(image, rng()).max() == 9


def test_inception_crop_enlarges_smoothly(photograph):
    op = host_transforms.InceptionCrop((90, 120), area=(0.05, 0.1))
    image = op(photograph, rng())
    assert image.shape == (90, 120, 3)
    steps = np.abs(np.diff(image.astype(int), axis=0))
    assert (steps > 0).mean() > 0.5  # Nearest neighbour would repeat most rows.


@pytest.mark.parametrize("op", ["inception_crop", "random_crop"])
def test_a_random_operation_is_a_function_of_its_generator(photograph, op):
    op = host_transforms.TRANSFORMS[op]((7, 9))
    np.testing.assert_array_equal(op(photograph, rng(3)), op(photograph, rng(3)))
    assert (op(photograph, rng(3)) != op(photograph, rng(4))).any()

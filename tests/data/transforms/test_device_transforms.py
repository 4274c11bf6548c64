from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image, ImageFilter

from vit_jax.data.transforms import device as device_transforms
from vit_jax.data.transforms import geometric, parse

B, H, W, C, K = 16, 9, 13, 3, 5
KEY = jax.random.key(0)


def batch(count=B, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, H, W, C), dtype=np.uint8)
    labels = np.eye(K, dtype=np.float32)[rng.integers(0, K, count)]
    return jnp.array(images), jnp.array(labels), jnp.arange(count, dtype=jnp.uint32)


def apply(spec, *batch, key=KEY):
    parsed = parse.parse_train(spec, (H, W)).device
    return jax.jit(partial(device_transforms.apply, parsed))(*batch, key)


def test_no_operation_gives_the_images_as_floats():
    images, labels, index = batch()
    out, same = apply("", images, labels, index)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, images)
    np.testing.assert_array_equal(same, labels)


def test_normalize_subtracts_and_divides_by_channel():
    images, *_ = batch()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = (np.asarray(images) / 255 - mean) / std
    out = device_transforms.normalize(images, mean, std)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    half = device_transforms.normalize(images, (0.5,), std)
    np.testing.assert_allclose(half, (np.asarray(images) / 255 - 0.5) / std, atol=1e-6)


def test_flip_mirrors_half_of_the_images():
    images, labels, index = batch(1000)
    out, _ = apply("flip", images, labels, index)
    same = (out == images).all((1, 2, 3))
    mirrored = (out == images[:, :, ::-1]).all((1, 2, 3))
    assert bool((same | mirrored).all())
    assert 0.42 < float(mirrored.mean()) < 0.58  # 5 standard deviations.


def test_pad_crop_is_a_crop_of_the_padded_image():
    images, labels, index = batch(500)
    out = np.asarray(apply("pad_crop(2)", images, labels, index)[0])
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    places = []
    for i in range(500):
        places += [
            (y, x)
            for y in range(5)
            for x in range(5)
            if (padded[i, y : y + H, x : x + W] == out[i]).all()
        ]
    assert len(places) == 500
    counts = np.unique(places, axis=0, return_counts=True)[1]
    assert len(counts) == 25
    assert counts.max() < 20 + 5 * 4.5


def test_affine_without_a_motion_changes_nothing():
    images, labels, index = batch()
    out, _ = apply("affine()", images, labels, index)
    np.testing.assert_allclose(out, images, atol=1e-3)


def warp(images, angle=0.0, scale=1.0, down=0.0, right=0.0):
    values = (jnp.full(len(images), v) for v in (angle, scale, down, right))
    return np.asarray(jax.jit(geometric.warp)(jnp.asarray(images), *values))


def test_warp_agrees_with_pillow_on_photographs(natural):
    for image in natural:
        height, width = image.shape[:2]
        out = warp(image[None], 0.2, 0.9, 5.5, -7.25)[0]
        c, s = np.cos(0.2) / 0.9, np.sin(0.2) / 0.9
        cx, cy = width / 2, height / 2
        matrix = (c, -s, cx - c * (cx - 7.25) + s * (cy + 5.5))
        matrix += (s, c, cy - s * (cx - 7.25) - c * (cy + 5.5))
        transform = Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        picture = Image.fromarray(image)
        expected = np.asarray(picture.transform((width, height), *transform), float)
        white = Image.new("L", picture.size, 255).transform(picture.size, *transform)
        inside = np.asarray(white.filter(ImageFilter.MinFilter(5))) == 255
        assert 0.4 < inside.mean() < 0.95
        # Pillow cuts off after the comma, which alone is 0.5 on average.
        assert np.abs(out - expected)[inside].mean() < 0.55
        outside = np.asarray(white.filter(ImageFilter.MaxFilter(5))) == 0
        assert outside.any()
        assert not out[outside].any()


@pytest.mark.slow
def test_affine_motions_stay_within_their_limits():
    # A ramp shows where the centre pixel came from.
    ramp = jnp.arange(101.0)[None, :, None, None] * jnp.ones((400, 1, 101, 1))
    index = jnp.arange(400, dtype=jnp.uint32)
    out, _ = apply("affine(shift=0.1)", ramp, jnp.zeros((400, 1)), index)
    moved = 50 - np.asarray(out)[:, 50, 50, 0]
    assert abs(moved).max() <= 10.1
    assert abs(moved).max() > 9.5
    assert abs(moved.mean()) < 1.5


ALL = (
    "flip | pad_crop(2) | affine(shift=0.1, rotate=9, scale=(0.9, 1.1)) | "
    "color_jitter(hue=0.1) | random_erasing(0.9)"
)


def test_an_example_is_treated_by_its_index_whatever_the_batch():
    images, labels, index = batch()
    ops = parse.parse_train(ALL, (H, W)).device
    apply_all = jax.jit(partial(device_transforms.apply, ops))
    run = lambda *args: apply_all(*args)[0]
    out = run(images, labels, index, KEY)
    order = np.random.default_rng(1).permutation(B)
    same = run(images[order], labels[order], index[order], KEY)
    np.testing.assert_allclose(same, out[order], atol=1e-2)
    for other in ((index + B, KEY), (index, jax.random.key(1))):
        assert not np.allclose(run(images, labels, *other), out)
    largest = jnp.full(B, 2**32 - 1, jnp.uint32)
    assert run(images, labels, largest, KEY).shape == images.shape


@pytest.mark.slow
def test_sharded_batches_give_the_same_without_gathering_images():
    size = 20, 31
    spec = ALL + " | upsample | mixup_or_cutmix"
    parsed = parse.parse_train(spec, size).device
    step = jax.jit(lambda *args: device_transforms.apply(parsed, *args))
    images, labels, index = batch()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    images8, labels8, index8 = (place(x, P("data")) for x in (images, labels, index))
    key8 = place(KEY, P())
    compiled = step.lower(images8, labels8, index8, key8).compile()
    assert "all-gather(" not in compiled.as_text()

    shares = []
    row = int((labels.argmax(1) != jnp.roll(labels, 1, 0).argmax(1)).argmax())
    for first in range(0, 6 * B, B):
        expected, soft = step(images, labels, index + first, KEY)
        assert expected.shape == (B, *size, C)
        out, out_soft = compiled(
            images8, labels8, place(index8 + first, P("data")), key8
        )
        np.testing.assert_allclose(out, expected, atol=1e-2)
        np.testing.assert_allclose(out_soft, soft, atol=1e-6)
        assert out.sharding.spec == P("data")
        shares.append(float(soft[row].max()) * size[0] * size[1])
    # Both kinds came: a cut is a whole number of pixels.
    whole = np.abs(shares - np.round(shares)) < 1e-3
    assert 0 < whole.sum() < 6

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from vit_jax.data.transforms.erasing import RandomErasing

H, W = 101, 67
KEY = jax.random.key(5)


def numbers(count):
    return jnp.arange(count, dtype=jnp.uint32)


def erase(op, images):
    """Returns the images erased, and where."""
    count = len(images)
    both = lambda x, i: (op(x, jnp.eye(count), i, KEY)[0], op.parts(H, W, i, KEY))
    return map(np.asarray, jax.jit(both)(images, numbers(count)))


def boxes(op, count):
    """Draws parts: erased or not, top, left, height and width."""
    parts = jax.jit(lambda i: op.parts(H, W, i, KEY))(numbers(count))
    rows, columns = np.asarray(parts.any(2)), np.asarray(parts.any(1))
    sizes = rows.sum(1), columns.sum(1)
    # A part is a rectangle.
    np.testing.assert_array_equal(parts.sum((1, 2)), sizes[0] * sizes[1])
    return np.asarray(parts.any((1, 2))), rows.argmax(1), columns.argmax(1), *sizes


def timm(rng, low, high, ratio):
    """timm's rule, written as it is described."""
    for _ in range(10):
        area = rng.uniform(low, high) * H * W
        aspect = np.exp(rng.uniform(np.log(ratio), -np.log(ratio)))
        h, w = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if h < H and w < W:
            return rng.integers(0, H - h + 1), rng.integers(0, W - w + 1), h, w
    return None


def test_parts_are_distributed_as_timms():
    erased, *box = boxes(RandomErasing(p=1, area=(0.02, 0.8)), 1500)
    assert erased.mean() > 0.999
    rng = np.random.default_rng(0)
    expected = np.transpose([timm(rng, 0.02, 0.8, 0.3) for _ in range(1500)])
    top, left, h, w = (np.asarray(values)[erased] for values in box)
    for ours, theirs in (
        (h * w, expected[2] * expected[3]),
        (np.log(h / w), np.log(expected[2] / expected[3])),
        (top, expected[0]),
        (left, expected[1]),
    ):
        assert stats.ks_2samp(ours, theirs).pvalue > 0.001
    assert (top + h).max() == H
    assert (left + w).max() == W


def test_a_share_of_the_images_is_erased():
    erased, *_ = boxes(RandomErasing(p=0.25), 1500)
    assert stats.binomtest(int(erased.sum()), 1500, 0.25).pvalue > 0.001


def test_only_the_part_of_a_photograph_changes(natural):
    images = jnp.asarray(np.repeat(natural[0][None, :H, :W], 5, axis=0))
    out, inside = erase(RandomErasing(p=1, area=(0.1, 0.3), fill=17), images)
    assert inside.any((1, 2)).all()
    expected = np.where(inside[..., None], 17, images)
    np.testing.assert_array_equal(out, expected)
    assert out.dtype == np.uint8


def test_noise_is_uniform_and_of_its_own_for_each_image_and_pixel(natural):
    images = jnp.asarray(np.repeat(natural[0][None, :H, :W], 3, axis=0))
    out, inside = erase(RandomErasing(p=1, area=(0.3, 0.3)), images)
    for i in range(3):
        noise = out[i][inside[i]].astype(int)
        counts = np.bincount(noise.ravel() // 16, minlength=16)
        assert stats.chisquare(counts).pvalue > 0.001
        for channel in (1, 2):
            assert abs(stats.pearsonr(noise[:, 0], noise[:, channel])[0]) < 0.1
        np.testing.assert_array_equal(out[i][~inside[i]], images[i][~inside[i]])
    common = inside[0] & inside[1]
    assert common.any()
    assert (out[0] != out[1])[common].mean() > 0.9


def test_where_no_shape_fits_nothing_is_erased():
    erased, *_ = boxes(RandomErasing(p=1, area=(1, 1), ratio=(1, 1)), 7)
    assert not erased.any()


def test_normal_noise_has_the_mean_and_deviation_of_imagenet():
    images = jnp.zeros((40, H, W, 3), jnp.uint8)
    out, inside = erase(RandomErasing(p=1, area=(0.2, 0.3), fill="normal"), images)
    assert out.dtype == np.float32 and not out[~inside].any()
    noise = out[inside] / 255
    np.testing.assert_allclose(noise.mean(0), (0.485, 0.456, 0.406), atol=0.02)
    np.testing.assert_allclose(noise.std(0), (0.229, 0.224, 0.225), atol=0.02)
    assert noise.min() < 0 and noise.max() > 1  # Not cut off, as in timm.


def test_the_ratio_is_height_by_width():
    op = RandomErasing(p=1.0, area=(0.1, 0.2), ratio=(1.5, 2.0))
    erased, _, _, height, width = boxes(op, 200)
    assert erased.all()
    assert (height / width > 1.4).all() and (height / width < 2.1).all()

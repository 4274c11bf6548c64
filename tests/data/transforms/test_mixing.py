import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from vit_jax.data.transforms.mixing import Cutmix, Mixup, MixupOrCutmix

B, H, W, K = 6, 31, 47, 5
KEY = jax.random.key(3)


def batch():
    # Constant images: a pixel tells which example it is of.
    images = (
        np.zeros((B, H, W, 3), np.uint8) + np.arange(10, 10 + B)[:, None, None, None]
    )
    labels = jnp.eye(K, dtype=jnp.float32)[np.array([0, 1, 2, 3, 4, 1])]
    return jnp.asarray(images, jnp.uint8), labels


# Compiled once for all tests: it takes longer than anything else here.
jitted = functools.cache(jax.jit)


def at(first):
    return first + jnp.arange(B, dtype=jnp.uint32)


def steps(op, count):
    """Mixes the batch at some steps."""
    images, labels = batch()
    for step in range(count):
        out = jitted(op)(images, labels, at(step * B), KEY)
        yield tuple(map(np.asarray, out))


def crops(natural):
    """A batch of parts of photographs."""
    places = [(0, 0), (50, 90), (100, 20), (70, 150), (110, 100), (30, 60)]
    parts = [natural[i % 2][y : y + H, x : x + W] for i, (y, x) in enumerate(places)]
    return np.stack(parts)


def shares(op, count=2000):
    """Draws the label's share of the example itself for many steps."""
    images, labels = jnp.zeros((2, H, W, 1)), jnp.eye(2)
    draw = lambda i: op(images, labels, jnp.stack([i, i + 1]), KEY)[1][0, 0]
    return np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(count, dtype=jnp.uint32)))


def test_cutmix_weighs_labels_by_the_exact_shares_of_pixels():
    images, labels = map(np.asarray, batch())
    for mixed, soft in steps(Cutmix(1.0), 9):
        own = mixed == images
        neighbour = mixed == np.roll(images, 1, axis=0)
        assert (own | neighbour).all()
        share = own[0, ..., 0].sum() / (H * W)
        expected = share * labels + (1 - share) * np.roll(labels, 1, axis=0)
        np.testing.assert_allclose(soft, expected, atol=1e-7)
        # What comes from the neighbour is one rectangle, the same for all.
        assert (neighbour == neighbour[:1]).all()
        rows, columns = np.nonzero(neighbour[0, ..., 0])
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)


@pytest.mark.parametrize(
    "op", [Mixup(1.0), Cutmix(), pytest.param(MixupOrCutmix(), marks=pytest.mark.slow)]
)
def test_copies_of_an_image_are_no_partners(op):
    # Three in a row, as `data.repeats` makes them; beside them every image mixes.
    images, labels = batch()
    copies = jnp.repeat(images[:2], 3, axis=0), jnp.repeat(labels[:2], 3, axis=0)
    mix = jitted(op.apart(3))
    for step in range(9):
        out, soft = mix(*copies, at(step * B), KEY)
        share = soft[0, 0]
        np.testing.assert_allclose(
            soft, share * copies[1] + (1 - share) * copies[1][::-1]
        )
        if 0.01 < share < 0.99:
            assert np.ptp(np.asarray(out)) > 0
            break
    else:
        pytest.fail("no step mixes")


def test_cutmix_draws_boxes_as_its_paper_does():
    def paper(rng):
        side = np.sqrt(1 - rng.beta(0.7, 0.7))
        h, w = int(H * side), int(W * side)
        y, x = rng.integers(H), rng.integers(W)
        part = np.zeros((H, W), bool)
        top, left = y - h // 2, x - w // 2
        part[max(top, 0) : max(top + h, 0), max(left, 0) : max(left + w, 0)] = True
        return 1 - part.mean()

    rng = np.random.default_rng(0)
    expected = [paper(rng) for _ in range(2000)]
    assert stats.ks_2samp(shares(Cutmix(0.7)), expected).pvalue > 0.001


def test_mixup_weighs_images_and_labels_alike_on_photographs(natural):
    images, labels = crops(natural), batch()[1]
    mixed, soft = jitted(Mixup(2.0))(jnp.asarray(images), labels, at(0), KEY)
    share = float(soft[1, 1])
    assert 0.05 < share < 0.95
    for before, after, atol in (
        (images.astype(float), mixed, 1e-4),
        (labels, soft, 1e-6),
    ):
        expected = share * before + (1 - share) * np.roll(before, 1, axis=0)
        np.testing.assert_allclose(after, expected, atol=atol)


def test_mixup_shares_are_beta_distributed():
    assert stats.kstest(shares(Mixup(0.8)), stats.beta(0.8, 0.8).cdf).pvalue > 0.001


def test_mixup_or_cutmix_is_one_of_them_a_batch():
    kinds = []
    for mixed, soft in steps(MixupOrCutmix(0.8, 1.0, switch=0.3), 60):
        values = np.unique(mixed[1])
        kinds.append(np.isin(values, (10, 11)).all())
        # Both ways the mean pixel says the label's share.
        np.testing.assert_allclose(mixed[1].mean(), 10 + soft[1, 1], atol=1e-4)
        np.testing.assert_allclose(soft.sum(1), 1, atol=1e-6)
    assert stats.binomtest(sum(kinds), 60, 0.3).pvalue > 0.001


def test_groups_of_images_are_mixed_as_those_of_one_gpu():
    """timm draws on each GPU: one way and share for its images, another on the next."""
    labels = np.asarray(batch()[1])
    kinds = []
    for mixed, soft in steps(MixupOrCutmix(0.8, 1.0, switch=0.3, group=4), 40):
        partners = np.roll(labels, 1, axis=0)
        share = ((soft - partners) * labels).sum(1)
        np.testing.assert_allclose(share[:4], share[0], atol=1e-6)
        np.testing.assert_allclose(share[4], share[5], atol=1e-6)
        assert abs(share[0] - share[4]) > 1e-6
        kinds += [np.isin(mixed[i], (9 + i, 10 + i)).all() for i in (1, 5)]
        np.testing.assert_allclose(mixed[5].mean(), 14 + share[5], atol=1e-4)
    assert stats.binomtest(sum(kinds), 80, 0.3).pvalue > 0.001


@pytest.mark.parametrize(
    "op",
    [
        Mixup(2.0),
        Cutmix(1.0),
        pytest.param(MixupOrCutmix(0.8, 1.0, switch=0.3), marks=pytest.mark.slow),
    ],
)
def test_the_draw_is_a_function_of_the_step_and_the_key(op):
    images, labels = batch()
    cases = (12, KEY), (12, KEY), (12 + B, KEY), (12, jax.random.key(4))
    once, again, later, other = (
        jitted(op)(images, labels, at(first), key)[1].tolist() for first, key in cases
    )
    assert once == again
    assert once != later
    assert once != other

"""Hashes, search and alignment, on the two photographs inside scikit-learn."""

import itertools
import sys

import cv2
import numpy as np
import pytest
import scipy.fft
from PIL import Image
from sklearn.datasets import load_sample_images

from vit_jax.data import decode
from vit_jax.errors import UserError
from vit_jax.tools.near_duplicates import matching

S = matching.SIDE


@pytest.fixture(scope="module")
def photographs():
    """Different views, 150x163, of the two photographs of scikit-learn."""
    views = [
        image[y : y + 150, x : x + 163]
        for image in load_sample_images().images
        for y in (0, 131, 277)
        for x in (0, 111, 234, 355, 477)
    ]
    # A cloudless sky has no detail by which to know it.
    steps = [
        np.abs(np.diff(matching.make_thumbnail(v).astype(int))).mean() for v in views
    ]
    return [view for view, step in zip(views, steps, strict=True) if step > 3]


@pytest.fixture(scope="module")
def small(photographs):
    return np.stack([matching.make_thumbnail(image) for image in photographs])


def differing(a, b):
    return int(np.bitwise_count(a ^ b).sum())


def area_means(pixels):
    """Shrinks the first axis to S pixels, each the mean over its share of it."""
    sums = np.concatenate([np.zeros((1, pixels.shape[1])), np.cumsum(pixels, 0)])
    edges = np.linspace(0, len(pixels), S + 1)
    at = [np.interp(edges, np.arange(len(sums)), column) for column in sums.T]
    return np.diff(np.stack(at, 1), axis=0) * S / len(pixels)


def test_a_thumbnail_is_the_antialiased_grey_image(photographs, encode):
    for image in photographs[::4]:
        grey = np.asarray(Image.fromarray(image).convert("L"))
        wanted = area_means(area_means(grey).T).T
        jpeg = encode(np.kron(image, np.ones((3, 3, 1), np.uint8)), "JPEG", quality=97)
        for given in (image, encode(image, "PNG")):
            found = matching.make_thumbnail(given)
            assert (found.shape, found.dtype) == ((S, S), np.uint8)
            assert np.abs(found - wanted).mean() < 0.6  # Grey values of 255.
        # It is decoded at a quarter of its size, by another low-pass.
        two = np.stack([found, matching.make_thumbnail(jpeg)])
        one, other = matching.hash_windows(two, (matching.WHOLE,))
        assert differing(one, other) <= 6


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 999, 3), (999, 2, 1), (63, 65, 3)])
def test_every_size_has_a_thumbnail(shape, encode):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert matching.make_thumbnail(pixels).shape == (S, S)
    for format in ("PNG", "JPEG"):
        picture = pixels[..., 0] if shape[-1] == 1 else pixels
        assert matching.make_thumbnail(encode(picture, format)).shape == (S, S)


def test_damaged_files_have_no_thumbnail(photographs, encode):
    whole = encode(photographs[0], "JPEG")
    for data in (b"", b"GIF89a", whole[:2000], encode(photographs[0], "PNG")[:-50]):
        with pytest.raises(decode.DamagedImage, match="is empty|cannot be decoded"):
            matching.make_thumbnail(data)


def test_the_hash_of_a_whole_image_has_the_signs_of_its_cosine_transform(small):
    found = matching.hash_windows(small, (matching.WHOLE,))[:, 0]
    rows, columns = np.divmod(np.arange(16 * 16), 16)
    lowest = sorted(range(256), key=lambda i: (rows[i] ** 2 + columns[i] ** 2, i))
    for pixels, ours in zip(small, found, strict=True):
        waves = scipy.fft.dctn(pixels.astype(float))
        wanted = waves[rows[lowest], columns[lowest]][1:129] > 0
        # A wave that is about zero may round to either side.
        assert (np.unpackbits(ours).astype(bool) != wanted).sum() <= 1


def test_a_hash_through_a_window_is_that_of_the_crop(photographs):
    for image in photographs[::7]:
        exact = image[:150, :150]
        whole = matching.make_thumbnail(exact)[None]
        for top, left in ((0, 0), (6, 12), (12, 0)):
            crop = exact[top : top + 138, left : left + 138]
            crop = matching.make_thumbnail(crop)[None]
            y, x = top / 150, left / 150
            window = (y, y + 0.92, x, x + 0.92)
            (through,) = matching.hash_windows(whole, (window,))[0]
            (of_crop,) = matching.hash_windows(crop, (matching.WHOLE,))[0]
            assert differing(through, of_crop) <= 5
            assert window[0] > 0 or window[2] > 0 or window in matching.WINDOWS


def test_the_search_finds_all_within_the_distance_and_nothing_else(small):
    index = matching.Index()
    assert index.candidates(small) == []
    index.add(small[:17], np.arange(17))
    assert index.candidates(small[:0]) == []
    index.add(small[17:], np.arange(17, len(small)))
    assert len(index) == len(small)
    shifted = np.roll(small, 1, axis=2)
    found = {(c.query, c.indexed): c.distance for c in index.candidates(shifted)}

    both = np.stack([small, small[:, :, ::-1]], 1).reshape(-1, S, S)
    theirs = matching.hash_windows(both, matching.WINDOWS).reshape(
        len(small), 2, 10, 16
    )
    ours = matching.hash_windows(shifted, matching.WINDOWS)
    wanted = {}
    for i, j in itertools.product(range(len(small)), repeat=2):
        parts = [differing(ours[i, 0], h) for h in theirs[j].reshape(-1, 16)]
        wholes = [differing(q, h) for q in ours[i, 1:] for h in theirs[j, :, 0]]
        if (nearest := min(parts + wholes)) <= matching.DISTANCE:
            wanted[i, j] = nearest
    assert found == wanted
    assert {(i, i) for i in range(len(small))} <= found.keys()


def test_a_candidate_tells_how_the_images_lie(small):
    index = matching.Index()
    index.add(small, np.arange(100, 100 + len(small)))
    mirrored = np.ascontiguousarray(small[3:4, :, ::-1])
    first = index.candidates(mirrored)[0]
    assert first[:5] == (0, 103, 0, True, matching.WHOLE)
    cut = cv2.resize(small[5][5:, 5:], (S, S), interpolation=cv2.INTER_LINEAR)
    first = index.candidates(cut[None])[0]
    assert (first.indexed, first.flipped, first.query_is_larger) == (105, False, False)
    assert first.window == pytest.approx((0.08, 1.0, 0.08, 1.0))
    index = matching.Index()
    index.add(cut[None], np.array([7]))
    first = index.candidates(small[5:6])[0]
    assert (first.indexed, first.flipped, first.query_is_larger) == (7, False, True)


def test_a_machine_without_faiss_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[dedup\]' in the clone"):
        matching.Index()


def test_a_crop_fits_on_its_image_and_on_no_other(photographs, small):
    for i, image in enumerate(photographs):
        part = matching.make_thumbnail(image[3:143, 11:162])  # Off the windows' grid.
        window = matching.WINDOWS[6]
        assert matching.correlation(part, small[i], window) > matching.CORRELATION
        other = small[(i + 11) % len(small)]
        assert matching.correlation(part, other, window) < 0.5


def test_what_fits_only_far_from_its_window_does_not_count(photographs):
    # The same scene, of which the one shows a part 20 pixels further right.
    image = load_sample_images().images[0]
    one, other = (
        matching.make_thumbnail(image[40:190, x : x + 160]) for x in (100, 120)
    )
    assert matching.correlation(one, one, matching.WHOLE) > 0.999
    assert matching.correlation(one, other, matching.WHOLE) == 0.0
    flat = np.zeros((S, S), np.uint8)
    assert matching.correlation(one, flat, matching.WHOLE) == 0.0

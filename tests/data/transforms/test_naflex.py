"""Images of any size as sequences of patches: the transform, batches and runs."""

import numpy as np
import pytest

from vit_jax.data.transforms import naflex, parse
from vit_jax.errors import UserError

RNG = np.random.default_rng(0)


def image_of(height, width, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def bisected(height, width, patch, most):
    """Returns the grid as transformers' Siglip2ImageProcessor finds it."""

    def sides(scale):
        return [max(1, int(np.ceil(n * scale / patch))) for n in (height, width)]

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        if np.prod(sides(middle)) <= most:
            low = middle
        else:
            high = middle
    return tuple(sides(low))


def test_the_grid_is_the_one_of_the_largest_scale_that_fits():
    rng = np.random.default_rng(0)
    for _ in range(300):
        height, width = rng.integers(20, 3_000, 2).tolist()
        most = int(rng.integers(4, 1_025))
        found = naflex.fitting_grid(height, width, most)
        assert found == bisected(height, width, 16, most)


@pytest.mark.parametrize("size", [(1, 9_000), (9_000, 1), (1, 1), (17, 1_000)])
@pytest.mark.parametrize("most", [1, 7, 256])
def test_any_image_fits(size, most):
    rows, columns = naflex.fitting_grid(*size, most)
    assert rows >= 1 and columns >= 1 and rows * columns <= most


def test_patches_are_those_of_the_resized_image():
    image = image_of(24, 40)
    found = naflex.NaFlex(20, patch=8)(image, RNG)
    assert found["grids"].tolist() == [[3, 5]]
    strip = found["image"].reshape(20, 8, 8, 3)
    for n in range(15):
        y, x = 8 * (n // 5), 8 * (n % 5)
        np.testing.assert_array_equal(strip[n], image[y : y + 8, x : x + 8])
    assert not strip[15:].any()


def test_parts_and_flips_are_random():
    image = image_of(60, 90)
    transform = naflex.NaFlex(16, patch=4, area=(0.2, 0.6), flip=True)
    found = [transform(image, np.random.default_rng(i)) for i in range(8)]
    assert len({f["image"].tobytes() for f in found}) == 8
    same = transform(image, np.random.default_rng(3))
    np.testing.assert_array_equal(same["image"], found[3]["image"])
    whole = naflex.NaFlex(16, patch=4, flip=True)
    grids, seen = [], set()
    for i in range(16):
        one = whole(image, np.random.default_rng(i))
        grids.append(one["grids"].tolist())
        seen.add(one["image"].tobytes())
    assert all(grid == grids[0] for grid in grids) and len(seen) == 2


def test_parts_have_the_shape_of_the_image_times_the_ratio_as_in_timm():
    image, shapes = image_of(90, 360), {}
    for relative in (False, True):
        cut = naflex.NaFlex(900, patch=2, area=(0.1, 0.2), relative=relative)
        grids = [
            cut(image, np.random.default_rng(i))["grids"][0].tolist() for i in range(40)
        ]
        shapes[relative] = [columns / rows for rows, columns in grids]
    # 3/4 to 4/3, of the image's 4; rounding to whole patches adds at most a tenth.
    assert 0.7 < min(shapes[False]) < 0.9 and 1.2 < max(shapes[False]) < 1.45
    assert 2.7 < min(shapes[True]) < 3.4 and 4.8 < max(shapes[True]) < 5.8


@pytest.mark.parametrize(
    "line",
    [
        "naflex(0)",
        "naflex(3, pack=4)",
        "naflex((16, 2), pack=3)",
        "naflex(8, patch=0)",
        "naflex(8, patch=())",
        "naflex(8, side=32)",
        "naflex(side=(32, 0))",
        "naflex(side=31, patch=(16, 32))",
        "naflex(side=4.5)",
    ],
)
def test_bad_arguments_are_refused(line):
    with pytest.raises(UserError, match="naflex"):
        parse.parse_train(line, (32, 32))


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("naflex(12, patch=(4, 8))", [(12, 4), (12, 8)]),
        ("naflex((9, 12), patch=(4, 8))", [(9, 4), (9, 8), (12, 4), (12, 8)]),
        ("naflex(side=24, patch=(4, 8, 10))", [(36, 4), (9, 8), (5, 10)]),
        ("naflex(side=(8, 24), patch=4)", [(4, 4), (36, 4)]),
    ],
)
def test_each_batch_draws_one_of_all_pairs(line, choices):
    (transform,) = parse.parse_train(line, (32, 32)).host
    found, weights = zip(*transform.alternatives(), strict=True)
    assert {*weights} == {1.0}
    assert [(each.max_tokens, each.patch) for each in found] == choices
    shapes = [each.output_shapes(3)["image"] for each in found]
    assert shapes == [(most * patch, patch, 3) for most, patch in choices]
    # The training step is compiled for the one that takes the most memory first.
    most, patch = max(choices)
    assert transform.output_shapes(3)["image"] == (most * patch, patch, 3)


def test_images_of_a_fixed_side_keep_their_pixels_whatever_the_patch():
    image = image_of(24, 24)
    for patch in (2, 4, 6, 8, 12):
        found = naflex.NaFlex(side=24, patch=patch)(image, RNG)
        assert found["grids"].tolist() == [[24 // patch] * 2]
        cells = found["image"].reshape(24 // patch, 24 // patch, patch, patch, 3)
        whole = cells.swapaxes(1, 2).reshape(24, 24, 3)
        np.testing.assert_array_equal(whole, image)
    wide = naflex.NaFlex(side=24, patch=4)(image_of(30, 120), RNG)
    assert wide["grids"].tolist() == [[3, 12]]


def test_evaluation_takes_it_without_random_choices():
    (transform,) = parse.parse_eval("naflex(64, patch=8)", (32, 32))
    assert transform.max_tokens == 64
    several = "naflex((16, 64))", "naflex(64, patch=(8, 16))", "naflex(side=(64, 96))"
    for line in ("naflex(64, flip=True)", "naflex(64, pack=2)", *several):
        with pytest.raises(UserError, match="naflex"):
            parse.parse_eval(line, (32, 32))

import csv
import io

import numpy as np
import pytest

from vit_jax.evaluators import result_tables
from vit_jax.evaluators.protocol import Confusion

COUNTS = np.array([[7, 0, 1], [2, 2, 0], [0, 0, 0]])


def test_numbers_are_a_table_with_a_row_for_each_true_class():
    text = result_tables.confusion_to_csv(
        Confusion(COUNTS, ("ant", "bee, wild", "cat"))
    )
    rows = list(csv.reader(io.StringIO(text)))
    assert rows == [
        ["class", "examples", "accuracy", "ant", "bee, wild", "cat"],
        ["ant", "8", "0.875000", "7", "0", "1"],
        ["bee, wild", "4", "0.500000", "2", "2", "0"],
        ["cat", "0", "", "0", "0", "0"],
    ]


def test_classes_without_names_are_numbered():
    found = Confusion(COUNTS)
    assert found.name(2) == "class 2"
    np.testing.assert_array_equal(found.accuracies, [7 / 8, 0.5, np.nan])


@pytest.mark.parametrize("classes", [2, 37, 90, 700])
def test_the_darkest_cells_of_the_picture_are_the_largest_parts(classes):
    rng = np.random.default_rng(0)
    counts = np.diag(rng.integers(50, 60, classes))
    counts[1, 0] = 100  # Mostly wrong.
    picture = result_tables.draw_confusion(Confusion(counts))
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    cell = min(44, 900 // classes)
    dark = (pixels == (8, 48, 107)).all(-1)  # A class that is always right.
    rows, columns = np.nonzero(dark)
    # All classes but the second, each a square.
    assert len(rows) == pytest.approx((classes - 1) * cell**2, rel=0.15)
    left, top = columns.min(), rows.min()
    middle = pixels[top + cell + cell // 8, left + cell // 8]  # True 1, predicted 0.
    right = pixels[top + cell + cell // 8, left + cell + cell // 8]
    assert middle.sum() < right.sum() < 255 * 3


def test_every_name_and_count_is_within_the_picture():
    names = tuple(f"a name that is much longer than its place {i}" for i in range(5))
    small = result_tables.draw_confusion(Confusion(np.eye(5, dtype=int), names[:5]))
    edges = np.concatenate(
        [np.asarray(small)[:, -4:].ravel(), np.asarray(small)[-4:].ravel()]
    )
    assert (edges == 255).all()

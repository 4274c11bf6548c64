import numpy as np
import pytest

from vit_jax.evaluators import classification
from vit_jax.evaluators.forward_passes import Outputs, Predictions


def outputs(labels, tops, confidence=None, loss=None):
    labels = np.asarray(labels, np.int32)
    N = len(labels)
    predictions = Predictions(
        np.asarray(tops, np.int32),
        np.asarray(confidence or [0.5] * N, np.float32),
        np.asarray(loss or [1.0] * N, np.float32),
    )
    return Outputs(np.arange(N), labels, predictions=predictions)


def test_scores_of_seven_predictions():
    labels = [0, 0, 0, 2, 2, 5, 5]
    tops = [
        [0, 1, 2, 3, 4],
        [1, 0, 2, 3, 4],
        [0, 5, 2, 3, 4],
        [2, 1, 0, 3, 4],
        [5, 1, 0, 3, 4],  # Not among the five.
        [2, 5, 0, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    loss = [0.5, 1.5, 0.25, 1.0, 4.0, 2.0, 3.0]
    metrics, confusion = classification.score(outputs(labels, tops, loss=loss), 6)
    assert metrics["top1"] == pytest.approx(3 / 7)
    assert metrics["top5"] == pytest.approx(5 / 7)
    assert metrics["loss"] == pytest.approx(sum(loss) / 7)
    # Of classes 0, 2 and 5; the others have no example.
    assert metrics["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert (metrics["worst_class_recall"], metrics["examples"]) == (0, 7)
    assert metrics["majority_baseline"] == pytest.approx(3 / 7)
    expected = np.zeros((6, 6), int)
    for true, (first, *_) in zip(labels, tops, strict=True):
        expected[true, first] += 1
    np.testing.assert_array_equal(confusion.counts, expected)
    assert confusion.counts[0, 1] == 1 != confusion.counts[1, 0]


def test_of_five_classes_there_is_no_top_5():
    found = classification.score(outputs([1], [[1, 0, 2, 3, 4]]), 5)
    assert "top5" not in found.metrics
    assert found.confusion.counts.shape == (5, 5)


def test_many_classes_have_no_confusion_matrix():
    found = classification.score(outputs([1], [[1, 0, 2, 3, 4]]), 21_843)
    assert found.confusion is None
    assert found.metrics["top1"] == 1


def test_calibration_error_of_two_bins():
    # Three of four are right at a confidence of 0.9 (and 0.87 in the same bin), one of
    # two at 0.3.
    confidence = np.array([0.9, 0.9, 0.87, 0.9, 0.3, 0.3], np.float32)
    right = np.array([1, 1, 1, 0, 1, 0], bool)
    expected = (abs(3 - 3.57) + abs(1 - 0.6)) / 6
    assert classification.calibration_error(confidence, right) == pytest.approx(
        expected, abs=1e-6
    )


def test_bins_are_open_below_and_closed_above():
    # 1/15 ends the first bin; 0 and 1 have bins too. In one bin the errors would
    # cancel each other.
    edge = np.array([1 / 15, np.nextafter(1 / 15, 1)])
    right = np.array([True, False])
    expected = (14 / 15 + 1 / 15) / 2
    assert classification.calibration_error(edge, right) == pytest.approx(expected)
    both = np.array([0.0, 1.0])
    assert classification.calibration_error(both, right) == 1.0


def test_answers_of_a_part_of_the_classes():
    allowed = (1, 4, 5, 6, 8, 9)
    restricted = Predictions(
        np.array([[4, 1, 5, 6, 8], [9, 6, 1, 5, 8], [1, 9, 4, 5, 6]]),
        np.array([0.5, 0.25, 0.75], np.float32),
        np.array([0.5, 1.0, 3.0], np.float32),
    )
    found = outputs([4, 6, 8], [[0, 4, 2, 3, 7]] * 3).replace(restricted=restricted)
    names = tuple("abcdefghij")
    metrics, confusion = classification.score(found, 10, allowed, names)
    assert confusion.class_names == tuple("befgij")
    assert (metrics["top1"], metrics["top5"]) == pytest.approx((1 / 3, 2 / 3))
    assert (metrics["loss"], metrics["classes"]) == (1.5, 6)
    assert confusion.counts.shape == (6, 6)
    rows = {(4, 4), (6, 9), (8, 1)}
    expected = {(allowed.index(true), allowed.index(best)) for true, best in rows}
    assert set(zip(*np.nonzero(confusion.counts), strict=True)) == expected
    everything = classification.score(found, 10)
    assert everything.metrics["top1"] == 0
    assert everything.confusion.counts.shape == (10, 10)

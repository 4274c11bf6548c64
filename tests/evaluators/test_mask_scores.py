"""Scores of masks: as scikit-learn counts them, and each pixel of a split once."""

import dataclasses

import numpy as np
import pytest
from sklearn import metrics

from vit_jax.config import loading
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.evaluators import segmentation
from vit_jax.evaluators.segmentation import SegmentationConfig, confusion, score
from vit_jax.evaluators.splits import EvalSplits

CLASSES = 4


def maps(seed=0, count=3):
    rng = np.random.default_rng(seed)
    sizes = [(8, 12), (5, 7), (20, 3)][:count]
    labels = [rng.integers(-1, CLASSES - 1, size) for size in sizes]  # None of class 3.
    predicted = [rng.integers(0, CLASSES - 1, size) for size in sizes]
    return labels, predicted


def test_scores_are_those_of_scikit_learn_on_all_pixels():
    labels, predicted = maps()
    counts = sum(
        confusion(one, other, CLASSES)
        for one, other in zip(labels, predicted, strict=True)
    )
    true, found = (np.concatenate([x.ravel() for x in y]) for y in (labels, predicted))
    counted = true >= 0
    true, found = true[counted], found[counted]
    np.testing.assert_array_equal(
        counts, metrics.confusion_matrix(true, found, labels=range(CLASSES))
    )
    scored = score(counts, 3, names=("a", "b", "c", "d")).metrics
    iou = metrics.jaccard_score(true, found, average=None, labels=range(3))
    assert scored["miou"] == pytest.approx(iou.mean())  # Class 3 is nowhere.
    assert [scored[f"iou/{name}"] for name in "abc"] == pytest.approx(iou.tolist())
    assert "iou/d" not in scored
    assert scored["pixel_accuracy"] == pytest.approx(
        metrics.accuracy_score(true, found)
    )
    expected = metrics.balanced_accuracy_score(true, found)
    assert scored["mean_accuracy"] == pytest.approx(expected)
    most = np.bincount(true).max() / len(true)
    assert scored["majority_baseline"] == pytest.approx(most)


def test_a_class_that_is_predicted_and_does_not_occur_counts():
    labels = np.zeros((2, 3), int)
    predicted = np.array([[0, 0, 3], [0, 0, 0]])
    scored = score(confusion(labels, predicted, CLASSES), 1).metrics
    assert scored["miou"] == pytest.approx((5 / 6 + 0) / 2)
    assert scored["iou/3"] == 0 and scored["mean_accuracy"] == pytest.approx(5 / 6)


def test_masks_without_a_class_are_refused():
    with pytest.raises(UserError, match=r"data\.ignore_label"):
        score(np.zeros((3, 3), np.int64), 5)


class Source:
    """Images whose first band is the class of each pixel; two are damaged."""

    class_names, images, labels, class_colors = ("a", "b", "c", "d"), None, None, ()

    def __init__(self, damaged=()):
        self.damaged = damaged

    def __len__(self):
        return 7

    def __getitem__(self, i):
        if i in self.damaged:
            raise OSError("no such file")
        rng = np.random.default_rng(i)
        size = 16 + 5 * i, 40 - 3 * i
        mask = np.repeat(np.repeat(rng.integers(0, CLASSES, (4, 4)), 12, 0), 12, 1)
        mask = mask[: size[0], : size[1]].astype(np.uint8)
        image = np.repeat(mask[..., None] * 60, 3, -1)
        mask[0, 0] = 255
        return {"image": image, "mask": mask}

    def describe(self, i):
        return f"made {i}"


def opened(source, eval_transform="", **keys):
    data = DataConfig(
        name="made:Source",
        image_size=(16, 16),
        num_classes=CLASSES,
        mask_key="mask",
        eval_transform=eval_transform,
        on_error="skip",
    )
    splits = EvalSplits(data)
    splits.open = lambda *args, **options: segmentation.EvalSplit(
        "val", source, data, None
    )
    config = loading.complete(SegmentationConfig, {"kind": "segmentation", **keys})
    return config.open("val", splits)


def by_pixel(windows):
    shades = windows[..., :1].astype(np.float32) / 60
    return -np.abs(shades - np.arange(CLASSES))


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("keys", [{}, {"resize": "none", "overlap": 0.0}])
def test_each_pixel_of_each_image_is_counted_once(keys, batch_size):
    source = Source(damaged=(2, 5))
    evaluator = opened(source, **keys)
    scored = evaluator.score_images(by_pixel, batch_size, lambda: False)
    pixels = [
        (source[i]["mask"] != 255).sum() for i in range(7) if i not in source.damaged
    ]
    assert scored.confusion.counts.sum() == sum(pixels)
    assert scored.metrics["examples"] == 5 and scored.metrics["skipped"] == 2
    if keys:  # Nothing is resized: a network that sees the class is right everywhere.
        assert scored.metrics["miou"] == 1
        assert scored.metrics["pixel_accuracy"] == 1
    assert scored.confusion.class_names == source.class_names


def test_windows_are_resized_with_the_filter_of_evaluations():
    shades = set()

    def segment(windows):
        shades.update(windows.flat)
        return by_pixel(windows)

    line = "resize(interpolation='nearest')"
    evaluator = opened(Source(), line, resize="whole")
    assert evaluator.score_images(segment, 2, lambda: False)
    assert shades == {0, 60, 120, 180}  # No filter has mixed them.


def test_a_stop_ends_it():
    calls = []
    evaluator = opened(Source())
    stop = lambda: calls.append(0) or len(calls) > 3
    assert evaluator.score_images(by_pixel, 2, stop) is None


def test_a_damaged_image_ends_it_unless_the_config_says_to_skip():
    evaluator = opened(Source(damaged=(1,)))
    split = evaluator.passes[0].split
    split.data = dataclasses.replace(split.data, on_error="raise")
    with pytest.raises(UserError, match="made 1"):
        evaluator.score_images(by_pixel, 2, lambda: False)

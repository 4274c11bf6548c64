"""Calibration: temperature, thresholds and prediction sets, on draws of a known model."""

import json

import numpy as np
import pytest
from scipy import special

from vit_jax.errors import UserError
from vit_jax.evaluators import calibration, prediction
from vit_jax.evaluators.calibration import Outputs, What
from vit_jax.weights.calibration import Calibration

K = 5
ONE = What(sigmoid=False, several=False)
SEVERAL = What(sigmoid=True, several=True)


def drawn(rng, count, scale=1.0):
    """Logits whose softmax, divided by `scale`, is the probability of each class."""
    logits = rng.normal(size=(count, K)) * 1.5
    draws = rng.random((count, 1))
    labels = (special.softmax(logits, 1).cumsum(1) < draws).sum(1).clip(0, K - 1)
    return Outputs(scale * logits, np.eye(K, dtype=int)[labels])


def drawn_tags(rng, count, scale=1.0, bias=0.0):
    logits = rng.normal(size=(count, K)) - [0, 1, 2, 3, 4]
    labels = (rng.random((count, K)) < special.expit(logits)).astype(int)
    return Outputs(scale * logits + bias, labels)


def test_the_temperature_is_the_scale_of_the_logits():
    rng = np.random.default_rng(0)
    for scale in (0.3, 1.0, 4.0):
        temperature, bias = calibration.fit_scale(
            drawn(rng, 20_000, scale), sigmoid=False
        )
        assert temperature == pytest.approx(scale, rel=0.05) and bias == 0
    outputs = drawn_tags(rng, 20_000, 2.0, 1.5)
    temperature, bias = calibration.fit_scale(outputs, sigmoid=True)
    assert temperature == pytest.approx(2, rel=0.05)
    assert bias == pytest.approx(-0.75, abs=0.05)
    # Without a mistake the likelihood has no maximum; the temperature is finite.
    right = np.eye(K)[np.arange(40) % K]
    temperature, _ = calibration.fit_scale(Outputs(right, right), sigmoid=False)
    assert 0.05 < temperature < 1


def test_the_error_has_bins_of_equal_numbers():
    rng = np.random.default_rng(0)
    p = rng.random(40_000) ** 3  # Most of them are near 0.
    right = rng.random(len(p)) < p
    assert calibration.equal_mass_error(p, right) < 0.01
    assert calibration.equal_mass_error(p, rng.random(len(p)) < p / 2) == pytest.approx(
        p.mean() / 2, abs=0.01
    )
    # By hand: two bins of ten, with means of 0.2 and 0.8.
    p, right = np.repeat([0.2, 0.8], 10), np.arange(20) >= 15
    assert calibration.equal_mass_error(p, right) == pytest.approx((0.2 + 0.3) / 2)


def test_calibration_lowers_the_error_on_images_it_was_not_fitted_on():
    rng = np.random.default_rng(1)
    fitted, test = drawn(rng, 500, 4.0), drawn(rng, 2_000, 4.0)
    for measured in (
        calibration.measure(fitted, test, ONE),
        calibration.measure(fitted, None, ONE),
    ):
        (before, after), (loss, lower) = measured["ece"], measured["loss"]
        assert after < 0.5 * before and lower < loss
    assert measured["images"] == 500
    # The loss is that of the calibrated logits.
    found = calibration.fit(fitted, ONE)
    p = found.probabilities(test.logits)[test.labels > 0]
    measured = calibration.measure(fitted, test, ONE)
    assert measured["loss"][1] == pytest.approx(-np.log(p).mean())


@pytest.mark.parametrize("what", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize(("count", "coverage"), [(40, 0.8), (100, 0.9), (39, 0.95)])
def test_sets_cover_as_they_say_over_many_draws(what, count, coverage):
    rng, covered = np.random.default_rng(2), []
    draw = drawn_tags if what.several else drawn
    for _ in range(400):
        calibrated, test = draw(rng, count), draw(rng, 50)
        # A fixed temperature: with one, the images would be used twice.
        scores = calibration.conformal_scores(
            Calibration(sigmoid=what.sigmoid).probabilities(calibrated.logits),
            calibrated.labels,
        )
        found = Calibration(sigmoid=what.sigmoid, scores=tuple(scores))
        p = found.probabilities(test.logits)
        sets = calibration.prediction_sets(p, found.smallest_probability(coverage))
        labelled = (test.labels > 0).any(1)
        covered.append(((test.labels > 0) <= sets).all(1)[labelled].mean())
    mean, error = np.mean(covered), np.std(covered) / np.sqrt(len(covered))
    least = len(scores) if what.several else count
    # At least the coverage, and at most 1 / (n + 1) more.
    assert coverage - 3 * error < mean < coverage + 1 / (least + 1) + 3 * error


def test_a_coverage_needs_enough_images():
    found = Calibration(scores=tuple(np.linspace(0, 0.9, 9)))
    assert found.smallest_probability(0.9) == pytest.approx(0.1)  # The ninth of nine.
    assert found.smallest_probability(0.5) == pytest.approx(1 - 0.45)
    with pytest.raises(UserError, match=r"coverage=0.95: 9 images.*at most 0.9"):
        found.smallest_probability(0.95)
    with pytest.raises(UserError, match=r"coverage=0.9: the model has no calibrated"):
        Calibration().smallest_probability(0.9)


def test_thresholds_have_the_best_f1_of_all():
    rng = np.random.default_rng(3)
    outputs = drawn_tags(rng, 300)
    p = Calibration(sigmoid=True).probabilities(outputs.logits)
    found = calibration.best_thresholds(p, outputs.labels)
    f1 = lambda k, t: (
        2
        * ((p[:, k] >= t) & (outputs.labels[:, k] > 0)).sum()
        / ((p[:, k] >= t).sum() + outputs.labels[:, k].sum())
    )
    for k in range(K):
        assert f1(k, found[k]) == max(f1(k, t) for t in np.unique(p[:, k]))
    # Rare classes share the threshold that is best for all labels together.
    few = outputs.labels.copy()
    few[:, :2] = 0
    few[:3, 0] = 1
    found = calibration.best_thresholds(p, few)
    assert found[0] == found[1] and len({*found}) >= 3
    assert calibration.best_thresholds(p, 0 * few) == (0.5,) * K
    measured = calibration.measure(outputs, drawn_tags(rng, 2_000), SEVERAL)
    for name in ("micro_f1", "macro_f1"):
        assert measured[name][1] > measured[name][0]


def test_decisions_choose_the_classes_of_an_image():
    logits, names = np.array([2.0, 1.0, 0.0]), ("a", "b", "c")
    decisions = Calibration(temperature=2.0)
    best = prediction.rank(logits, names, 2, sigmoid=False, decisions=decisions)
    expected = special.softmax(logits / 2)
    assert [one.probability for one in best] == pytest.approx(expected[:2].tolist())
    how = {"sigmoid": True, "threshold": (0.9, 0.7, 0.4)}
    best = prediction.rank(logits, names, 5, **how)
    assert [one.name for one in best] == ["b", "c"]
    how = {"sigmoid": False, "threshold": 0.99, "at_least": 1}
    assert [one.name for one in prediction.rank(logits, names, 5, **how)] == ["a"]


def test_decisions_are_stored_as_json():
    outputs = drawn_tags(np.random.default_rng(4), 60)
    found = calibration.fit(outputs, SEVERAL)
    text = json.dumps(found.to_json())
    assert Calibration.of_json(json.loads(text)) == found
    assert Calibration.of_json({**json.loads(text), "later": 1}) == found


def test_cross_fitting_keeps_groups_together():
    rng = np.random.default_rng(6)
    groups = rng.integers(0, 7, 60)
    outputs = drawn(rng, 60)._replace(groups=groups)
    parts = calibration._parts(outputs)
    assert len({*parts}) == 5
    assert all(len({*parts[groups == one]}) == 1 for one in range(7))
    alone = calibration._parts(outputs._replace(groups=np.zeros(60)))
    assert sorted(np.bincount(alone)) == [12] * 5
    assert calibration.measure(outputs, None, ONE)["images"] == 60


def test_calibrated_parameters_have_calibrated_logits():
    rng = np.random.default_rng(7)
    features = rng.normal(size=(9, 4))
    head = {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)}
    found = Calibration(temperature=1.7, bias=-0.4)
    scaled = found.in_params({"head": head, "other": 1})
    logits, other = (
        features @ one["kernel"] + one["bias"] for one in (head, scaled["head"])
    )
    np.testing.assert_allclose(other, found.scale(logits))
    assert scaled["other"] == 1 and Calibration().in_params(head) is head

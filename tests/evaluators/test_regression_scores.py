"""Scores of predicted numbers against scikit-learn and SciPy, and ridge regression."""

import numpy as np
import pytest
from scipy import stats
from sklearn import linear_model, metrics

from vit_jax.evaluators import numbers, ridge
from vit_jax.evaluators.regression import resampled_counts, score
from vit_jax.models.targets import Decoded, Targets

N = 157


def targets(*names, loss="mse", levels=()):
    ones = (1.0,) * len(names)
    return Targets(names, ("",) * len(names), loss, ones, ones, levels)


def drawn(seed=0):
    """Returns predictions and true values of two targets, of which some are missing."""
    rng = np.random.default_rng(seed)
    truth = rng.normal((1e6, 2.0), (10.0, 0.5), (N, 2))
    predicted = truth + rng.normal(0, (4.0, 0.3), (N, 2))
    truth[::7, 1] = np.nan
    return predicted, truth


def test_scores_are_those_of_scikit_learn_and_scipy():
    predicted, truth = drawn()
    found = score(Decoded(predicted), truth, targets("age", "kg"), 200).metrics
    for t, name in enumerate(("age", "kg")):
        known = ~np.isnan(truth[:, t])
        pair = truth[known, t], predicted[known, t]
        expected = {
            "mae": metrics.mean_absolute_error(*pair),
            "rmse": metrics.root_mean_squared_error(*pair),
            "r2": metrics.r2_score(*pair),
            "spearman": stats.spearmanr(*pair).statistic,
            "values": known.sum(),
        }
        for metric, value in expected.items():
            assert found[f"{metric}/{name}"] == pytest.approx(value, rel=1e-6), metric
    assert found["r2"] == pytest.approx((found["r2/age"] + found["r2/kg"]) / 2)
    assert found["examples"] == N


def test_intervals_are_those_of_scipys_bootstrap():
    predicted, truth = drawn()
    pair = truth[:, 0], predicted[:, 0]
    found = score(
        Decoded(predicted[:, :1]), truth[:, :1], targets("age"), 4_000
    ).metrics
    for name, function in (
        ("mae", metrics.mean_absolute_error),
        ("r2", metrics.r2_score),
        ("spearman", lambda a, b: stats.spearmanr(a, b).statistic),
    ):
        expected = stats.bootstrap(
            pair,
            function,
            paired=True,
            vectorized=False,
            n_resamples=1_000,
            method="percentile",
            rng=np.random.default_rng(1),
        ).confidence_interval
        width = expected.high - expected.low
        assert found[f"{name}_low"] == pytest.approx(expected.low, abs=width / 8)
        assert found[f"{name}_high"] == pytest.approx(expected.high, abs=width / 8)
    same = [next(resampled_counts(N, 30)) for _ in range(2)]
    np.testing.assert_array_equal(*same)


def test_ranks_are_those_of_each_resample():
    rng = np.random.default_rng(4)
    truth = rng.integers(0, 4, 11).astype(float)  # With ties.
    predicted = truth + rng.integers(-2, 3, 11)
    found = score(Decoded(predicted[:, None]), truth[:, None], targets("age"), 300)
    drawn = []
    for counts in np.concatenate([*resampled_counts(11, 300)]).astype(int):
        pair = np.repeat(truth, counts), np.repeat(predicted, counts)
        drawn.append(stats.spearmanr(*pair).statistic if min(map(np.ptp, pair)) else 0)
    expected = np.percentile(drawn, (2.5, 97.5))
    ends = [found.metrics[f"spearman_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize(("scale", "offset"), [(1e-12, 0), (1e20, 0), (1e-3, 1e6)])
def test_r2_does_not_depend_on_the_unit(scale, offset):
    predicted, truth = (x[:, 1:] for x in drawn())
    known = score(Decoded(predicted), truth, targets("age"), 100).metrics
    other = (scale * x + offset for x in (predicted, truth))
    found = score(Decoded(next(other)), next(other), targets("age"), 100).metrics
    for name in ("r2", "r2_low", "spearman", "spearman_high"):
        assert found[name] == pytest.approx(known[name], rel=1e-4), name
    constant = np.full((7, 1), 123456789.1)  # Its mean is rounded.
    assert score(Decoded(constant + 1), constant, targets("age")).metrics["r2"] == 0


def test_levels_have_kappa_coverage_and_a_confusion_matrix():
    rng = np.random.default_rng(0)
    truth = rng.integers(1, 6, N).astype(float)
    predicted = np.clip(truth + rng.integers(-1, 2, N), 1, 5)
    decoded = Decoded(*(x[:, None] for x in (predicted, predicted - 1, predicted)))
    about = targets("grade", loss="ordinal", levels=(1.0, 2.0, 3.0, 4.0, 5.0))
    found, confusion = score(decoded, truth[:, None], about)
    expected = metrics.cohen_kappa_score(truth, predicted, weights="quadratic")
    assert found["qwk"] == pytest.approx(expected)
    inside = (predicted - 1 <= truth) & (truth <= predicted)
    assert found["coverage"] == pytest.approx(inside.mean())
    np.testing.assert_array_equal(
        confusion.counts, metrics.confusion_matrix(truth, predicted)
    )
    assert confusion.class_names == ("1", "2", "3", "4", "5")


def test_what_is_undefined_is_zero():
    constant = Decoded(np.full((4, 1), 3.0))
    truth = np.array([[1.0], [2.0], [np.nan], [4.0]])
    found = score(constant, truth, targets("age")).metrics
    assert found["spearman"] == 0 and found["examples"] == 3
    assert found["r2"] < 0
    equal = score(constant, np.full((4, 1), 2.0), targets("age")).metrics
    assert (equal["r2"], equal["mae"]) == (0, 1)
    pair = targets("age", "kg"), np.full((4, 2), np.nan)
    pair[1][:, 0] = [1, 2, 3, 4]
    one = score(Decoded(np.ones((4, 2))), pair[1], pair[0]).metrics
    assert one["mae"] == one["mae/age"] == 1.5 and "mae/kg" not in one
    nothing = score(constant, np.full((4, 1), np.nan), targets("age")).metrics
    assert nothing["examples"] == 0


def test_margins_contain_95_percent_of_new_values():
    rng = np.random.default_rng(0)
    errors = rng.normal(size=(400, 1))
    (margin,) = numbers.margins(Decoded(errors), np.zeros((400, 1)))
    assert (np.abs(errors) <= margin).sum() == 381  # Of 401, one of them new.
    assert numbers.margins(Decoded(errors[:18]), np.zeros((18, 1))) is None


@pytest.mark.parametrize("shape", [(60, 7), (12, 31)])
def test_ridge_regression_is_scikit_learns_with_leave_one_out(shape):
    rng = np.random.default_rng(3)
    features = (rng.normal(size=shape) * 5 + 2).astype(np.float32)
    values = features[:, :3].sum(1) + rng.normal(size=len(features))
    strengths = (10.0, 1.0, 0.1, 0.01)
    found = ridge.fit(features, values, strengths)
    mean, std = features.mean(0), features.std(0)
    alphas = np.array(strengths) * len(features)
    known = linear_model.RidgeCV(alphas).fit((features - mean) / std, values)
    assert found.l2 * len(features) == pytest.approx(known.alpha_)
    np.testing.assert_allclose(
        found.predict(features), known.predict((features - mean) / std), rtol=1e-4
    )

import tracemalloc
import types

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.evaluators import fewshot


def made(shots, features, num_classes, seed=0, test=50):
    """Features of another offset and scale each, with classes that can be told."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(num_classes, features))
    scale, offset = rng.uniform(0.1, 5, features), rng.normal(size=features) * 3

    def of(labels):
        noise = rng.normal(size=(len(labels), features))
        return ((centres[labels] + noise) * scale + offset).astype(np.float32)

    train = np.repeat(np.arange(num_classes), shots)
    other = rng.integers(0, num_classes, test)
    return (of(train), train), (of(other), other)


def padded(features, mean, scale):
    whitened = (features - mean) / scale
    return np.pad(whitened, ((0, 0), (0, 1)), constant_values=100.0)


@pytest.mark.parametrize(
    ("shots", "features", "num_classes"),
    # Primal, dual, and the three sizes around where they meet.
    [(25, 17, 5), (3, 41, 7), (4, 29, 7), (4, 28, 7), (4, 27, 7), (1, 13, 3)],
)
@pytest.mark.parametrize("l2", [2.0**10, 2.0**-3])
def test_the_solution_is_that_of_ridge_regression(shots, features, num_classes, l2):
    from sklearn.linear_model import Ridge

    (x, labels), (test, _) = made(shots, features, num_classes)
    solution = fewshot.solve(x, labels, num_classes)
    wide = x.astype(np.float64)
    mean, scale = wide.mean(0), wide.std(0) + 1e-5
    targets = 2.0 * (labels[:, None] == np.arange(num_classes)) - 1
    ridge = Ridge(alpha=l2, fit_intercept=False, solver="svd")
    ridge.fit(padded(wide, mean, scale), targets)
    np.testing.assert_allclose(
        solution.weights(l2), ridge.coef_.T, rtol=1e-4, atol=1e-9
    )
    expected = ridge.predict(padded(test, mean, scale)).argmax(1)
    np.testing.assert_array_equal(solution.predict(test, l2), expected)


def test_one_decomposition_serves_every_strength(monkeypatch):
    calls = []
    eigh = np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda a: calls.append(a.shape) or eigh(a))
    train, test = made(6, 19, 5)
    strengths = [2.0**n for n in range(-3, 14, 2)]
    together = fewshot.accuracies(train, test, 5, strengths)
    assert calls == [(20, 20)]
    alone = [fewshot.accuracies(train, test, 5, [l2])[0] for l2 in strengths]
    np.testing.assert_array_equal(together, alone)
    assert len(set(together)) > 1


def test_blocks_of_rows_change_nothing(monkeypatch):
    train, test = made(6, 19, 5)
    whole = fewshot.solve(*train, 5)
    monkeypatch.setattr(fewshot, "_BLOCK", 70)  # Three rows.
    cut = fewshot.solve(*train, 5)
    np.testing.assert_allclose(cut.weights(8.0), whole.weights(8.0), rtol=1e-9)
    np.testing.assert_array_equal(
        cut.predict(test[0], 8.0), whole.predict(test[0], 8.0)
    )


def test_a_class_without_examples_is_never_predicted():
    (x, labels), (test, _) = made(9, 11, 4)
    kept = labels != 2
    found = fewshot.solve(x[kept], labels[kept], 5).predict(test, 1024.0)
    assert set(found) == {0, 1, 3}


def test_features_that_are_not_finite_are_refused():
    (x, labels), _ = made(2, 5, 3)
    x[3, 1] = np.nan
    with pytest.raises(UserError, match="features are not finite"):
        fewshot.solve(x, labels, 3)


FIRST = [7, 144, 26, 103, 143]  # Of class 0, by seed 0.
LABELS = np.random.default_rng(4).integers(0, 6, 200)


@pytest.mark.parametrize("shots", [1, 5, 11])
def test_a_draw_has_so_many_of_each_class_and_none_twice(shots):
    rows = fewshot.draw(LABELS, shots, seed=3, num_classes=6)
    assert np.bincount(LABELS[rows]).tolist() == [shots] * 6
    assert len(set(rows)) == len(rows)


def test_a_draw_depends_on_its_seed_and_on_nothing_of_other_classes():
    draws = [fewshot.draw(LABELS, 5, seed, 6) for seed in range(9)]
    assert len({tuple(rows) for rows in draws}) == 9
    np.testing.assert_array_equal(draws[3], fewshot.draw(LABELS, 5, 3, 6))
    others = np.where(LABELS < 3, 0, LABELS)  # Classes 1 and 2 join the first.
    both = fewshot.draw(others, 5, 3, 6)
    np.testing.assert_array_equal(both[-15:], draws[3][-15:])
    fewer = fewshot.draw(LABELS, 2, 3, 6).reshape(6, 2)
    np.testing.assert_array_equal(fewer, draws[3].reshape(6, 5)[:, :2])
    # A stream of numpy's that a new release might change is not used.
    assert draws[0][:5].tolist() == FIRST


def test_a_small_class_gives_all_that_it_has():
    labels = np.array([0] * 9 + [1] * 2 + [3])
    rows = fewshot.draw(labels, 5, seed=0, num_classes=4)
    assert np.bincount(labels[rows], minlength=4).tolist() == [5, 2, 0, 1]


def test_memory_is_what_the_solution_says(monkeypatch):
    # A quarter of 21,843 classes and of 1,280 features, so a 16th of what a block holds.
    K, D, block = 5_461, 320, 2**18
    monkeypatch.setattr(fewshot, "_BLOCK", block)
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((K, D), np.float32), np.arange(K)
    tracemalloc.start()
    try:
        solution = fewshot.solve(x, labels, K)
        peaks = [tracemalloc.get_traced_memory()[1]]
        tracemalloc.reset_peak()
        solution.predict(x[:50], 1024.0)
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    stated = 2 * (D + 1) * K + 4 * (D + 1) ** 2 + block
    assert 0.8 < max(peaks) / (8 * stated) < 1.05


def test_classes_of_one_size_draw_other_examples():
    drawn = fewshot.draw(np.repeat([0, 1], 30), 9, seed=3, num_classes=2)
    first, second = drawn[:9], drawn[9:] - 30
    assert {*first.tolist()} != {*second.tolist()}


def test_the_deviation_over_the_draws_is_that_of_a_sample(monkeypatch):
    tops = iter(np.array([[0.2, 0.9], [0.6, 0.8], [0.7, 0.1]]))
    monkeypatch.setattr(fewshot, "accuracies", lambda *_: next(tops))
    config = fewshot.FewShotConfig(shots=(2,), seeds=3, l2=(8.0, 64.0))
    labels = np.repeat([0, 1], 5)
    split = types.SimpleNamespace(labels=labels, num_classes=2)
    found = types.SimpleNamespace(
        features=np.zeros((10, 3)), labels=labels, records=np.arange(10)
    )
    scored = config.score_features(found, found, split, lambda: False).metrics
    assert scored == {
        "2shot": pytest.approx(0.5),
        "2shot_std": pytest.approx(np.sqrt(0.07)),
        "2shot_l2_64": pytest.approx(0.6),
        "2shot_l2_64_std": pytest.approx(np.sqrt(0.19)),
    }

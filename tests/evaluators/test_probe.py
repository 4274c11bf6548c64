import numpy as np
import pytest

from vit_jax.evaluators import probe


def made(examples, seed=0, features=9, num_classes=4, noise=1.5):
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(num_classes, features))
    scale, offset = rng.uniform(0.2, 4, features), rng.normal(size=features)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, examples)
    x = centres[labels] + noise * rng.normal(size=(examples, features))
    return (x * scale + offset).astype(np.float32), labels


@pytest.mark.parametrize("block", [2**24, 4 * 30])
def test_the_path_is_that_of_logistic_regression(block, monkeypatch):
    from sklearn.linear_model import LogisticRegression

    monkeypatch.setattr(probe, "_BLOCK", block)  # The second: 30 rows, filled up.
    x, labels = made(101)
    test, _ = made(200, seed=1)
    mean, scale = x.mean(0), x.std(0) + 1e-5
    strengths = [0.3, 1e-2, 1e-4]
    found = list(probe.path(x, labels, 4, strengths))
    for l2, fitted in zip(strengths, found, strict=True):
        theirs = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-8, max_iter=5000)
        theirs.fit((x - mean) / scale, labels)
        # The loss is a float32 of about 1, so that the search ends where a step would
        # change its last bits: as far from the optimum as this, of slopes of 0.4 to 3.
        # At the weakest strength the loss itself is more curved than l2 says.
        bound = min(np.sqrt(np.finfo(np.float32).eps / l2), 2e-3)
        found_slopes = fitted.slopes * scale[:, None]
        np.testing.assert_allclose(found_slopes, theirs.coef_.T, rtol=0, atol=bound)
        expected = theirs.predict((test - mean) / scale)
        assert (fitted.predict(test) == expected).mean() >= 0.995
    assert np.abs(found[0].slopes).max() < np.abs(found[-1].slopes).max()


def test_a_large_held_out_part_chooses_and_all_examples_are_fitted(monkeypatch):
    monkeypatch.setattr(probe, "_SMALL", 10)
    # Noise and few examples: a strong regularisation is the better.
    x, labels = made(60, features=40, noise=4.0)
    choice = probe.choose(x, labels, 4, l2=(1e-6, 0.3), held_out=0.3)
    held = probe._held_out(labels, 4, 0.3, 0)
    scores = {
        l2: (fitted.predict(x[held]) == labels[held]).mean()
        for l2, fitted in zip(
            (0.3, 1e-6),
            probe.path(x[~held], labels[~held], 4, (0.3, 1e-6)),
            strict=True,
        )
    }
    assert choice.l2 == max(scores, key=scores.get)
    assert choice.top1 == max(scores.values())
    assert len(set(scores.values())) == 2
    (alone,) = probe.path(x, labels, 4, [choice.l2])
    np.testing.assert_allclose(choice.probe.slopes, alone.slopes, rtol=1e-5)


def test_a_small_set_chooses_by_cross_validation():
    # Of the 7 examples that would be held out, every strength has 5 right.
    x, labels = made(60, seed=4, features=30, noise=2.0)
    strengths, sizes = (1.0, 0.1, 1e-2), {"iterations": 60}
    held = probe._held_out(labels, 4, 0.1, 0)
    fits = probe.path(x[~held], labels[~held], 4, strengths, **sizes)
    assert {(fit.predict(x[held]) == labels[held]).sum() for fit in fits} == {5}
    right = np.zeros(3, int)
    for fold in probe._held_out_parts(labels, 4, 0.1, seed=0):
        fits = probe.path(x[~fold], labels[~fold], 4, strengths, **sizes)
        right += [(fit.predict(x[fold]) == labels[fold]).sum() for fit in fits]
    assert len(set(right)) == 3
    choice = probe.choose(x, labels, 4, l2=strengths, held_out=0.1, **sizes)
    assert choice.l2 == strengths[right.argmax()]
    assert choice.top1 == right.max() / 60


def test_folds_hold_out_every_example_once_and_of_every_class_alike():
    labels = np.array([0] * 20 + [1] * 11 + [2] * 2 + [3])
    parts = probe._held_out_parts(labels, 5, 0.1, seed=0)
    assert len(parts) == 5
    np.testing.assert_array_equal(np.sum(parts, 0), labels != 3)  # One is all of it.
    counts = np.array([np.bincount(labels[part], minlength=5) for part in parts])
    assert counts[:, 0].tolist() == [4] * 5
    assert sorted(counts[:, 1]) == [2, 2, 2, 2, 3]
    assert counts[:, 2].max() == 1
    assert probe._held_out_parts(np.arange(3), 3, 0.1, seed=0) == []


@pytest.mark.parametrize(
    ("l2", "middle"),
    [((1e-3, 1e-1, 1e-2), 1e-2), ((1e-3, 1e-4, 1e-1, 1e-2), 1e-2), ((0.1, 0.2), 0.2)],
)
def test_equally_good_strengths_give_the_middle_one(l2, middle):
    x, labels = made(80, noise=0.01)
    choice = probe.choose(x, labels, 4, l2=l2, held_out=0.2, iterations=30)
    assert (choice.l2, choice.top1) == (middle, 1.0)


def test_one_strength_needs_no_held_out_part():
    x, labels = made(50)
    choice = probe.choose(x, labels, 4, l2=(1e-2,), held_out=0.2)
    assert choice.l2 == 1e-2
    assert np.isnan(choice.top1)


def test_a_part_of_every_class_is_held_out():
    labels = np.array([0] * 20 + [1] * 10 + [2] * 2 + [3])
    held = probe._held_out(labels, 5, 0.1, seed=0)
    assert np.bincount(labels[held], minlength=5).tolist() == [2, 1, 1, 0, 0]
    other = probe._held_out(labels, 5, 0.1, seed=1)
    assert (held != other).any()


def test_a_probe_can_be_abandoned_within_a_fit(monkeypatch):
    x, labels = made(50)
    asked = iter([False, False, True])
    fits, place = [], probe._place
    monkeypatch.setattr(probe, "_place", lambda *x: fits.append(x) or place(*x))
    found = probe.choose(
        x, labels, 4, l2=(1.0, 0.1), held_out=0.2, stop=lambda: next(asked)
    )
    assert found is None
    assert len(fits) == 1


def test_every_fit_asks_equally_often():
    # Whatever the data, so that processes that differ in a last bit stay together.
    counts = []
    for noise in (0.1, 3.0):
        asked = []
        x, labels = made(50, noise=noise)
        sizes = {"l2": (1.0, 0.1), "held_out": 0.2, "iterations": 40}
        probe.choose(x, labels, 4, **sizes, stop=lambda asked=asked: asked.append(1))
        counts.append(len(asked))
    assert counts == [(5 * 2 + 1) * 80] * 2

import numpy as np
import pytest

from vit_jax.evaluation import probe


def made(examples, seed=0, features=9, classes=4, noise=1.5):
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(classes, features))
    scale, offset = rng.uniform(0.2, 4, features), rng.normal(size=features)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, examples)
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
        slopes = theirs.coef_.T / scale[:, None]
        size = np.abs(slopes).max()
        np.testing.assert_allclose(fitted.slopes, slopes, atol=4e-3 * size)
        expected = theirs.predict((test - mean) / scale)
        assert (fitted.predict(test) == expected).mean() >= 0.995
    assert np.abs(found[0].slopes).max() < np.abs(found[-1].slopes).max()


def test_the_held_out_part_chooses_and_all_examples_are_fitted():
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


def test_equally_good_strengths_give_the_largest():
    x, labels = made(80, noise=0.01)
    choice = probe.choose(x, labels, 4, l2=(1e-3, 1e-1, 1e-2), held_out=0.2)
    assert (choice.l2, choice.top1) == (0.1, 1.0)


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


def test_a_probe_can_be_abandoned():
    x, labels = made(50)
    asked = iter([False, True])
    found = probe.choose(
        x, labels, 4, l2=(1.0, 0.1), held_out=0.2, stop=lambda: next(asked)
    )
    assert found is None

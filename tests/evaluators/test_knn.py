import numpy as np
import pytest

from vit_jax.evaluators import knn


def direct(train, labels, test, num_classes, k, temperature):
    """The vote, one example at a time."""
    found = []
    for one in test.astype(np.float64):
        wide = train.astype(np.float64)
        similar = wide @ one / (np.linalg.norm(wide, axis=1) * np.linalg.norm(one))
        votes = np.zeros(num_classes)
        for i in sorted(range(len(train)), key=lambda i: -similar[i])[:k]:
            votes[labels[i]] += np.exp(similar[i] / temperature)
        found.append(votes.argmax())
    return found


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (7, 0.07), (20, 1.0)])
def test_neighbours_vote_by_their_similarity(k, temperature, monkeypatch):
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 90)
    centres = rng.normal(size=(4, 11))
    scale = rng.uniform(0.1, 9, (90, 1))  # Lengths must not count.
    train = ((centres[labels] + rng.normal(size=(90, 11))) * scale).astype(np.float32)
    test = rng.normal(size=(33, 11)).astype(np.float32)
    expected = direct(train, labels, test, 4, k, temperature)
    sizes = {"k": k, "temperature": temperature}
    found = knn.predict(train, labels, test, 4, **sizes)
    assert found.tolist() == expected
    assert len(set(expected)) == 4
    monkeypatch.setattr(knn, "_BLOCK", 200)  # Two rows at once.
    assert knn.predict(train, labels, test, 4, **sizes).tolist() == expected
    asked = iter([False, True])
    assert knn.predict(train, labels, test, 4, stop=lambda: next(asked)) is None


def test_the_weights_matter():
    # One close neighbour of class 1, two far ones of class 0.
    train = np.array([[1, 0.9], [1, -0.9], [1, 0.01]], np.float32)
    labels, test = np.array([0, 0, 1]), np.array([[1, 0]], np.float32)
    assert knn.predict(train, labels, test, 2, k=3, temperature=0.07)[0] == 1
    assert knn.predict(train, labels, test, 2, k=3, temperature=10.0)[0] == 0
    assert knn.predict(train, labels, test, 2, k=99)[0] == 1  # There are but three.


def test_a_cold_vote_and_features_of_zeros_do_no_harm():
    train = np.array([[1, 0], [0, 0], [0, 1]], np.float32)
    labels, test = np.array([2, 0, 1]), np.array([[0, 3], [0, 0]], np.float32)
    found = knn.predict(train, labels, test, 3, k=2, temperature=1e-4)
    assert found[0] == 1

"""The index stream of ImageNet-21k's 14 million records, tested as random numbers are.

Every score is in standard deviations of what a true shuffle gives; chi-squared sums of
many cells are close to normal. A true shuffle stays below 5 but for one in a million.
"""

import math
import tracemalloc

import numpy as np
import pytest

from vit_jax.data import order

N, BATCH, SEED = 14_197_122, 4096, 5
LENGTH = 96 * BATCH
CLASSES = 61  # Blocks of records, as a data set sorted by class has them.


def chi_squared(counts):
    freedom, expected = counts.size - 1, counts.mean()
    total = np.square(counts - expected).sum() / expected
    return (total - freedom) / math.sqrt(2 * freedom)


def count(values, bins):
    return chi_squared(np.bincount(values, minlength=bins))


def correlation(a, b):
    return np.corrcoef(a, b)[0, 1] * math.sqrt(len(a))


def joint(a, b):
    return count(a * CLASSES + b, CLASSES**2)


def neighbours(records):
    """Scores how a record depends on those before it, and on its place."""
    high, low = records * CLASSES // N, records % CLASSES
    places = np.arange(len(records))
    scores = {
        "uniform": count(high, CLASSES),
        "uniform low bits": count(low, CLASSES),
        "place": count((records - places) % N * CLASSES // N, CLASSES),
    }
    for lag in (1, 2, BATCH):
        gaps = (records[lag:] - records[:-lag]) % N
        scores |= {
            f"correlation {lag}": correlation(records[:-lag], records[lag:]),
            f"gap {lag}": count(gaps * CLASSES // N, CLASSES),
            f"gap {lag} low bits": count(gaps % CLASSES, CLASSES),
            f"pair {lag}": joint(high[:-lag], high[lag:]),
            f"pair {lag} low bits": joint(low[:-lag], low[lag:]),
        }
    return scores


def mixing(records):
    """Scores how many of each class the batches hold, batch by batch."""
    high = (records * CLASSES // N).reshape(-1, BATCH)
    each = np.array([count(batch, CLASSES) for batch in high])
    root = math.sqrt(len(each))
    return {
        "mean": each.mean() * root,
        "spread": (each.var() - 1) * root / math.sqrt(2),
    }


def independence(one, two):
    """Scores how the order of an epoch, or of a seed, tells of another."""
    gaps = (one - two) % N
    return {
        "correlation": correlation(one, two),
        "pair": joint(one * CLASSES // N, two * CLASSES // N),
        "gap": count(gaps * CLASSES // N, CLASSES),
        "gap low bits": count(gaps % CLASSES, CLASSES),
    }


def stream(first=0, seed=SEED):
    return order.records_at(first + np.arange(LENGTH), N, seed)


def assert_random(scores):
    assert {k: round(v, 1) for k, v in scores.items() if not abs(v) < 5} == {}


@pytest.mark.parametrize("first", [0, N // 2, 7 * N + 13])
def test_neighbours_in_the_stream_are_independent(first):
    assert_random(neighbours(stream(first)))


def test_every_batch_mixes_the_classes_as_a_true_shuffle_does():
    assert_random(mixing(stream()))


@pytest.mark.parametrize("epoch", [1, 2, 2**32])
def test_epochs_are_independent(epoch):
    assert_random(independence(stream(), stream(epoch * N)))


@pytest.mark.parametrize("seed", [SEED + 1, SEED ^ 2**31, 0])
def test_seeds_are_independent(seed):
    assert_random(independence(stream(), stream(seed=seed)))


def test_the_statistics_notice_too_few_rounds():
    places = np.arange(LENGTH)
    weak = [order.permuted(places, N, SEED, e, rounds=2) for e in (0, 1)]
    for scores in (neighbours(weak[0]), mixing(weak[0]), independence(*weak)):
        assert max(map(abs, scores.values())) > 10


@pytest.mark.parametrize("examples", [1, 2, 7, 100, 10_007, 2**20])
def test_a_worked_out_epoch_holds_every_record_once(examples):
    records = order.permuted(np.arange(examples), examples, SEED, 3)
    np.testing.assert_array_equal(np.sort(records), np.arange(examples))


@pytest.mark.slow
def test_a_worked_out_epoch_of_14_million_holds_every_record_once():
    seen = np.zeros(N, bool)
    for first in range(0, N, 2**20):
        seen[order.permuted(np.arange(first, min(N, first + 2**20)), N, SEED, 1)] = True
    assert seen.all()


def test_each_worked_out_record_is_as_likely_at_each_place():
    counts = np.zeros((7, 7))
    for epoch in range(980):
        counts[np.arange(7), order.permuted(np.arange(7), 7, 3, epoch)] += 1
    # As for the sorted order: chi-squared with 36 degrees of freedom.
    assert np.square(counts - 140).sum() / 140 < 80


def test_the_worked_out_order_never_changes():
    # Stored: these are the records of runs that have begun.
    expected = [474_733, 951_183, 8_428_439, 5_414_750, 8_404_645, 5_366_230]
    positions = np.array([0, 1, N - 1, N, 10**6 * BATCH, 10**12])
    np.testing.assert_array_equal(order.records_at(positions, N, SEED), expected)


@pytest.mark.parametrize("position", [0, 10**6 * BATCH, 10**15])
def test_a_batch_of_14_million_records_takes_no_memory_to_speak_of(position):
    order.permutation.cache_clear()
    tracemalloc.start()
    order.records_at(position + np.arange(BATCH), N, SEED)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20  # A sorted epoch would be 108 MiB.
    assert order.permutation.cache_info().misses == 0

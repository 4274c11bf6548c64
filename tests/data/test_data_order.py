import pathlib

import numpy as np
import pytest

from vit_jax.data import order

N, SEED = 107, 5
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def at(*positions):
    return order.records_at(np.array(positions), N, SEED)


def test_every_epoch_holds_every_record_once():
    records = order.records_at(np.arange(3 * N), N, SEED).reshape(3, N)
    for epoch in records:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(N))
    assert (records[0] != records[1]).mean() > 0.9


def test_a_position_has_its_record_whatever_was_asked_before():
    stream = order.records_at(np.arange(3 * N), N, SEED)
    for k in (2 * N + 1, 0, N - 1, N):
        assert at(k)[0] == stream[k]
    np.testing.assert_array_equal(at(N - 1, N, 2 * N), stream[[N - 1, N, 2 * N]])


def test_a_far_position_is_reached_at_once():
    far = 10**12
    assert at(far)[0] == order.permutation(N, SEED, far // N)[far % N]


def test_seeds_give_unrelated_orders():
    a, b = order.permutation(N, 0, 0), order.permutation(N, 1, 0)
    assert (a == b).sum() < 8  # One fixed point is expected.
    assert order.permutation(N, -1, 0).shape == (N,)


def test_the_order_is_the_sorting_of_the_philox_stream():
    bits = np.random.Philox(key=[SEED, order._STREAM], counter=[0, 0, 0, 2])
    words = [int(bits.random_raw()) for _ in range(N)]
    expected = sorted(range(N), key=words.__getitem__)
    np.testing.assert_array_equal(order.permutation(N, SEED, 2), expected)


def test_a_cached_permutation_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        order.permutation(N, SEED, 0)[0] = 1


def test_repeated_records_follow_one_another_in_epochs_of_the_same_length():
    stream = order.records_at(np.arange(2 * N), N, SEED, repeats=3)
    for epoch, records in enumerate(stream.reshape(2, N)):
        first = order.permutation(N, SEED, epoch)[: -(-N // 3)]
        np.testing.assert_array_equal(records, first.repeat(3)[:N])
    # As of any order: a position has its record whatever was asked before.
    last = order.records_at(np.array([2 * N - 1]), N, SEED, repeats=3)
    np.testing.assert_array_equal(last, stream[-1:])
    once = order.records_at(np.arange(N), N, SEED, repeats=1)
    np.testing.assert_array_equal(once, order.permutation(N, SEED, 0))


def test_repeated_records_are_deits():
    with np.load(GOLDEN / "deit_repeated.npz") as theirs:
        for name, count in (("512_of_4", 4), ("600_of_4", 4), ("300_of_3", 3)):
            # The copies of a record are dealt to the processes in turn.
            parts = [theirs[f"{name}/{i}"] for i in range(count)]
            whole = np.stack(parts, 1).ravel()
            for i, record in enumerate(whole):
                assert record == whole[i - i % 3]
            assert len({*whole.tolist()}) == -(-len(whole) // 3)

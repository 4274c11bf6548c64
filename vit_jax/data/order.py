"""The order of the training records: a pure function of (seed, position in the run).

An epoch is shuffled in one of two ways. With up to `SORTED` records it is sorted by
random words: all orders are equally likely, and a position is one look-up. With more
records, sorting would stall the run at every epoch and take hundreds of megabytes per
loader process, so each position is computed separately, in constant memory. Letters: B
positions, N records, K classes.
"""

import dataclasses
import functools
import math
import threading

import numpy as np
from jaxtyping import Float, Integer, UInt64

SORTED = 2**21  # A sorted epoch of this size takes 16 MiB and a third of a second.
ROUNDS = 8  # With 2 rounds the tests of the index stream fail, with 4 they pass.
# Keep the order's random bits apart from those of other uses of the same seed.
_STREAM = 0x6F72646572
_ROUND_STREAM = 0x726F756E64
# Keeps the permutations of the classes apart from each other and from those of epochs.
_BALANCE_STREAM, _SEEDS = 0x62616C, 2**32
_lock = threading.Lock()

Numbers = Integer[np.ndarray, " B"]
Words = UInt64[np.ndarray, " B"]


def records_at(
    positions: Numbers, examples: int, seed: int, repeats: int = 1
) -> Numbers:
    """Returns the numbers of the records at some positions of the run.

    Each epoch is a different full permutation. Any position costs the same, so a run
    resumes at step k as fast as at step 0.

    Args:
      positions: positions in the run; 0 is the first image of the run, `examples` the
        first of epoch 1.
      examples: number of records of the data set.
      seed: seed of the run.
      repeats: number of successive copies of each record. An epoch keeps its length, so
        it contains only the first records of its permutation.
    """
    epochs, offsets = np.divmod(positions, examples)
    offsets = offsets // repeats
    records = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        if examples > SORTED:
            records[here] = permuted(offsets[here], examples, seed, int(epoch))
            continue
        # Without the lock, threads that enter an epoch together would each compute it.
        with _lock:
            order = permutation(examples, seed, int(epoch))
        records[here] = order[offsets[here]]
    return records


# Two epochs, because batches of neighbouring epochs are loaded at the same time.
@functools.lru_cache(maxsize=2)
def permutation(examples: int, seed: int, epoch: int) -> Integer[np.ndarray, " N"]:
    """Returns the order of the records in an epoch, from 0, sorted by raw Philox words.

    The stream of words is fixed by the algorithm (Salmon et al., SC 2011), while that
    of `Generator.permutation` may change with releases of NumPy.
    """
    words = _words(examples, seed, epoch, _STREAM)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


def permuted(
    offsets: Numbers, examples: int, seed: int, epoch: int, rounds: int = ROUNDS
) -> Numbers:
    """Returns the records at some offsets in an epoch without computing the epoch.

    A Feistel network permutes the cells of a grid that is slightly larger than the data
    set; a cell outside the data set is permuted again until it is inside (Black and
    Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Integer arithmetic
    gives the same result on any machine.

    Args:
      offsets: offsets in the epoch.
      examples: number of records, at most 2**62.
      seed: seed of the run.
      epoch: number of the epoch.
      rounds: number of rounds of the network, even.
    """
    height = math.isqrt(examples - 1) + 1
    grid = np.array([height, -(-examples // height)], np.uint64)
    keys = _words(rounds, seed, epoch, _ROUND_STREAM)
    cells = _encrypt(offsets.astype(np.uint64), grid, keys)
    outside = np.flatnonzero(cells >= examples)
    while len(outside):
        cells[outside] = _encrypt(cells[outside], grid, keys)
        outside = outside[cells[outside] >= examples]
    return cells.astype(np.int64)


def _encrypt(cells: Words, grid: np.ndarray, keys: np.ndarray) -> Words:
    """Permutes the cells of a grid: moves rows by columns and columns by rows."""
    height, width = grid
    rows, columns = np.divmod(cells, width)
    for row_key, column_key in keys.reshape(-1, 2):
        rows = (rows + _scramble(columns ^ row_key, height)) % height
        columns = (columns + _scramble(rows ^ column_key, width)) % width
    return rows * width + columns


def _scramble(words: Words, stop: np.uint64) -> Words:
    """Hashes words to 0..stop-1 with splitmix64's finaliser (Steele et al., 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((words ^ (words >> np.uint64(31))) >> np.uint64(32)) * stop >> np.uint64(32)


def _words(count: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    bits = np.random.Philox(
        key=np.array([seed % 2**64, stream], np.uint64),
        # The generator counts up from the lowest word, so streams of epochs never
        # overlap.
        counter=np.array([0, 0, 0, epoch], np.uint64),
    )
    return bits.random_raw(count)


@dataclasses.dataclass(frozen=True, eq=False)
class Balance:
    """Draws records so that classes are balanced; objects are sent to loader processes.

    The number of records of a class determines its share of every epoch. Draws of a
    class are counted over the whole run and follow one permutation of its records after
    another. So at the end of any epoch, each record has been drawn as often as the
    others of its class, or once more. Within an epoch all draws are shuffled. An epoch
    keeps its length.

    Attributes:
      members: record numbers of the classes that occur, one class after the other.
      starts: index in `members` at which each class begins, and the end of the last.
      ends: number of slots of an epoch up to the end of each class.
    """

    members: Integer[np.ndarray, " N"]
    starts: Integer[np.ndarray, " K1"]
    ends: Integer[np.ndarray, " K"]

    @classmethod
    def of(cls, how: str, labels: Integer[np.ndarray, " N"]) -> "Balance":
        """Builds the balance of a training split; `how` is one of `SHARES`."""
        counts = np.bincount(labels)
        occurring = counts[counts > 0]
        shares = SHARES[how](occurring.astype(np.float64))
        exact = shares / shares.sum() * len(labels)
        ends = np.rint(np.cumsum(exact)).astype(np.int64)
        return cls(
            np.argsort(labels, kind="stable"),
            np.concatenate([[0], np.cumsum(occurring)]),
            ends,
        )

    def records_at(self, positions: Numbers, seed: int, repeats: int = 1) -> Numbers:
        """Returns the numbers of the records at some positions, see `records_at`."""
        examples = len(self.members)
        # The slots of an epoch are shuffled as records are without balance.
        slots = records_at(positions, examples, seed, repeats)
        epochs = positions // examples
        classes = np.searchsorted(self.ends, slots, side="right")
        firsts = np.concatenate([[0], self.ends])
        in_epoch = self.ends - firsts[:-1]
        draws = epochs * in_epoch[classes] + slots - firsts[classes]
        sizes = np.diff(self.starts)[classes]
        rounds, places = np.divmod(draws, sizes)
        inner = np.empty(len(positions), np.int64)
        for number, round_ in {*zip(classes.tolist(), rounds.tolist(), strict=True)}:
            here = (classes == number) & (rounds == round_)
            class_seed = (seed * _SEEDS + number + 1) * _SEEDS + _BALANCE_STREAM
            size = int(sizes[here][0])
            inner[here] = permuted(places[here], size, class_seed, round_)
        return self.members[self.starts[classes] + inner]


def class_weights(
    how: str, labels: Integer[np.ndarray, " N"], num_classes: int
) -> tuple[float, ...]:
    """Returns class weights that have the same effect in a loss as balanced draws.

    The mean weight over all images is 1, and so is the weight of a class without
    images.

    Args:
      how: name of the balance, one of `SHARES`.
      labels: labels of the training images.
      num_classes: number of classes.
    """
    counts = np.bincount(labels, minlength=num_classes).astype(np.float64)
    occurs, weights = counts > 0, np.ones(num_classes)
    shares = SHARES[how](counts[occurs])
    weights[occurs] = shares / shares.sum() * len(labels) / counts[occurs]
    return tuple(weights.tolist())


def _effective(counts: Float[np.ndarray, " K"]) -> Float[np.ndarray, " K"]:
    """Returns shares by the effective number of samples (arXiv:1901.05555, equation 2).

    An image of a class of n images has the weight (1 - b) / (1 - b^n), with
    b = (N - 1) / N for N images in total.
    """
    beta = (counts.sum() - 1) / counts.sum()
    return counts * (1 - beta) / (1 - beta**counts)


# Functions from the images per class to the share of each class in an epoch,
# unnormalised.
SHARES = {"inverse": np.ones_like, "sqrt": np.sqrt, "effective": _effective}

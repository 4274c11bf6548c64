"""The order of the training records: a pure function of (seed, position in the run).

Two ways to shuffle an epoch. Up to `SORTED` records it is sorted from random words:
every order is as likely, and a position is one look-up. Beyond, sorting would stall the
run at every epoch and take hundreds of megabytes a loader process; there each position
is worked out by itself, in constant memory.
"""

import dataclasses
import functools
import math
import threading

import numpy as np
from jaxtyping import Float, Integer, UInt64

SORTED = 2**21  # A sorted epoch of this size takes 16 MiB and a third of a second.
ROUNDS = 8  # Two fail the tests of the index stream, four pass.
# Keep the order's random bits apart from those of other uses of the same seed.
_STREAM = 0x6F72646572
_ROUND_STREAM = 0x726F756E64
# Keeps the permutations of the classes apart from each other and from those of epochs.
_BALANCE_STREAM, _SEEDS = 0x62616C, 2**32
_lock = threading.Lock()


def records_at(
    positions: Integer[np.ndarray, " B"], examples: int, seed: int, repeats: int = 1
) -> Integer[np.ndarray, " B"]:
    """Returns which records stand at some positions of the run.

    Each epoch is a full permutation of its own. Any position costs the same to reach,
    so a run resumes at step k as fast as at step 0.

    Args:
      positions: 0 is the first image of the run, `examples` the first of epoch 1.
      examples: size of the data set.
      seed: of the run.
      repeats: of each record, one after the other. An epoch keeps its length and has a
        part of the records, the first of its permutation.
    """
    epochs, offsets = np.divmod(positions, examples)
    offsets = offsets // repeats
    records = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        if examples > SORTED:
            records[here] = permuted(offsets[here], examples, seed, int(epoch))
            continue
        # Threads that cross into a new epoch together would each make it.
        with _lock:
            order = permutation(examples, seed, int(epoch))
        records[here] = order[offsets[here]]
    return records


# Two, because batches of neighbouring epochs are loaded at the same time.
@functools.lru_cache(maxsize=2)
def permutation(examples: int, seed: int, epoch: int) -> Integer[np.ndarray, " N"]:
    """Returns the order of the records in an epoch, sorted from raw Philox words.

    Unlike `Generator.permutation` their stream is fixed by the algorithm (Salmon et
    al., SC 2011), so an order outlives a change of numpy.

    Args:
      examples: size of the data set.
      seed: of the run.
      epoch: from 0.
    """
    words = _words(examples, seed, epoch, _STREAM)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


def permuted(
    offsets: Integer[np.ndarray, " B"],
    examples: int,
    seed: int,
    epoch: int,
    rounds: int = ROUNDS,
) -> Integer[np.ndarray, " B"]:
    """Returns the records at some places of an epoch without making the epoch.

    A Feistel network over the cells of a grid hardly larger than the data set; a cell
    outside the set walks on until it is inside (Black and Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002). Integer arithmetic only: the same on any
    machine.

    Args:
      offsets: places in the epoch, from 0 to examples-1.
      examples: size of the data set, below 2**62.
      seed: of the run.
      epoch: from 0.
      rounds: of the network, even.
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


def _encrypt(
    cells: UInt64[np.ndarray, " B"],
    grid: UInt64[np.ndarray, "2"],
    keys: UInt64[np.ndarray, " R"],
) -> UInt64[np.ndarray, " B"]:
    """Permutes the cells of a grid: moves rows by columns and columns by rows."""
    height, width = grid
    rows, columns = np.divmod(cells, width)
    for row_key, column_key in keys.reshape(-1, 2):
        rows = (rows + _scramble(columns ^ row_key, height)) % height
        columns = (columns + _scramble(rows ^ column_key, width)) % width
    return rows * width + columns


def _scramble(
    words: UInt64[np.ndarray, " B"], stop: np.uint64
) -> UInt64[np.ndarray, " B"]:
    """Hashes words to 0..stop-1 with splitmix64's finaliser (Steele et al., 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((words ^ (words >> np.uint64(31))) >> np.uint64(32)) * stop >> np.uint64(32)


def _words(
    count: int, seed: int, epoch: int, stream: int
) -> UInt64[np.ndarray, " {count}"]:
    bits = np.random.Philox(
        key=np.array([seed % 2**64, stream], np.uint64),
        # The generator counts up from the lowest word: epochs never meet.
        counter=np.array([0, 0, 0, epoch], np.uint64),
    )
    return bits.random_raw(count)


@dataclasses.dataclass(frozen=True, eq=False)
class Balance:
    """Draws records where classes are balanced; travels to loader processes.

    Each class gets a part of every epoch, by its number of records. Its draws are
    counted through the run and go through one permutation of its records after another,
    so that at the end of any epoch each has been drawn as often as the others of its
    class, or once more. Within an epoch all draws are shuffled. An epoch keeps its
    length.

    Attributes:
      members: record numbers of the classes that occur, one class after the other.
      starts: where each class begins in `members`, and their end.
      ends: slots of an epoch up to the end of each class.
    """

    members: Integer[np.ndarray, " N"]
    starts: Integer[np.ndarray, " K1"]
    ends: Integer[np.ndarray, " K"]

    @classmethod
    def of(cls, how: str, labels: Integer[np.ndarray, " N"]) -> "Balance":
        """Returns what draws the records of a training split; `how` is one of `SHARES`."""
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

    def records_at(
        self, positions: Integer[np.ndarray, " B"], seed: int, repeats: int = 1
    ) -> Integer[np.ndarray, " B"]:
        """Returns which records stand at some positions, as the function does."""
        examples = len(self.members)
        # The slots of an epoch are shuffled as its records would be.
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
            size, own = int(sizes[here][0]), (seed * _SEEDS + number + 1) * _SEEDS
            inner[here] = permuted(places[here], size, own + _BALANCE_STREAM, round_)
        return self.members[self.starts[classes] + inner]


def class_weights(
    how: str, labels: Integer[np.ndarray, " N"], num_classes: int
) -> tuple[float, ...]:
    """Returns weights of the classes' images that do in a loss what drawing them does.

    `how` is one of `SHARES`. Their mean over all images is 1; a class without any weighs 1.
    """
    counts = np.bincount(labels, minlength=num_classes).astype(np.float64)
    there, weights = counts > 0, np.ones(num_classes)
    shares = SHARES[how](counts[there])
    weights[there] = shares / shares.sum() * len(labels) / counts[there]
    return tuple(weights.tolist())


def _inverse(counts: Float[np.ndarray, " K"]) -> Float[np.ndarray, " K"]:
    """Each class as often as any other."""
    return np.ones_like(counts)


def _effective(counts: Float[np.ndarray, " K"]) -> Float[np.ndarray, " K"]:
    """Weights by the effective number of samples, arXiv:1901.05555, equation 2.

    An image weighs (1 - b) / (1 - b^n), with b = (N - 1) / N and N the number of all.
    """
    beta = (counts.sum() - 1) / counts.sum()
    return counts * (1 - beta) / (1 - beta**counts)


# The part of each class in an epoch, from the numbers of their images; any scale.
SHARES = {"inverse": _inverse, "sqrt": np.sqrt, "effective": _effective}

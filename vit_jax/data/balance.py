"""Which records are drawn where classes are balanced: a pure function of the position.

Each class gets a part of every epoch, by its number of records. Its draws are counted
through the run and go through one permutation of its records after another, so that at
the end of any epoch each has been drawn as often as the others of its class, or once
more. Within an epoch all draws are shuffled. An epoch keeps its length.
"""

import dataclasses

import numpy as np
from jaxtyping import Float, Integer

from vit_jax.data import order

# Keeps the permutations of the classes apart from each other and from those of epochs.
_STREAM, _SEEDS = 0x62616C, 2**32


@dataclasses.dataclass(frozen=True, eq=False)
class Balance:
    """Draws records class by class; travels to loader processes.

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
        """Returns which records stand at some positions, as `order.records_at`."""
        examples = len(self.members)
        # The slots of an epoch are shuffled as its records would be.
        slots = order.records_at(positions, examples, seed, repeats)
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
            inner[here] = order.permuted(places[here], size, own + _STREAM, round_)
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

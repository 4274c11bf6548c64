"""The order of the training records: a pure function of (seed, position in the run)."""

import functools
import threading

import numpy as np
from jaxtyping import Integer

# Keeps the order's random bits apart from those of other uses of the same seed.
_STREAM = 0x6F72646572
_lock = threading.Lock()


def records_at(
    positions: Integer[np.ndarray, " B"], examples: int, seed: int
) -> Integer[np.ndarray, " B"]:
    """Returns which records stand at some positions of the run.

    Each epoch is a full permutation of its own. Any position costs the same to reach,
    so a run resumes at step k as fast as at step 0.

    Args:
      positions: 0 is the first image of the run, `examples` the first of epoch 1.
      examples: size of the data set.
      seed: of the run.
    """
    epochs, offsets = np.divmod(positions, examples)
    records = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        # Threads that cross into a new epoch together would each make it.
        with _lock:
            order = permutation(examples, seed, int(epoch))
        records[here] = order[offsets[here]]
    return records


# Two, because batches of neighbouring epochs are loaded at the same time.
@functools.lru_cache(maxsize=2)
def permutation(examples: int, seed: int, epoch: int) -> Integer[np.ndarray, " N"]:
    """Returns the order of the records in an epoch.

    Sorts raw Philox words: unlike `Generator.permutation` their stream is fixed by
    the algorithm (Salmon et al., SC 2011), so an order outlives a change of numpy.

    Args:
      examples: size of the data set.
      seed: of the run.
      epoch: from 0.
    """
    bits = np.random.Philox(
        key=np.array([seed % 2**64, _STREAM], np.uint64),
        # The generator counts up from the lowest word: epochs never meet.
        counter=np.array([0, 0, 0, epoch], np.uint64),
    )
    order = np.argsort(bits.random_raw(examples), kind="stable")
    order.flags.writeable = False
    return order

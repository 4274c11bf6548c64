"""Memory for passing results, one a thread, used again and again.

An image of fresh memory costs a page fault every 4 KiB, a fifth of its decoding.
"""

import math
import threading

import numpy as np
from jaxtyping import UInt8

_LARGEST = 2**23  # Bytes; what is larger is rare, and would stay for good.
_local = threading.local()


def borrow(use: str, shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
    """Returns an array of any content, which the next call in this thread may overwrite.

    Args:
      use: what it is for; arrays of different uses never share memory.
      shape: of the array.
    """
    size = math.prod(shape)
    if size > _LARGEST:
        return np.empty(shape, np.uint8)
    kept = getattr(_local, use, None)
    if kept is None or kept.size < size:
        kept = np.empty(size, np.uint8)
        setattr(_local, use, kept)
    return kept[:size].reshape(shape)

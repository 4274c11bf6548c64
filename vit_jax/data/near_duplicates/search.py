"""Which images may be the same: hashes within a Hamming distance, found by faiss.

The smaller set is indexed: 100,000 images take 35 MB. The larger one streams past.
"""

import dataclasses

import numpy as np
from jaxtyping import UInt8

from vit_jax.data.near_duplicates import hashing
from vit_jax.errors import UserError

DISTANCE = 28  # Of 128 bits; unrelated photographs are 64 apart, give or take.
_PER_QUERY = 50  # Nearest candidates that are looked at.


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A pair that looks alike.

    Attributes:
      query: number of the query.
      indexed: number of the indexed image.
      distance: bits that differ.
      flipped: whether the indexed image was mirrored.
      window: part of the larger image that is like the whole of the other.
      query_is_larger: whether the window is of the query, not of the indexed image.
    """

    query: int
    indexed: int
    distance: int
    flipped: bool
    window: hashing.Window
    query_is_larger: bool


class Index:
    """Exact search in the hashes of a set of images.

    Raises:
      UserError: faiss is not installed.
    """

    def __init__(self):
        try:
            import faiss
        except ImportError as error:
            raise UserError(
                "de-duplication needs faiss: pip install -e '.[dedup]' in the clone"
            ) from error
        # By image, then whether it is flipped, then by window.
        self._parts = faiss.IndexBinaryFlat(hashing.BITS)
        self._wholes = faiss.IndexBinaryFlat(hashing.BITS)
        self._numbers = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, thumbnails: UInt8[np.ndarray, "N S S"], numbers: np.ndarray) -> None:
        """Adds images.

        Args:
          thumbnails: of the images.
          numbers: by which `candidates` names them.
        """
        both = np.stack([thumbnails, thumbnails[:, :, ::-1]], axis=1)
        found = hashing.hashes(both.reshape(-1, *both.shape[2:]), hashing.WINDOWS)
        self._parts.add(np.ascontiguousarray(found.reshape(-1, found.shape[-1])))
        self._wholes.add(np.ascontiguousarray(found[:, 0]))
        self._numbers = np.concatenate([self._numbers, numbers])

    def candidates(self, thumbnails: UInt8[np.ndarray, "N S S"]) -> list[Candidate]:
        """Returns the pairs that may show the same, nearest first for each query.

        Args:
          thumbnails: of the queries.
        """
        if not len(thumbnails) or not len(self):
            return []
        found = hashing.hashes(thumbnails, hashing.WINDOWS)
        windows = len(hashing.WINDOWS)
        best: dict[tuple[int, int], Candidate] = {}

        def note(query, row, distance, flipped, window, query_is_larger):
            pair = query, int(self._numbers[row])
            if pair not in best or distance < best[pair].distance:
                part = hashing.WINDOWS[window]
                best[pair] = Candidate(
                    *pair, int(distance), bool(flipped), part, query_is_larger
                )

        # The query is a crop of the indexed image, or all of it ...
        for query, entry, distance in _within(self._parts, found[:, 0]):
            image, window = divmod(entry, windows)
            note(query, image // 2, distance, image % 2, window, False)
        # ... or the indexed image is a crop of the query.
        crops = found[:, 1:].reshape(-1, found.shape[-1])
        for crop, entry, distance in _within(self._wholes, crops):
            query, window = divmod(crop, windows - 1)
            note(query, entry // 2, distance, entry % 2, window + 1, True)
        return _nearest(best.values())


def _within(index, queries: np.ndarray):
    """Yields (query, entry, distance) for all up to DISTANCE."""
    # The bound of faiss is exclusive.
    ends, distances, entries = index.range_search(
        np.ascontiguousarray(queries), DISTANCE + 1
    )
    rows = np.repeat(np.arange(len(queries)), np.diff(ends.astype(np.int64)))
    yield from zip(rows.tolist(), entries.tolist(), distances.tolist(), strict=True)


def _nearest(found) -> list[Candidate]:
    """Sorts by query and distance, and keeps the nearest of each query."""
    kept, query, count = [], None, 0
    for one in sorted(found, key=lambda c: (c.query, c.distance, c.indexed)):
        count = count + 1 if one.query == query else 1
        query = one.query
        if count <= _PER_QUERY:
            kept.append(one)
    return kept

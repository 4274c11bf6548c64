"""A small value that tells whether two starts of a run train on the same data.

Each entry of a data set (an image file, a shard, a record in memory) is known by its
name below the data set's folder, its label, and its size or checksum. Their hashes are
summed in a few hundred cells. Equal data give equal sums at any path and on any host;
where data differ, an entry that is the only one in its cell to have changed can be
worked out from the difference of the sums. The cells get smaller and smaller shares of
the entries, so that some cells have one change each, however many there are in all.
Captions that a task reads have cells of their own.
"""

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt64

_VERSION = 1
_LEVELS, _CELLS_OF_LEVEL = 24, 32  # Level k holds a share of 2 ** -(k+1).
_CELLS = _LEVELS * _CELLS_OF_LEVEL
# Names of a user's own source are asked for one by one; beyond this every n-th.
NAMES = 200_000
_MEMORY = 2**30  # Bytes of images in memory up to which they are hashed.
_EXAMPLES = 3  # Changed entries that a message names.
# What a label and a size stay below: another value was worked out from several changes.
_LARGEST_LABEL, _LARGEST_SIZE = 2**33, 2**48


class Entries(NamedTuple):
    """What the records of a source are recognised by.

    Attributes:
      what: what an entry is, in the plural: "image files", "shards" or "records".
      names: one an entry, the same wherever the data lies.
      labels: class numbers, or a checksum of the labels of a shard; None if unknown.
      sizes: bytes or checksums, integers from 0 on; None if unknown.
      captions: of those that are read, by the name of the record or shard: a checksum.
    """

    what: str
    names: Sequence[str]
    labels: Integer[np.ndarray, " N"] | None
    sizes: Integer[np.ndarray, " N"] | None
    captions: Mapping[str, int] | None = None

    def of_captions(self) -> "Entries":
        """Returns the captions as entries."""
        sums = np.fromiter(self.captions.values(), np.int64, len(self.captions))
        return Entries(f"captions of {self.what}", list(self.captions), None, sums)


def fingerprint(source) -> dict:
    """Returns a value for JSON that is equal for equal training data.

    It does not depend on where the data lies, and reads no image from disk.

    Args:
      source: data set; one of a user's own may have a method `entries` that returns
        `Entries`. Without it its record ids, and its labels and images if they lie in
        memory, are taken.
    """
    return _summary(source, entries(source))


def entries(source) -> Entries:
    """Returns what the records of a source are recognised by."""
    if hasattr(source, "entries"):
        return source.entries()
    step = max(1, -(-len(source) // NAMES))
    names = [source.record_id(i) for i in range(0, len(source), step)]
    labels = None if source.labels is None else np.asarray(source.labels)[::step]
    images = None if source.images is None else source.images[::step]
    return in_memory(names, labels, images)


def in_memory(names: Sequence[str], labels, images) -> Entries:
    """Returns the entries of records in memory, with checksums of their images.

    Args:
      names: of the records.
      labels: class numbers, or None.
      images: uint8 array (N, H, W, C), or None.
    """
    sizes = None
    if images is not None and images.nbytes <= _MEMORY:
        sums = (zlib.crc32(np.ascontiguousarray(image)) for image in images)
        sizes = np.fromiter(sums, np.int64, len(images))
    return Entries("records", names, labels, sizes)


def unchecked(stored: dict, *, labelled: bool, captioned: bool = False) -> str:
    """Returns a line on what of the data is not compared at a resume, or "".

    Args:
      stored: from `fingerprint`.
      labelled: whether the run reads labels.
      captioned: whether it reads captions.
    """
    parts = ("labels",) * labelled + ("sizes",) + ("captions",) * captioned
    lacking = [part for part in parts if not stored.get(part)]
    if not lacking or stored["what"] == "shards":  # Whose checksums cover the labels.
        return ""
    return (
        f"data.check compares the names of the {stored['what']} but not their "
        f"{' and '.join(lacking)}: the source has no method `entries` that tells them"
    )


def differences(stored: dict, source) -> list[str]:
    """Lists in words how a source differs from the one of a fingerprint.

    Args:
      stored: from `fingerprint`, of an earlier start.
      source: data set of this start.

    Returns:
      One line for each kind of difference, with examples; empty if there is none.
    """
    here = entries(source)
    now = _summary(source, here)
    if stored == now:
        return []
    what, lines = now["what"], []
    if any(stored.get(key) != now[key] for key in ("version", "what")):
        return [f"{what} were {stored.get('what')}, or of another version"]
    if stored["class_names"] != now["class_names"]:
        lines.append("the class names or their order differ")
    if stored["records"] != now["records"]:
        lines.append(f"{stored['records']:,} records are now {now['records']:,}")
    for part in ("labels", "sizes"):
        if stored[part] != now[part]:  # Nothing else can be told from the sums.
            return [*lines, f"{part} of the {what} are known in one of the two alone"]
    difference = _unpack(now["cells"]) - _unpack(stored["cells"])
    if difference.any():
        changes = list(_changes(difference, *_hashed(here)))
        found = list(_in_words(changes, here, source.class_names))
        lines += found or [_in_all(difference, what)]
    elif stored["order"] != now["order"]:
        lines.append(f"the {what} are in another order")
    # Of a run that was begun by an earlier version they are unknown.
    if {"captions"} <= stored.keys() & now.keys() and not lines:
        texts = here.of_captions()
        difference = _unpack(now["captions"]) - _unpack(stored["captions"])
        if difference.any():
            changes = list(_changes(difference, *_hashed(texts)))
            found = list(_in_words(changes, texts, ()))
            lines += found or [_in_all(difference, texts.what)]
    return lines


def _cells_of(here: Entries) -> str:
    """Returns the sums of entries as text."""
    hashes, labels, sizes = _hashed(here)
    cells = np.zeros((_CELLS, 4), np.uint64)
    terms = np.ones_like(hashes), hashes, hashes * labels, hashes * sizes
    for column, values in enumerate(terms):
        np.add.at(cells[:, column], _cell(hashes), values)
    packed = zlib.compress(cells.astype("<u8").tobytes())
    return base64.b64encode(packed).decode()


def _summary(source, here: Entries) -> dict:
    hashes, *_ = _hashed(here)
    places = 2 * np.arange(len(hashes), dtype=np.uint64) + 1
    captions = {}
    if here.captions is not None:
        captions["captions"] = _cells_of(here.of_captions())
    return {
        "version": _VERSION,
        "what": here.what,
        "records": len(source),
        "class_names": zlib.crc32("\n".join(source.class_names).encode()),
        "labels": here.labels is not None,
        "sizes": here.sizes is not None,
        "order": f"{np.sum(hashes * places, dtype=np.uint64):016x}",
        "cells": _cells_of(here),
        **captions,
    }


def _unpack(text: str) -> UInt64[np.ndarray, "cells 4"]:
    data = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(data, "<u8").astype(np.uint64).reshape(_CELLS, 4)


def _hashed(here: Entries) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns odd hashes of the names, labels from 1 on and sizes; 0 is unknown."""
    count = len(here.names)
    # Names of files may hold bytes that are no UTF-8.
    sums = [zlib.crc32(name.encode("utf-8", "surrogateescape")) for name in here.names]
    sums = np.array(sums, np.uint64)
    hashes = _scrambled(sums) | np.uint64(1)  # Odd numbers can be divided by.
    labels, sizes = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
    if here.labels is not None:
        labels = here.labels.astype(np.uint64) + np.uint64(1)
    if here.sizes is not None:
        sizes = here.sizes.astype(np.uint64)
    return hashes, labels, sizes


def _scrambled(words: UInt64[np.ndarray, " N"]) -> UInt64[np.ndarray, " N"]:
    """Hashes words with splitmix64's finaliser (Steele et al., 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _cell(hashes: UInt64[np.ndarray, " N"]) -> Integer[np.ndarray, " N"]:
    """Returns the cell of each entry."""
    words = (hashes >> np.uint64(8)) | np.uint64(1 << (_LEVELS - 1))
    level = np.bitwise_count(words ^ (words - np.uint64(1))) - 1  # Zeros at the end.
    return level * np.int64(_CELLS_OF_LEVEL) + (hashes >> np.uint64(59)).astype(int)


class _Change(NamedTuple):
    """An entry that has come, gone or changed.

    Attributes:
      now: its number here; None if it has gone.
      renamed: it took the place of one with another name.
      label, size: what they were, as `_hashed` returns them; None of one that has come.
    """

    now: int | None
    renamed: bool
    label: int | None
    size: int | None


def _changes(difference, hashes, labels, sizes) -> Iterator[_Change]:
    """Works out what has changed in the cells with a single change."""
    cells = _cell(hashes)
    for cell in np.flatnonzero(difference.any(1)):
        more, names, label_sum, size_sum = difference[cell]
        here = np.flatnonzero(cells == cell)
        h, l, s = hashes[here], labels[here], sizes[here]
        if more == np.uint64(2**64 - 1):  # One has gone, and none is in its place.
            here, h = np.array([-1]), np.zeros(1, np.uint64)
            l = s = h
        elif more == 1:
            for i in here[h == names].tolist():
                yield _Change(i, False, None, None)
            continue
        elif more:
            continue
        before = h - names  # The hash that each would have taken the place of.
        inverse = _inverse(before)
        label, size = (h * l - label_sum) * inverse, (h * s - size_sum) * inverse
        possible = (before & np.uint64(1)).astype(bool) & (_cell(before) == cell)
        possible &= (label < _LARGEST_LABEL) & (size < _LARGEST_SIZE)
        for k in np.flatnonzero(possible).tolist():
            gone = here[k] < 0
            yield _Change(
                None if gone else int(here[k]),
                bool(names) and not gone,
                int(label[k]),
                int(size[k]),
            )


def _inverse(odd: UInt64[np.ndarray, " N"]) -> UInt64[np.ndarray, " N"]:
    """Returns what odd numbers must be multiplied by to give 1 modulo 2**64."""
    inverse = odd  # Right in 3 bits; Newton's method doubles them.
    for _ in range(5):
        inverse = inverse * (np.uint64(2) - odd * inverse)
    return inverse


def _in_words(changes: list[_Change], here: Entries, class_names) -> Iterator[str]:
    """Describes changes, at most a few of each kind."""
    told: dict[str, list[str]] = {}
    _, labels, sizes = _hashed(here)

    def class_of(label: int) -> str:
        known = 0 < label <= len(class_names)
        return repr(class_names[label - 1]) if known else str(label - 1)

    def tell(kind: str, text: str) -> None:
        told.setdefault(kind, []).append(text)

    per_record = here.what != "shards"
    gone = [change for change in changes if change.now is None]
    for change in changes:
        if change.now is None:
            continue
        i, old = change.now, change
        if change.label is None:  # It may be one that has gone under another name.
            # A size tells an image again; where it is unknown, only its class may.
            alike = (g for g in gone if g.size == sizes[i])
            if here.sizes is None:
                alike = (g for g in gone if g.label == labels[i])
            old = min(alike, key=lambda g: g.label != labels[i], default=None)
            if old is None:
                tell("new", repr(here.names[i]))
                continue
            gone.remove(old)
        renamed = change.renamed or old is not change
        moved = old.label != labels[i]
        if renamed and old.size != sizes[i]:
            tell("new", repr(here.names[i]))
            gone.append(old)
        elif moved and per_record:
            classes = f"{class_of(old.label)}, now {class_of(int(labels[i]))}"
            tell("moved to another class", f"{here.names[i]!r} (was {classes})")
        elif renamed:
            tell("renamed", f"{here.names[i]!r} (had another name)")
        elif moved:
            tell("with other labels", repr(here.names[i]))
        elif here.what == "image files":
            size = f"{int(old.size):,} bytes, now {int(sizes[i]):,}"
            tell("replaced", f"{here.names[i]!r} (was {size})")
        else:
            tell("replaced", repr(here.names[i]))
    for old in gone:
        tell("gone", f"one of class {class_of(old.label)}" if old.label else "one")
    for kind, texts in told.items():
        yield f"{here.what} {kind}: {', '.join(texts[:_EXAMPLES])}" + (
            ", ..." if len(texts) > _EXAMPLES else ""
        )


def _in_all(difference: UInt64[np.ndarray, "cells 4"], what: str) -> str:
    """Describes what differs where no single entry can be named."""
    number, names, labels, _ = difference.any(0)
    part = "sizes or contents"
    if number or names:
        part = "names"
    elif labels:
        part = "labels"
    return f"{part} of {what} differ"

"""Fingerprints of training data, which a resumed run compares.

Each entry of a data set (an image file, a shard, a record in memory) has a name below
the data set's folder, a label, and a size or checksum. A fingerprint has a digest of
each of these, so that equal data have equal fingerprints at any path and on any host.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

# Record ids of a user's source are read one by one; if there are more, only every n-th.
NAMES = 200_000
_MEMORY = 2**30  # Images in memory are hashed up to this number of bytes.
_PARTS = ("names", "labels", "sizes")


class Entries(NamedTuple):
    """Entries of a source that identify its records.

    Attributes:
      what: name of an entry in the plural: "image files", "shards" or "records".
      names: one name per entry, which does not depend on the data's location.
      labels: class numbers, or a checksum of the labels of a shard; None if unknown.
      sizes: bytes or checksums, integers from 0 on; None if unknown.
      more: names of other parts of records, such as "captions", each with any value
        whose `repr` is equal for equal data. Parts that `sizes` cover are left out.
    """

    what: str
    names: Sequence[str]
    labels: Integer[np.ndarray, " N"] | None
    sizes: Integer[np.ndarray, " N"] | None
    more: Mapping[str, object] = {}


def in_memory(names: Sequence[str], labels, images) -> Entries:
    """Returns the entries of records in memory, with checksums of their uint8 images."""
    sizes = None
    if images is not None and images.nbytes <= _MEMORY:
        sums = (zlib.crc32(np.ascontiguousarray(image)) for image in images)
        sizes = np.fromiter(sums, np.int64, len(images))
    return Entries("records", names, labels, sizes)


def fingerprint(source) -> dict[str, str | int]:
    """Returns a value for JSON that is equal for equal training data.

    It is computed from the entries of a source, and no image file is read.
    """
    entries = source.entries()
    # File names may contain bytes that are not UTF-8.
    contents = {"names": "\0".join(entries.names).encode("utf-8", "surrogateescape")}
    for part in ("labels", "sizes"):
        if (values := getattr(entries, part)) is not None:
            contents[part] = np.asarray(values, "<i8").tobytes()
    contents |= {part: repr(value).encode() for part, value in entries.more.items()}
    return {
        "what": entries.what,
        "records": len(source),
        "class_names": zlib.crc32("\n".join(source.class_names).encode()),
    } | {
        f"{part}_sha256": hashlib.sha256(contents[part]).hexdigest()[:16]
        if part in contents
        else ""
        for part in (*_PARTS, *entries.more)
    }


def unchecked(stored: dict, parts: Sequence[str]) -> str:
    """Returns a line on the parts of the data that a resume cannot compare, or "".

    Args:
      stored: result of `fingerprint`.
      parts: parts that the run reads, such as "labels".
    """
    parts = sorted({"sizes", *parts})
    lacking = [part for part in parts if not stored.get(f"{part}_sha256")]
    if not lacking or stored["what"] == "shards":  # Their checksums cover all.
        return ""
    return (
        f"data.check compares the names of the {stored['what']} but not their "
        f"{' and '.join(lacking)}: the source has no method `entries` that returns them"
    )


def differences(stored: dict, source) -> list[str]:
    """Returns a line for each difference between a source and a stored fingerprint.

    Parts that an earlier version did not store are not compared.
    """
    now = fingerprint(source)
    changed = {key for key in stored.keys() & now.keys() if stored[key] != now[key]}
    what, lines = now["what"], []
    if "what" in changed:
        return [f"{what} were {stored['what']}"]
    if "class_names" in changed:
        lines.append("the class names or their order differ")
    if "records" in changed:
        lines.append(f"{stored['records']:,} records are now {now['records']:,}")
    if "names_sha256" in changed:  # Then everything else differs too.
        return [*lines, f"names of the {what} or their order differ"]
    kept = (key.removesuffix("_sha256") for key in now if key in changed)
    parts = [part for part in kept if part not in ("what", "records", "class_names")]
    contents = {"sizes": "sizes or contents"}
    return lines + [
        f"{contents.get(part, part)} of the {what} differ" for part in parts
    ]

"""A small value that tells whether two starts of a run train on the same data.

Each entry of a data set (an image file, a shard, a record in memory) is known by its
name below the data set's folder, its label, and its size or checksum. The value has a
digest of each of these, so that equal data give equal values at any path and on any host.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

# Names of a user's own source are asked for one by one; beyond this every n-th.
NAMES = 200_000
_MEMORY = 2**30  # Bytes of images in memory up to which they are hashed.
_PARTS = ("names", "labels", "sizes", "captions")


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


def in_memory(names: Sequence[str], labels, images) -> Entries:
    """Returns the entries of records in memory, with checksums of their uint8 images."""
    sizes = None
    if images is not None and images.nbytes <= _MEMORY:
        sums = (zlib.crc32(np.ascontiguousarray(image)) for image in images)
        sizes = np.fromiter(sums, np.int64, len(images))
    return Entries("records", names, labels, sizes)


def fingerprint(source) -> dict[str, str | int]:
    """Returns a value for JSON that is equal for equal training data.

    It does not depend on where the data lies, and reads no image from disk.

    Args:
      source: data set, whose `entries` are taken.
    """
    here = source.entries()
    # Names of files may hold bytes that are no UTF-8.
    contents = {"names": "\0".join(here.names).encode("utf-8", "surrogateescape")}
    for part in ("labels", "sizes"):
        if (values := getattr(here, part)) is not None:
            contents[part] = np.asarray(values, "<i8").tobytes()
    if here.captions is not None:
        contents["captions"] = repr(list(here.captions.items())).encode()
    return {
        "what": here.what,
        "records": len(source),
        "class_names": zlib.crc32("\n".join(source.class_names).encode()),
    } | {
        f"{part}_sha256": hashlib.sha256(contents[part]).hexdigest()[:16]
        if part in contents
        else ""
        for part in _PARTS
    }


def unchecked(stored: dict, *, labelled: bool, captioned: bool = False) -> str:
    """Returns a line on what of the data is not compared at a resume, or "".

    Args:
      stored: from `fingerprint`.
      labelled: whether the run reads labels.
      captioned: whether it reads captions.
    """
    parts = ("labels",) * labelled + ("sizes",) + ("captions",) * captioned
    lacking = [part for part in parts if not stored[f"{part}_sha256"]]
    if not lacking or stored["what"] == "shards":  # Whose checksums cover the labels.
        return ""
    return (
        f"data.check compares the names of the {stored['what']} but not their "
        f"{' and '.join(lacking)}: the source has no method `entries` that tells them"
    )


def differences(stored: dict, source) -> list[str]:
    """Lists in words how a source differs from the one of a fingerprint.

    Args:
      stored: from `fingerprint`, of an earlier start. What an earlier version did not
        store is not compared.
      source: data set of this start.

    Returns:
      One line for each kind of difference; empty if there is none.
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
    if "names_sha256" in changed:  # With other names, all else differs too.
        return [*lines, f"names of the {what} or their order differ"]
    more = (part for part in _PARTS if f"{part}_sha256" in changed)
    contents = {"sizes": "sizes or contents"}
    return lines + [f"{contents.get(part, part)} of the {what} differ" for part in more]

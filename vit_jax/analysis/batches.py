"""Images on their way to the networks that look at them, some at a time."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import UInt8

from vit_jax.analysis.subject import Subject
from vit_jax.data import decode
from vit_jax.evaluation import inputs


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some images.

    Attributes:
      names: of their files.
      originals: as they are in the files, RGB, of any sizes; of those in front only, as
        many as were asked for.
      pixels: prepared for each subject: (B, Y, X, C) of its own.
    """

    names: list[str]
    originals: list[UInt8[np.ndarray, "_ _ 3"]]
    pixels: list[UInt8[np.ndarray, "_ _ _ _"]]

    def first(self, count: int) -> "Batch":
        """Returns the images in front."""
        return Batch(
            self.names[:count],
            self.originals[:count],
            [of_subject[:count] for of_subject in self.pixels],
        )


def read(
    images: Iterable[inputs.Named],
    subjects: Sequence[Subject],
    size: int,
    tell: Callable[[str, str], None],
    *,
    originals: int = 0,
    least: int = 0,
) -> Iterator[Batch]:
    """Reads images, some ahead in threads, each decoded once.

    Args:
      images: as from `evaluation.inputs.find`.
      subjects: that will see them.
      size: images of a batch; the last may have fewer.
      tell: is given the name of each image that cannot be read, and why.
      originals: how many images are kept as they are in the files, which takes memory:
        the first that can be read.
      least: images that the last batch has at least, if there are so many, and for
        which it may have up to `least` - 1 more than the others.
    """
    given = 0

    def load(image: inputs.Named):
        name, source = image
        return name, inputs.attempt(source, prepare)

    def prepare(data: bytes):
        # Some images before this one may not be counted yet: then it is kept for them.
        kept = given < originals
        # Grey is decoded as such, as it is wherever images are prepared.
        channels = {subject.channels for subject in subjects} | ({3} if kept else set())
        decoded = {count: decode.decode(data, count) for count in channels}
        prepared = [subject.prepare(decoded[subject.channels]) for subject in subjects]
        return decoded[3] if kept else None, prepared

    threads = min(8, os.cpu_count() or 1)
    whole = []
    for name, result in inputs.ahead(
        images, load, threads=threads, limit=max(2, threads)
    ):
        if isinstance(result, str):
            tell(name, result)
            continue
        original, prepared = result
        whole.append((name, original if given < originals else None, prepared))
        given += 1
        if len(whole) == size + least:
            yield _batch(whole[:size])
            whole = whole[size:]
    if whole:
        yield _batch(whole)


def _batch(whole) -> Batch:
    names, originals, prepared = zip(*whole, strict=True)
    return Batch(
        list(names),
        [original for original in originals if original is not None],
        [np.stack(of_subject) for of_subject in zip(*prepared, strict=True)],
    )
